"""Stage `evaluate`: how many tokens a verification gains, by replay of stored answers and by real decoding with the target.

Reads a checkpoint, the held-out samples of the feature dataset and, to decode, the target. Writes `report.json`, `report.md` and
`acceptance.png` into `run_dir/evaluate`, and `rejected.jsonl` for prompt rows that cannot be used. Every process takes each W-th
prompt; the figures are made of all walks together, each counted once.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from dflash_train.acceptance import Walk, replay, right_prefix, stored_answers, summarize, tau
from dflash_train.capture import Capture
from dflash_train.chat import ChatTemplate
from dflash_train.checkpoint import choose_weights, load_drafter, resolve_checkpoint, weights_digest
from dflash_train.config import Config, Dtype, EvaluateMode, Stage, TargetConfig
from dflash_train.conversations import RowLedger, read_prompts
from dflash_train.decoding import Agreement, compare, plain, refuse_without_rollback, speculative
from dflash_train.drafter import DFlashDraftModel
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset, Sample, SampleRef
from dflash_train.launch import make_accelerator
from dflash_train.layers import FeatureContract
from dflash_train.progress import Progress
from dflash_train.report import console_lines, write_report
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.target import TargetEnds, contract_for, eos_token_ids, load_config, load_ends, load_target, load_tokenizer, text_config

HELDOUT = "heldout"
WARM_UP_TOKENS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """What to decode; `stored_answer` is a held-out sample's own first answer, None for prompts from files."""

    sample_id: str
    token_ids: list[int]
    stored_answer: list[int] | None = None


@dataclass(frozen=True)
class DecodedAnswer:
    """One prompt decoded both ways, reduced to what the report needs."""

    walk: Walk
    agreement: Agreement
    equals_stored: bool | None
    is_stored_whole: bool  # the limit of decoding does not cut the stored answer, so replay and decoding walk the same tokens
    num_tokens_plain: int
    num_tokens_speculative: int
    seconds_plain: float
    seconds_speculative: float


def run(config: Config) -> None:
    """Raises UserError for a checkpoint, features and target that do not belong together, and for a target that cannot decode."""
    accelerator = make_accelerator()
    folder = open_stage_dir(config, Stage.evaluate, accelerator.is_main_process)
    evaluation = Evaluation(config, accelerator, folder)
    report = evaluation.identity() | {"sets": evaluation.sets()}
    if accelerator.is_main_process:
        write_report(folder, report)
        print(f"wrote {folder / 'report.md'}")
        print("\n".join(console_lines(report)))
    accelerator.wait_for_everyone()


