"""stage=prepare: chats, or the answers of stage=regenerate, become token ids with a loss mask, split into train and held out.

In: `data.files` (empty: run_dir/regenerate/answers.jsonl), the target's tokenizer and config. Out, in run_dir/prepare: `samples/` and
`summary.json` (samples.py) and `rejected.jsonl`, which lists every row that could not be used with its file, line, id and reason.
Nothing of an earlier run is touched before the new samples are whole.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dflash_train.atomic import TEMPORARY_PREFIX, atomic_path
from dflash_train.chat import ChatTemplate, TokenSample
from dflash_train.config import Config, Stage
from dflash_train.conversations import Conversation, RowLedger, RowRejected, content_digest, read_conversations
from dflash_train.errors import UserError
from dflash_train.launch import refuse_several_processes
from dflash_train.layers import check_mask_token_id
from dflash_train.progress import Progress
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.samples import COLUMNS, assign_splits, load_samples, prompt_hash, save_samples, write_rows
from dflash_train.target import (
    check_layers_and_mask,
    load_config,
    load_tokenizer,
    special_token_ids,
    target_dir,
    target_identity,
    text_config,
    tokenizer_identity,
)

_PERCENTILES = (0, 50, 90, 99, 100)


def run(config: Config) -> None:
    """Raises UserError for missing files, layer ids the target lacks, a clash of ids, a mask token the data uses, or no usable row."""
    refuse_several_processes("prepare")
    folder = open_stage_dir(config, Stage.prepare, is_main_process=False)
    files = _files(config)
    tokenizer, target_config = load_tokenizer(config.target), load_config(config.target)
    text = text_config(target_config)
    check_layers_and_mask(config.target, target_config, tokenizer, config.features.layer_ids, config.drafter.mask_token_id)
    vocabulary = _Vocabulary(text.vocab_size, special_token_ids(config.target, target_config, tokenizer))
    chat = ChatTemplate(tokenizer, config.data.template_kwargs, vocabulary.special["eos"])
    sampler = _Sampler(chat, config.data.max_tokens, vocabulary.num_rows, config.seed)
    rows_path = folder / f"{TEMPORARY_PREFIX}samples.arrow"
    try:
        dataset, rows = _write_rows(config, files, sampler, rows_path)
        vocabulary.check_mask_token(config.drafter.mask_token_id, _used_ids(dataset))
        dataset = dataset.add_column("split", assign_splits(sampler.prompt_hashes, config.data.heldout_share))
        identity = {
            "tokenizer": tokenizer_identity(tokenizer, config.data.template_kwargs),
            "answers_from_target": _answers_from_target(config, sampler.origins),
        }
        save_samples(folder, dataset, {"rows": rows} | _counts(dataset, sampler) | identity)
    finally:
        rows_path.unlink(missing_ok=True)
    open_stage_dir(config, Stage.prepare)
    _report(folder, tokenizer, config.data.preview)


@dataclass(frozen=True)
class _Vocabulary:
    """Rows of the target's embedding, and the ids of the roles the mask token must not have."""

    num_rows: int
    special: dict[str, frozenset[int]]

    def check_mask_token(self, mask_token_id: int, used: Collection[int]) -> None:
        check_mask_token_id(mask_token_id, self.num_rows, self.special, used)


