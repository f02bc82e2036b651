"""Writes shards from captured rows, in a thread of its own beside the next forward.

Comes in: a `ShardJob`, which knows all of a shard but its features, and one forward's rows after the other, on the device. Goes out: the
shard file, under its name once its last row is there and its checks have passed. Checks, encoding, the copy off the device, checksums
and writing all happen in the writer thread; in memory are the rows of a few forwards, whatever the size of a shard.
"""

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dflash_train.capture import Recomputed
from dflash_train.errors import UserError
from dflash_train.features.checks import ContentChecks, ContentError, SamplePlaces, require_sample
from dflash_train.features.codec import Codec
from dflash_train.features.shard import Layout, ShardFile, open_shard, sample_checksum, shard_layout
from dflash_train.layers import FeatureContract

_FORWARDS_AHEAD = 3  # forwards whose rows the writer has or will get: bounds the memory on the device
_ERROR_ROWS = 64  # the codec's error is measured on so many rows of each forward, evenly spread
_POLL_SECONDS = 0.2  # how long a thread waits before it looks whether the other one has failed
_LONGEST_FLOAT, _ANY_CHECKSUM = -1.7976931348623157e-308, "0" * 32


@dataclass(frozen=True)
class CapturedRows:
    """One forward's rows without padding, sample after sample, on the device. `input_ids_T` are the ids that the target was given."""

    input_ids_T: Tensor
    features_TLD: Tensor
    teacher_state_TD: Tensor | None


@dataclass(frozen=True)
class CheckSample:
    """A sample of the shard, recomputed alone; `position` is its place among the shard's samples.

    When it differs the shard is not written; with `only_warn` it is, and a warning too.
    """

    position: int
    recomputed: Recomputed
    only_warn: bool = False


class ShardJob:
    """All of a shard but its features.

    `rows` are the columns of the prepared samples (`sample_id`, `split`, `input_ids`, `loss_mask`) in the shard's order.
    """

    def __init__(self, path: Path, rows: dict[str, list[Any]], contract: FeatureContract, codec: Codec, tokens_per_forward: int) -> None:
        self.path, self.contract, self.codec = path, contract, codec
        self.input_ids_T = torch.tensor(list(chain.from_iterable(rows["input_ids"])), dtype=torch.int32)
        self.loss_mask_T = torch.tensor(list(chain.from_iterable(rows["loss_mask"])), dtype=torch.uint8)
        self.places = SamplePlaces(rows["sample_id"], torch.tensor([0, *map(len, rows["input_ids"])]).cumsum(0))
        self._splits, self._tokens_per_forward = rows["split"], tokens_per_forward
        self._num_supervised = [sum(loss_mask) for loss_mask in rows["loss_mask"]]

    @property
    def input_ids(self) -> tuple[Tensor, ...]:
        """Ids [T] int32 of each sample."""
        return self.input_ids_T.split(self.places.lengths)

    @property
    def layout(self) -> Layout:
        return shard_layout(self.contract, self.codec, len(self.places.sample_ids), len(self.input_ids_T))

    def metadata(self, checksums: list[str], codec_error: list[float], median_norms: list[float]) -> dict[str, Any]:
        """What the header says: `checksums` per sample; per layer, the codec's relative error and the median norm of a row."""
        return {
            "contract": self.contract.to_dict(),
            "codec": {"name": self.codec.name, "relative_error": codec_error},
            "sample_ids": self.places.sample_ids,
            "sample_checksums": checksums,
            "splits": self._splits,
            "num_supervised": self._num_supervised,
            "statistics": {
                "num_samples": len(self.places.sample_ids),
                "num_tokens": len(self.input_ids_T),
                "num_supervised": sum(self._num_supervised),
                "median_norm": median_norms,
                "tokens_per_forward": self._tokens_per_forward,
            },
        }

    def longest_metadata(self) -> dict[str, Any]:
        """Metadata whose JSON is at least as long as what will be measured."""
        floats = [_LONGEST_FLOAT] * len(self.contract.layer_ids.ids)
        return self.metadata([_ANY_CHECKSUM] * len(self.places.sample_ids), floats, floats)