class Evaluation:
    """A checkpoint that is proven to fit the features and the target of the config, and the prompt sets it is measured on."""

    def __init__(self, config: Config, accelerator: Accelerator, folder: Path) -> None:
        self.config, self.accelerator, self.folder = config, accelerator, folder
        self.checkpoint = resolve_checkpoint(stage_dir(config, Stage.train), config.evaluate.checkpoint, "evaluate.checkpoint")
        self.weights = choose_weights(self.checkpoint, config.evaluate.weights, "evaluate.weights")
        drafter, self.state = load_drafter(self.checkpoint, accelerator.device, self.weights)
        self.drafter = drafter.to(_dtype(config.target)).eval()  # as served: in the target's dtype
        self.contract = FeatureContract.from_dict(self.state["contract"])
        settings = config.features
        wanted = contract_for(config.target, settings.layer_ids, settings.teacher_state, config.data.template_kwargs)
        self.contract.require_equal(wanted, f"checkpoint {self.checkpoint}", "the config with its target")
        needs_features = config.evaluate.mode != EvaluateMode.decode or not config.evaluate.prompts
        self.features = self._open_features() if needs_features else None
        self.ends = load_ends(config.target, accelerator.device, self.drafter.dtype)

    def _open_features(self) -> FeatureDataset:
        folder = stage_dir(self.config, Stage.extract)
        features = FeatureDataset(folder, self.config.train.allow_incomplete_features)
        self.contract.require_equal(features.contract, f"checkpoint {self.checkpoint}", f"features {folder}")
        if not features.refs(HELDOUT):
            raise UserError(f"{folder} holds no held-out sample: raise data.heldout_share, then run prepare and extract again")
        return features

    def identity(self) -> dict[str, Any]:
        """What the figures belong to."""
        return {
            "target": self.config.target.path,
            "checkpoint": self.checkpoint.name,
            "step": self.state["step"],
            "weights": weights_digest(self.checkpoint, self.weights),
            "weights_kind": str(self.weights),
            "block_size": self.drafter.block_size,
            "layer_ids": list(self.contract.layer_ids.ids),
            "drafter": self.drafter.config.to_dict(),
            "contract": self.contract.to_dict(),
            "dtype": str(self.drafter.dtype).removeprefix("torch."),
            "seed": self.config.seed,
        }

    def sets(self) -> list[dict[str, Any]]:
        """The sets of the report. The target comes first: one that cannot decode is refused before any other work."""
        settings = self.config.evaluate
        decoder = None if settings.mode == EvaluateMode.replay else Decoder(self.config, self.drafter, self.contract, self.ends)
        measured: list[dict[str, Any]] = []
        replayed: list[Walk] = []
        if settings.mode != EvaluateMode.decode:
            replayed = self._replay()
            measured.append(self._set(HELDOUT, "replay", replayed, self.features.manifest.answers_from_target))
        if decoder is not None and settings.prompts:
            measured += [self._decode(decoder, name, prompts, replayed=[]) for name, prompts in self._file_prompts().items()]
        elif decoder is not None:
            measured.append(self._decode(decoder, HELDOUT, self._heldout_prompts(), replayed))
        return measured

    def _set(self, name: str, mode: str, walks: Sequence[Walk], answers_from_target: str) -> dict[str, Any]:
        figures = summarize(walks, self.drafter.block_size, self.config.seed)
        return {"prompts": name, "mode": mode, **figures, "answers_from_target": answers_from_target}

    def _replay(self) -> list[Walk]:
        """The walks of all processes over the held-out answers."""
        refs = self._mine(self._heldout_refs())
        with self._progress("replay", len(refs)) as progress:
            walks = replay(
                self.drafter,
                self.ends,
                self._read(refs, progress),
                block_size=self.drafter.block_size,
                mask_token_id=self.drafter.mask_token_id,
                tokens_per_pack=self.config.train.tokens_per_pack,
            )
        return gather_object(walks)

    def _decode(self, decoder: "Decoder", name: str, prompts: Sequence[Prompt], replayed: Sequence[Walk]) -> dict[str, Any]:
        """The set of `prompts`, decoded by all processes; `replayed` are walks over the stored answers to the same prompts."""
        for prompt in prompts:
            decoder.room(prompt)  # a prompt that does not fit is told on every process, before hours of decoding
        mine = self._mine(prompts)
        for prompt in mine[:1]:
            decoder.decode(prompt, WARM_UP_TOKENS)
        answers: list[DecodedAnswer] = []
        with self._progress(f"decode {name}", len(mine)) as progress:
            for prompt in mine:
                answers.append(decoder.decode(prompt, self.config.evaluate.max_new_tokens))
                progress.advance(1, note=f"tau {tau(answer.walk for answer in answers) or 0:.2f}")
        answers = gather_object(answers)
        measured = self._set(name, "decode", [answer.walk for answer in answers], answers_from_target="true")
        return measured | decoding_figures(answers) | replay_figures(answers, replayed)

    def _heldout_refs(self) -> list[SampleRef]:
        return self.features.refs(HELDOUT)[: self.config.evaluate.max_prompts]

    def _heldout_prompts(self) -> list[Prompt]:
        """What stands before the first answer of each held-out sample."""
        prompts = []
        for sample in self._read(self._heldout_refs()):
            first = stored_answers(sample)[0]
            prompts.append(Prompt(sample.sample_id, sample.input_ids_T[: first.start].tolist(), first.token_ids))
        return prompts

    def _file_prompts(self) -> dict[str, list[Prompt]]:
        """The usable prompts of each file of `evaluate.prompts`, under its name and in the target's chat template."""
        tokenizer = load_tokenizer(self.config.target)
        template = ChatTemplate(
            tokenizer, self.config.data.template_kwargs, eos_token_ids(self.config.target, load_config(self.config.target))
        )
        files = {Path(file).stem: file for file in self.config.evaluate.prompts}
        if len(files) < len(self.config.evaluate.prompts):
            raise UserError(f"evaluate.prompts={list(self.config.evaluate.prompts)}: two files share a name, which names their prompt set")
        path = self.folder / "rejected.jsonl" if self.accelerator.is_main_process else os.devnull
        with open(path, "w", encoding="utf-8") as rejected:
            found = {name: self._usable_prompts(file, template, rejected) for name, file in files.items()}
        return {name: prompts[: self.config.evaluate.max_prompts] for name, prompts in found.items()}

    def _usable_prompts(self, file: str, template: ChatTemplate, rejected: TextIO) -> list[Prompt]:
        setting = f"evaluate.prompts={file}"
        ledger = RowLedger(rejected, self.config.data.strict)
        prompts = []
        for row in read_prompts([file], ledger, setting):
            with ledger.rejecting(row.place, row.id):
                prompts.append(Prompt(row.id, template.prompt_ids(row.messages)))
        ledger.require_some(setting)
        return prompts

    def _mine(self, items: Sequence[T]) -> list[T]:
        return list(items[self.accelerator.process_index :: self.accelerator.num_processes])

    def _progress(self, title: str, total: int) -> Progress:
        return Progress(f"evaluate: {title}", total, "answers", enabled=self.accelerator.is_main_process)

    def _read(self, refs: Sequence[SampleRef], progress: Progress | None = None) -> Iterator[Sample]:
        for ref in refs:
            yield self.features.read(ref, device=self.accelerator.device)
            if progress is not None:
                progress.advance(1)