@dataclass
class _Sampler:
    """Turns conversations into samples that fit, and notes what the samples alone do not tell."""

    chat: ChatTemplate
    max_tokens: int
    num_embedding_rows: int
    seed: int
    prompt_hashes: list[int] = field(default_factory=list)  # one per sample
    origins: set[str | None] = field(default_factory=set)  # target digests of the answers; None: nobody knows
    num_cut: int = 0
    num_turns_left_out: int = 0

    def rows(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Rows of the dataset; raises RowRejected when none is left."""
        samples = self.chat.samples(conversation)
        fitting = [sample for sample in samples if sample.cut(self.max_tokens).has_supervised_pair]
        if not fitting:
            raise RowRejected(self._why_none(samples))
        for sample in fitting:
            self._check_ids(sample)
        self.num_cut += sum(len(sample.input_ids) > self.max_tokens for sample in fitting)
        self.num_turns_left_out += len(samples) - len(fitting)
        self.prompt_hashes += [prompt_hash(conversation.messages, self.seed)] * len(fitting)
        self.origins.add(conversation.answer.target if conversation.answer else None)
        return [self._row(conversation, sample.cut(self.max_tokens)) for sample in fitting]

    def _why_none(self, samples: list[TokenSample]) -> str:
        if not any(sample.has_supervised_pair for sample in samples):
            return "too little to learn: no two supervised tokens in a row"
        return f"too long: supervision begins after data.max_tokens={self.max_tokens}"

    def _check_ids(self, sample: TokenSample) -> None:
        largest = max(sample.input_ids)
        if largest >= self.num_embedding_rows:
            raise RowRejected(f"not a token of the target: id {largest}, its embedding has {self.num_embedding_rows} rows")

    def _row(self, conversation: Conversation, sample: TokenSample) -> dict[str, Any]:
        name = conversation.id if sample.turn is None else f"{conversation.id}#turn{sample.turn + 1}"
        return {
            "sample_id": name,
            "conversation_id": conversation.id,
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
        }


def _files(config: Config) -> list[str]:
    if config.data.files:
        return list(config.data.files)
    answers = stage_dir(config, Stage.regenerate) / "answers.jsonl"
    if not answers.exists():
        raise UserError(f"data.files is empty and {answers} does not exist: name JSONL files, or run stage=regenerate first")
    return [str(answers)]


def _write_rows(config: Config, files: list[str], sampler: _Sampler, rows_path: Path) -> tuple[datasets.Dataset, dict[str, Any]]:
    """The samples, not yet split, and the account of the rows they come from; writes `rejected.jsonl` beside them."""
    with atomic_path(rows_path.with_name("rejected.jsonl")) as temporary, temporary.open("w", encoding="utf-8") as rejected:
        ledger = RowLedger(rejected, config.data.strict)
        dataset = write_rows(rows_path, COLUMNS, _sample_rows(config, files, sampler, ledger))
    ledger.require_some("data.files")
    return dataset, ledger.summary()


def _sample_rows(config: Config, files: list[str], sampler: _Sampler, ledger: RowLedger) -> Iterator[dict[str, Any]]:
    conversations = read_conversations(files, config.data.format, ledger)
    with Progress("prepare", total=_count_lines(files), unit="rows") as progress:
        for conversation in conversations:
            with ledger.rejecting(conversation.place, conversation.id):
                yield from sampler.rows(conversation)
            progress.advance(ledger.num_read - progress.done)


def _count_lines(files: list[str]) -> int:
    num_lines = 0
    for file in files:
        with open(file, "rb") as stream:
            num_lines += sum(1 for _ in stream)
    return num_lines


def _used_ids(dataset: datasets.Dataset) -> set[int]:
    used: set[int] = set()
    for chunk in dataset.data.column("input_ids").chunks:
        used.update(np.unique(chunk.flatten().to_numpy()).tolist())
    return used


def _counts(dataset: datasets.Dataset, sampler: _Sampler) -> dict[str, Any]:
    lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in dataset.data.column("input_ids").chunks])
    supervised = np.concatenate([_sums(chunk) for chunk in dataset.data.column("loss_mask").chunks])
    splits, conversations = np.array(dataset["split"][:]), np.array(dataset["conversation_id"][:])
    return {
        "samples": len(dataset),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(supervised.sum()),
        "cut": sampler.num_cut,
        "turns_left_out": sampler.num_turns_left_out,
        "splits": {
            split: {
                "conversations": len(set(conversations[splits == split])),
                "samples": int((splits == split).sum()),
                "tokens": int(lengths[splits == split].sum()),
                "supervised_tokens": int(supervised[splits == split].sum()),
            }
            for split in ("train", "heldout")
        },
        "length_percentiles": {str(p): int(np.percentile(lengths, p, method="nearest")) for p in _PERCENTILES},
    }


def _sums(chunk: Any) -> np.ndarray:
    """Supervised tokens per sample of one Arrow chunk."""
    running = np.concatenate([[0], np.cumsum(chunk.flatten().to_numpy(zero_copy_only=False))])
    ends = np.cumsum(chunk.value_lengths().to_numpy())
    return np.diff(running[np.concatenate([[0], ends])])


def _answers_from_target(config: Config, origins: set[str | None]) -> str:
    """Whether the target itself wrote every answer: "true", "false" (another did), or "unknown" (chats do not say)."""
    stated = origins - {None}
    if stated and stated != {content_digest(target_identity(target_dir(config.target)))}:
        return "false"
    return "unknown" if None in origins else "true"


def _report(folder: Path, tokenizer: PreTrainedTokenizerBase, preview: int) -> None:
    prepared, console = load_samples(folder), Console()
    console.print(_table(prepared.summary, folder))
    for sample in prepared.dataset.select(range(min(preview, len(prepared.dataset)))):
        console.rule(Text(f"{sample['sample_id']} ({sample['split']}), what the drafter learns is in ⟦ ⟧"))
        console.print(_marked(sample, tokenizer))


def _table(summary: dict[str, Any], folder: Path) -> Table:
    rows, table = summary["rows"], Table(title=Text(f"prepared samples in {folder}"), show_header=False, title_justify="left")
    table.add_row("rows read", f"{rows['read']:,}")
    table.add_row("  kept", f"{rows['kept']:,}")
    table.add_row("  doubles folded", f"{rows['folded']:,}")
    table.add_row("  rejected", f"{rows['rejected']:,}" + (" (rejected.jsonl)" if rows["rejected"] else ""))
    for reason, count in list(rows["rejected_by_reason"].items())[:5]:
        table.add_row(Text(f"    {reason}"), f"{count:,}")
    table.add_row("samples", f"{summary['samples']:,} ({summary['cut']:,} cut, {summary['turns_left_out']:,} turns left out)")
    table.add_row("tokens", f"{summary['tokens']:,} ({summary['supervised_tokens'] / summary['tokens']:.1%} supervised)")
    for split, counts in summary["splits"].items():
        table.add_row(
            f"  {split}", f"{counts['conversations']:,} conversations, {counts['samples']:,} samples, {counts['tokens']:,} tokens"
        )
    table.add_row("tokens per sample", "  ".join(f"p{p}: {length:,}" for p, length in summary["length_percentiles"].items()))
    table.add_row("answers from this target", summary["answers_from_target"])
    return table


def _marked(sample: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The sample's text with its supervised spans marked, readable without colours too."""
    mask, text = np.array(sample["loss_mask"]), Text()
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1), len(mask)]
    for start, end in zip(edges, edges[1:], strict=False):
        piece = tokenizer.decode(sample["input_ids"][start:end])
        text.append(f"⟦{piece}⟧" if mask[start] else piece, style="bold green" if mask[start] else "dim")
    return text