def write_shard(job: ShardJob, forwards: Iterable[CapturedRows], check_sample: CheckSample) -> dict[str, Any]:
    """Writes the shard of `job` from its rows in order, and returns its metadata.

    Raises ContentError, naming sample, layer and row, for features that cannot be right or differ from `check_sample`, and UserError
    when the shard cannot be written. Whatever is raised, no file is left.
    """
    checks = ContentChecks(job.contract.layer_ids.ids, job.places)
    checksums: list[str] = []
    squares_2L = torch.zeros(2, len(checks.layer_ids), dtype=torch.float64)  # of the codec's error, and of the features
    with open_shard(job.path, job.layout, job.longest_metadata()) as file:
        file.write_rows("offsets", 0, job.places.offsets)
        first = 0
        for rows in forwards:
            last = _require_planned(job, first, rows, check_sample.recomputed.features_TLD.dtype)
            checks.check(first, rows.features_TLD, rows.teacher_state_TD)
            squares_2L += torch.stack(job.codec.squared_error(rows.features_TLD[:: -(-(last - first) // _ERROR_ROWS)])).cpu()
            arrays = _encode(job, first, last, rows)
            for name, array in arrays.items():
                file.write_rows(name, first, array)
            for begin, end in job.places.spans(first, last):
                part = {name: array[begin - first : end - first] for name, array in arrays.items()}
                checksums.append(sample_checksum(begin, part))
            first = last
        assert first == len(job.input_ids_T), "the forwards ended before the shard"
        codec_error_L = (squares_2L[0] / squares_2L[1].clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        metadata = job.metadata(checksums, _rounded(codec_error_L.tolist()), _rounded(checks.median_norms()))
        file.finish(metadata)
        _require_sample(job, file, check_sample)
    return metadata


def _rounded(figures: list[float]) -> list[float]:
    """To three digits: the last bits of a sum follow the number of threads, and a shard's bytes should not."""
    return [float(f"{figure:.3g}") for figure in figures]


def _require_planned(job: ShardJob, first: int, rows: CapturedRows, dtype: torch.dtype) -> int:
    """The row behind these; raises ContentError unless they are the target's, one for each token planned at `first` and following."""
    last = first + len(rows.input_ids_T)
    planned_T, given_T = job.input_ids_T[first:last], rows.input_ids_T.cpu().to(job.input_ids_T.dtype)
    if not torch.equal(planned_T, given_T):
        common = min(len(planned_T), len(given_T))
        row = first + int((planned_T[:common] == given_T[:common]).cumprod(0).sum())
        raise ContentError(
            f"{job.places.of_row(min(row, len(job.input_ids_T) - 1))}: the target was given another token there than planned: "
            "rows are swapped or missing"
        )
    if last not in job.places.offsets:
        raise ContentError(f"{job.places.of_row(last)}: the forward gave no features for it: a row is missing")
    num_layers, width = len(job.contract.layer_ids.ids), job.contract.hidden_size
    expected = {"features": [last - first, num_layers, width]} | (
        {"teacher state": [last - first, width]} if job.contract.teacher_state else {}
    )
    given = {"features": rows.features_TLD, "teacher state": rows.teacher_state_TD}
    for what, shape in expected.items():
        values = given[what]
        if values is None or list(values.shape) != shape or values.dtype != dtype:
            found = "missing" if values is None else f"{list(values.shape)} in {values.dtype}"
            raise ContentError(
                f"{job.places.of_row(first)} and the samples computed with it: their {what} are {found}, not {shape} in {dtype}"
            )
    return last


def _encode(job: ShardJob, first: int, last: int, rows: CapturedRows) -> dict[str, Tensor]:
    """The rows of every array but `offsets`, on the CPU."""
    encoded = job.codec.encode(rows.features_TLD)
    if rows.teacher_state_TD is not None:
        encoded["teacher_state"] = rows.teacher_state_TD.to(torch.bfloat16)
    arrays = {name: array.cpu().contiguous() for name, array in encoded.items()}
    return arrays | {"input_ids": job.input_ids_T[first:last], "loss_mask": job.loss_mask_T[first:last]}


def _require_sample(job: ShardJob, file: ShardFile, check: CheckSample) -> None:
    """Holds what any reader would get of the check sample to the sample recomputed alone."""
    begin, end = job.places.span(check.position)
    encoded = job.codec.token_layout(len(job.contract.layer_ids.ids), job.contract.hidden_size)
    arrays = {name: file.read_rows(name, begin, end - begin) for name in (*encoded, "teacher_state") if name in file.arrays}
    try:
        require_sample(job.places.sample_ids[check.position], job.contract.layer_ids.ids, job.codec, arrays, check.recomputed)
    except ContentError as error:
        if not check.only_warn:
            raise
        print(f"warning: {job.path.name}: {error}", file=sys.stderr, flush=True)


class WriterThread:
    """Writes shards one after the other in one thread. A failure there is raised by the caller's next call, or at the end.

    >>> with WriterThread(device) as writer:
    ...     writer.open(job, check_sample)
    ...     writer.add(rows)  # the rows of one forward; the last ones finish the shard
    """

    def __init__(self, device: torch.device) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feature-writer")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # copies do not wait for the next forward
        self._shards: deque[Future[dict[str, Any]]] = deque()
        self._queue: Queue[_Handover] = Queue()
        self._room = threading.Semaphore(_FORWARDS_AHEAD)
        self._stopped = threading.Event()

    def open(self, job: ShardJob, check_sample: CheckSample) -> None:
        """Begins the shard that the next rows belong to."""
        self._queue = Queue()
        self._shards.append(self._executor.submit(self._write, job, self._queue, check_sample))

    def add(self, rows: CapturedRows) -> None:
        """Hands over one forward's rows; waits while too many are on their way."""
        computed = torch.cuda.current_stream(rows.features_TLD.device).record_event() if self._stream else None
        while not self._room.acquire(timeout=_POLL_SECONDS):
            for shard in self._shards:
                if shard.done():
                    shard.result()  # raises what the thread did: nobody would make room any more
        self._queue.put((rows, computed))

    def finished(self, wait: bool = False) -> Iterator[dict[str, Any]]:
        """The metadata of the shards that were finished since the last call; `wait` for all that were opened."""
        while self._shards and (wait or self._shards[0].done()):
            yield self._shards.popleft().result()

    def _write(self, job: ShardJob, queue: "Queue[_Handover]", check_sample: CheckSample) -> dict[str, Any]:
        with torch.no_grad(), torch.cuda.stream(self._stream):  # no stream: does nothing
            return write_shard(job, self._take(queue, len(job.input_ids_T)), check_sample)

    def _take(self, queue: "Queue[_Handover]", num_tokens: int) -> Iterator[CapturedRows]:
        while num_tokens > 0:
            try:
                rows, computed = queue.get(timeout=_POLL_SECONDS)
            except Empty:
                if self._stopped.is_set():
                    raise UserError("the extraction ended before the shard was whole") from None
                continue
            if computed is not None:
                computed.wait()
            yield rows
            self._room.release()
            num_tokens -= len(rows.input_ids_T)

    def __enter__(self) -> "WriterThread":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._stopped.set()
        self._executor.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            list(self.finished())  # raises what the last shard did


_Handover = tuple[CapturedRows, torch.cuda.Event | None]
