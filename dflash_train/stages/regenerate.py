"""stage=regenerate: the target's own greedy answers to prompts, kept as token ids and text.

In: `regenerate.prompts` (JSONL) and the target. Out, in run_dir/regenerate: `answers.jsonl` in the order of the prompts, one
`{"id", "messages", "prompt_ids", "answer_ids", "answer", "finish", "target"}` a line, `rejected.jsonl` and `summary.json`.
`finish` is "stop" when the answer ends with a stop token, which it keeps, and "length" at `regenerate.max_new_tokens`.

The prompts are sorted by length and dealt into chunks of `regenerate.sequences_per_forward`, from data and settings alone. Rank r
answers the chunks r, r+W, ... and writes each as one whole file in `parts/`. A later launch, with any number of processes, computes
the chunks that are missing; `plan.json` says what the parts were made from, and a run that differs is refused.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from dflash_train.atomic import TEMPORARY_PREFIX, atomic_path, write_json, write_text
from dflash_train.chat import ChatTemplate
from dflash_train.config import Config, Stage
from dflash_train.conversations import RowLedger, RowRejected, content_digest, read_prompts
from dflash_train.errors import UserError
from dflash_train.launch import from_main_process, make_accelerator
from dflash_train.progress import Progress
from dflash_train.run_folder import open_stage_dir
from dflash_train.samples import samples_digest, save_quietly, write_rows
from dflash_train.target import (
    Target,
    check_layers_and_mask,
    eos_token_ids,
    load_config,
    load_target,
    load_tokenizer,
    target_dir,
    target_identity,
    tokenizer_identity,
)

_PROMPT_COLUMNS = {
    "id": datasets.Value("string"),
    "messages": datasets.Value("string"),  # JSON
    "prompt_ids": datasets.List(datasets.Value("int32")),
}


def run(config: Config) -> None:
    """Answers every prompt. Raises UserError for unusable prompts and for a folder that holds answers of another plan."""
    if not config.regenerate.prompts:
        raise UserError("regenerate.prompts is empty: name at least one JSONL file of prompts")
    accelerator = make_accelerator()
    folder = open_stage_dir(config, Stage.regenerate, is_main_process=False)
    tokenizer = load_tokenizer(config.target)
    target_config = load_config(config.target)
    # a mistake in the settings of later stages is told now, not after hours of answering
    check_layers_and_mask(config.target, target_config, tokenizer, config.features.layer_ids, config.drafter.mask_token_id)
    stop_ids = eos_token_ids(config.target, target_config)
    rows = from_main_process(accelerator, lambda: _write_plan(config, folder, tokenizer, stop_ids))
    prompts = datasets.load_from_disk(str(folder / "prompts"))
    chunks = plan_chunks(prompts, config.regenerate.sequences_per_forward)
    # one process looks: a slower one would already see parts that this launch writes
    missing = from_main_process(accelerator, lambda: [i for i in range(len(chunks)) if not part_path(folder, i).exists()])
    if missing := missing[accelerator.process_index :: accelerator.num_processes]:
        target = load_target(config.target, accelerator.device)
        answerer = Answerer(target, tokenizer, stop_ids, config.regenerate.max_new_tokens)
        _answer_chunks(folder, prompts, chunks, missing, answerer, accelerator.is_main_process)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _join(folder, prompts, chunks, rows)


def plan_chunks(prompts: datasets.Dataset, sequences_per_forward: int) -> list[np.ndarray]:
    """Rows of `prompts` that are decoded together, the longest first: what does not fit into memory shows at once."""
    lengths = prompts.data.column("prompt_ids").combine_chunks().value_lengths().to_numpy()
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    return [order[i : i + sequences_per_forward] for i in range(0, len(order), sequences_per_forward)]


def part_path(folder: Path, chunk: int) -> Path:
    return folder / "parts" / f"part-{chunk:06d}.jsonl"


class Answerer:
    """Greedy decoding of a batch. The target's own sampling defaults (temperature, repetition penalty, ...) are set aside."""

    def __init__(self, target: Target, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], max_new_tokens: int) -> None:
        self._model, self._device, self._tokenizer, self._stop_ids = target.model, target.device, tokenizer, stop_ids
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)
        self._model.generation_config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids) or None, pad_token_id=self._pad_id
        )

    @torch.no_grad()
    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """Token ids per prompt, up to and including the first stop token. The prompts are padded on the left."""
        width = max(len(ids) for ids in prompts)
        input_ids_BT = torch.tensor([[self._pad_id] * (width - len(ids)) + ids for ids in prompts], device=self._device)
        attention_mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self._device)
        try:
            output_BT = self._model.generate(input_ids=input_ids_BT, attention_mask=attention_mask_BT)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on {self._device} with {len(prompts)} prompts of up to {width} tokens: "
                "run again with a smaller regenerate.sequences_per_forward"
            ) from error
        return [self._until_stop(ids) for ids in output_BT[:, width:].tolist()]

    def row(self, prompt: dict[str, Any], answer_ids: list[int], target: str) -> str:
        """One line of answers.jsonl."""
        values = {
            "id": prompt["id"],
            "messages": json.loads(prompt["messages"]),
            "prompt_ids": prompt["prompt_ids"],
            "answer_ids": answer_ids,
            "answer": self._tokenizer.decode(answer_ids, skip_special_tokens=True),
            "finish": "stop" if answer_ids[-1] in self._stop_ids else "length",
            "target": target,
        }
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n"

    def _until_stop(self, ids: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(ids, start=1) if token in self._stop_ids), len(ids))
        return ids[:end]