class Decoder:
    """The loaded target with the drafter, decoding a prompt plainly and speculatively right after each other."""

    def __init__(self, config: Config, drafter: DFlashDraftModel, contract: FeatureContract, ends: TargetEnds) -> None:
        self.drafter, self.ends = drafter, ends
        self.target = load_target(config.target, drafter.device)
        refuse_without_rollback(self.target)
        self.capture = Capture(self.target, contract.layer_ids)
        self.eos_ids = eos_token_ids(config.target, self.target.config)

    def decode(self, prompt: Prompt, max_new_tokens: int) -> DecodedAnswer:
        """Raises UserError when the prompt leaves no room in the target's positions."""
        limit = min(max_new_tokens, self.room(prompt))
        drafting = self.drafter.block_size, self.drafter.mask_token_id
        baseline = plain(self.target, prompt.token_ids, limit, self.eos_ids)
        ours = speculative(
            self.target, self.capture, self.drafter, self.ends, prompt.token_ids, limit, self.eos_ids, *drafting, sample_id=prompt.sample_id
        )
        return DecodedAnswer(
            walk=ours.walk,
            agreement=compare(baseline, ours.token_ids),
            equals_stored=_agree(baseline.token_ids, prompt.stored_answer) if prompt.stored_answer else None,
            is_stored_whole=prompt.stored_answer is not None and len(prompt.stored_answer) <= limit,
            num_tokens_plain=len(baseline.token_ids),
            num_tokens_speculative=len(ours.token_ids),
            seconds_plain=baseline.seconds,
            seconds_speculative=ours.seconds,
        )

    def room(self, prompt: Prompt) -> int:
        """Answer tokens after which a whole block still has positions. Raises UserError when there is none."""
        positions = getattr(self.target.text_config, "max_position_embeddings", None)
        if positions is None:
            return sys.maxsize
        room = positions - self.drafter.block_size - len(prompt.token_ids)
        if room < 1:
            raise UserError(
                f"prompt {prompt.sample_id} has {len(prompt.token_ids)} tokens: with a block of {self.drafter.block_size} it does not fit "
                f"into the target's {positions} positions"
            )
        return room


def _agree(ours: Sequence[int], stored: Sequence[int]) -> bool:
    """Equal as far as both go: either may have been cut at a limit of its own."""
    return right_prefix(ours, stored) == min(len(ours), len(stored))


def _dtype(settings: TargetConfig) -> torch.dtype:
    if settings.dtype != Dtype.auto:
        return getattr(torch, settings.dtype)
    config = load_config(settings)
    return config.dtype or text_config(config).dtype or torch.float32


def decoding_figures(answers: Sequence[DecodedAnswer]) -> dict[str, Any]:
    """Speeds over all answers, and how the speculative answers stand to the plain ones."""
    agreements = Counter(answer.agreement for answer in answers)
    return {
        "tokens_per_second_plain": sum(a.num_tokens_plain for a in answers) / sum(a.seconds_plain for a in answers),
        "tokens_per_second_speculative": sum(a.num_tokens_speculative for a in answers) / sum(a.seconds_speculative for a in answers),
        "answers_compared": len(answers),
        "answers_equal": agreements[Agreement.equal],
        "answers_near_tie": agreements[Agreement.near_tie],
        "answers_different": agreements[Agreement.different],
    }


def replay_figures(answers: Sequence[DecodedAnswer], replayed: Sequence[Walk]) -> dict[str, Any]:
    """Replay of the stored answers to the decoded prompts beside it; a stored answer can differ where its batch rounded differently."""
    figures: dict[str, Any] = {}
    if any(answer.equals_stored is not None for answer in answers):
        figures["stored_answers_equal"] = sum(bool(answer.equals_stored) for answer in answers)
    first_walks = {walk.sample_id: walk for walk in reversed(replayed)}  # only a sample's first answer is decoded
    shared = [answer.walk for answer in answers if answer.is_stored_whole and answer.walk.sample_id in first_walks]
    replay_tau, decoded_tau = tau(first_walks[walk.sample_id] for walk in shared), tau(shared)
    if replay_tau is not None and decoded_tau is not None:
        figures |= {"replay_tau": replay_tau, "replay_compared": len(shared)}
        figures |= {"replay_decoded_tau": decoded_tau, "replay_difference_percent": 100 * (replay_tau / decoded_tau - 1)}
    return figures
