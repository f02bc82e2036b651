"""The prepared samples on disk: `run_dir/prepare/samples` (Arrow, via `datasets`) and `summary.json` beside it.

Columns: `sample_id` (unique), `conversation_id`, `split` ("train" or "heldout"), `input_ids` [T] and `loss_mask` [T]. The summary
holds the counts, the tokenizer's identity, `answers_from_target` and `digest`, which stands for every id, mask, name and split.
`summary.json` is written last and removed first: without it no reader takes the folder for whole.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets.arrow_writer import ArrowWriter

from dflash_train.atomic import atomic_path, write_json
from dflash_train.conversations import Messages
from dflash_train.errors import UserError

COLUMNS = {
    "sample_id": datasets.Value("string"),
    "conversation_id": datasets.Value("string"),
    "input_ids": datasets.List(datasets.Value("int32")),
    "loss_mask": datasets.List(datasets.Value("bool")),
}


@dataclass(frozen=True)
class PreparedSamples:
    dataset: datasets.Dataset
    summary: dict[str, Any]


def load_samples(prepare_dir: Path) -> PreparedSamples:
    """Raises UserError when stage=prepare has not ended in this folder."""
    summary_path, samples_dir = prepare_dir / "summary.json", prepare_dir / "samples"
    for path in (summary_path, samples_dir):
        if not path.exists():
            raise UserError(f"{path} is missing: run stage=prepare first")
    try:
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        return PreparedSamples(datasets.load_from_disk(str(samples_dir)), summary)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {prepare_dir}: {error}; run stage=prepare again") from error


def sample_sizes(dataset: datasets.Dataset) -> tuple[list[int], list[int]]:
    """Tokens and supervised tokens of every sample, without reading the ids."""
    num_tokens: list[int] = []
    num_supervised: list[int] = []
    for chunk in dataset.data.column("loss_mask").chunks:
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False).astype("int64")
        ends = lengths.cumsum()
        total = np.concatenate([[0], chunk.flatten().to_numpy(zero_copy_only=False).cumsum(dtype="int64")])
        num_tokens += lengths.tolist()
        num_supervised += (total[ends] - total[ends - lengths]).tolist()
    return num_tokens, num_supervised


def save_samples(prepare_dir: Path, dataset: datasets.Dataset, summary: dict[str, Any]) -> None:
    """Replaces the folder's samples and summary; `digest` is added to the summary. Other processes never see half of either."""
    summary = summary | {"digest": samples_digest(dataset)}
    with atomic_path(prepare_dir / "samples") as temporary:
        save_quietly(dataset, temporary)
        (prepare_dir / "summary.json").unlink(missing_ok=True)
        shutil.rmtree(prepare_dir / "samples", ignore_errors=True)
    write_json(prepare_dir / "summary.json", summary)


def write_rows(path: Path, columns: dict[str, Any], rows: Iterable[dict[str, Any]]) -> datasets.Dataset:
    """Streams `rows` into the Arrow file `path` and opens it memory-mapped. Raises UserError when the disk is full."""
    try:
        with ArrowWriter(path=str(path), features=datasets.Features(columns), writer_batch_size=256) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error
    return datasets.Dataset.from_file(str(path))


def save_quietly(dataset: datasets.Dataset, folder: Path) -> None:
    """`save_to_disk` without its progress bar."""
    was_shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if was_shown:
            datasets.enable_progress_bars()


def prompt_hash(messages: Messages, seed: int) -> int:
    """64 bits of the system texts and the first user turn: rows that ask the same get the same split."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    user = next((message["content"] for message in messages if message["role"] == "user"), "")
    text = json.dumps([seed, system, user], ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def assign_splits(prompt_hashes: Sequence[int], heldout_share: float) -> list[str]:
    """One split per sample from its `prompt_hash`.

    The share holds on average. With two prompts or more and a share above 0 neither side stays empty: the prompt with the smallest
    hash is held out, or the one with the largest trains. A single prompt trains.
    """
    prompts = set(prompt_hashes)
    heldout = {prompt for prompt in prompts if prompt < heldout_share * 2**64}
    if heldout_share > 0 and not heldout:
        heldout = {min(prompts)}
    if heldout == prompts:
        heldout.discard(max(prompts))
    return ["heldout" if prompt in heldout else "train" for prompt in prompt_hashes]


def samples_digest(dataset: datasets.Dataset) -> str:
    """xxh3_128 over all columns, in the order of the samples; the same however Arrow cut the columns into chunks."""
    digest = xxhash.xxh3_128()
    for name in sorted(dataset.column_names):
        digest.update(f"|{name}|".encode())
        for chunk in dataset.data.column(name).chunks:
            digest.update(_values(chunk))
        for chunk in dataset.data.column(name).chunks:
            digest.update(_lengths(chunk))
    return digest.hexdigest()


def _values(chunk: Any) -> bytes:
    """The values of one Arrow chunk of lists or strings, one after the other."""
    if isinstance(chunk, pa.ListArray):
        return chunk.flatten().to_numpy(zero_copy_only=False).tobytes()
    return "".join(chunk.to_pylist()).encode()


def _lengths(chunk: Any) -> bytes:
    lengths = chunk.value_lengths() if isinstance(chunk, pa.ListArray) else pc.binary_length(chunk)
    return lengths.to_numpy(zero_copy_only=False).astype("int64").tobytes()