def _write_plan(config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> dict[str, Any]:
    """Writes `rejected.jsonl`, `prompts/` and `plan.json`, or refuses a folder that another plan has begun; returns the rows' account."""
    chat = ChatTemplate(tokenizer, config.data.template_kwargs, stop_ids)
    rows_path = folder / f"{TEMPORARY_PREFIX}prompts.arrow"
    try:
        with atomic_path(folder / "rejected.jsonl") as temporary, temporary.open("w", encoding="utf-8") as rejected:
            ledger = RowLedger(rejected, config.data.strict)
            prompts = write_rows(rows_path, _PROMPT_COLUMNS, _prompt_rows(config, chat, ledger))
            plan = _plan(config, tokenizer, stop_ids, prompts)
            _refuse_other_plan(folder, plan)
        ledger.require_some("regenerate.prompts")
        if not _is_begun(folder):
            _begin(folder, prompts, plan)
    finally:
        rows_path.unlink(missing_ok=True)
    open_stage_dir(config, Stage.regenerate)
    return ledger.summary()


def _begin(folder: Path, prompts: datasets.Dataset, plan: dict[str, Any]) -> None:
    for leftover in ("prompts", "parts"):  # of a launch that was killed before its first answers
        shutil.rmtree(folder / leftover, ignore_errors=True)
    with atomic_path(folder / "prompts") as temporary:
        save_quietly(prompts, temporary)
    (folder / "parts").mkdir()
    write_json(folder / "plan.json", plan)


def _is_begun(folder: Path) -> bool:
    """Whether answers of the plan in `folder` exist; a plan without any may be replaced."""
    return (folder / "plan.json").exists() and any((folder / "parts").glob("part-*.jsonl"))


def _plan(config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], prompts: datasets.Dataset) -> dict[str, Any]:
    """Everything the answers depend on."""
    return {
        "prompts": samples_digest(prompts),
        "target": content_digest(target_identity(target_dir(config.target))),
        "target_dtype": str(config.target.dtype),
        "tokenizer": content_digest(tokenizer_identity(tokenizer, config.data.template_kwargs)),
        "stop_ids": sorted(stop_ids),
        "max_new_tokens": config.regenerate.max_new_tokens,
        "sequences_per_forward": config.regenerate.sequences_per_forward,
    }


def _refuse_other_plan(folder: Path, plan: dict[str, Any]) -> None:
    if not _is_begun(folder):
        return
    begun = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    for name, value in plan.items():
        if begun.get(name) != value:
            raise UserError(
                f"{folder} holds answers made with another `{name}` ({begun.get(name)} there, {value} now): choose another run_dir"
            )


def _prompt_rows(config: Config, chat: ChatTemplate, ledger: RowLedger) -> Iterator[dict[str, Any]]:
    room = config.data.max_tokens - 1
    for prompt in read_prompts(config.regenerate.prompts, ledger):
        with ledger.rejecting(prompt.place, prompt.id):
            prompt_ids = chat.prompt_ids(prompt.messages)
            if len(prompt_ids) > room:
                raise RowRejected(
                    f"prompt too long: {len(prompt_ids)} tokens, data.max_tokens={config.data.max_tokens} leaves room for {room}"
                )
            yield {"id": prompt.id, "messages": json.dumps(prompt.messages, ensure_ascii=False), "prompt_ids": prompt_ids}


def _answer_chunks(
    folder: Path, prompts: datasets.Dataset, chunks: list[np.ndarray], missing: list[int], answerer: Answerer, is_main_process: bool
) -> None:
    """Answers and writes this process's missing chunks."""
    target = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["target"]
    started, num_tokens = time.monotonic(), 0
    total = sum(len(chunks[i]) for i in missing)
    with Progress("regenerate", total=total, unit="answers", enabled=is_main_process) as progress:
        for i in missing:
            batch = [prompts[int(row)] for row in chunks[i]]
            answers = answerer.answer([prompt["prompt_ids"] for prompt in batch])
            lines = [answerer.row(prompt, ids, target) for prompt, ids in zip(batch, answers, strict=True)]
            write_text(part_path(folder, i), "".join(lines))
            num_tokens += sum(map(len, answers))
            progress.advance(len(batch), note=f"{num_tokens / (time.monotonic() - started):,.0f} tokens/s in this process")


def _join(folder: Path, prompts: datasets.Dataset, chunks: list[np.ndarray], rows: dict[str, Any]) -> None:
    """Writes `answers.jsonl` in the order of the prompts, from the parts, and `summary.json`."""
    places: list[tuple[int, int]] = [(0, 0)] * len(prompts)  # chunk and byte offset per prompt
    for chunk, members in enumerate(chunks):
        for member, offset in zip(members, _line_offsets(part_path(folder, chunk), len(members)), strict=True):
            places[member] = (chunk, offset)
    num_tokens, finishes = 0, Counter()
    with atomic_path(folder / "answers.jsonl") as temporary, temporary.open("wb") as answers:
        for chunk, offset in places:
            with part_path(folder, chunk).open("rb") as part:
                part.seek(offset)
                line = part.readline()
            answers.write(line)
            row = json.loads(line)
            num_tokens += len(row["answer_ids"])
            finishes[row["finish"]] += 1
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    summary = {"rows": rows} | plan | {"answers": len(places), "answer_tokens": num_tokens, "finish": dict(sorted(finishes.items()))}
    write_json(folder / "summary.json", summary)
    print(_sentence(folder, summary))


def _line_offsets(path: Path, num_lines: int) -> list[int]:
    offsets, end = [], 0
    with path.open("rb") as part:
        for line in part:
            offsets.append(end)
            end += len(line)
    if len(offsets) != num_lines:
        raise UserError(f"{path} holds {len(offsets)} answers, its plan has {num_lines}: delete it and run stage=regenerate again")
    return offsets


def _sentence(folder: Path, summary: dict[str, Any]) -> str:
    rows, finish = summary["rows"], summary["finish"]
    return (
        f"regenerate: {summary['answers']:,} answers, {summary['answer_tokens']:,} tokens "
        f"({finish.get('stop', 0):,} stopped, {finish.get('length', 0):,} at the limit of {summary['max_new_tokens']} tokens); "
        f"{rows['rejected']:,} rows rejected, {rows['folded']:,} doubles -> {folder / 'answers.jsonl'}"
    )
