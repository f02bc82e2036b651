"""Fills shards with captured features and writes them, in a thread of its own beside the next forward.

Comes in: one forward's features after the other, on the device. Goes out: a shard file, as soon as its last row is there. Encoding, the
check for values that are not finite, the copy off the device, the checksum and the writing all happen in the writer thread.
"""

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import UserError
from dflash_train.features.codec import Codec
from dflash_train.features.shard import shard_layout, write_shard
from dflash_train.layers import FeatureContract

_ERROR_ROWS = 1024  # the codec's error is measured on the first rows of a shard
_FORWARDS_AHEAD = 2  # forwards whose features wait for the writer: bounds the memory on the device


class ShardBuilder:
    """One shard in memory. Its samples are known from the start, their features arrive forward by forward.

    `rows` are the columns of the prepared samples (`sample_id`, `split`, `input_ids`, `loss_mask`) in the shard's order.
    """

    def __init__(self, path: Path, rows: dict[str, list[Any]], contract: FeatureContract, codec: Codec, tokens_per_forward: int) -> None:
        self._path, self._contract, self._codec, self._tokens_per_forward = path, contract, codec, tokens_per_forward
        self._sample_ids, self._splits = rows["sample_id"], rows["split"]
        self._lengths = [len(input_ids) for input_ids in rows["input_ids"]]
        self._num_supervised = [sum(loss_mask) for loss_mask in rows["loss_mask"]]
        self._input_ids_T = torch.tensor(list(chain.from_iterable(rows["input_ids"])), dtype=torch.int32)
        self._loss_mask_T = torch.tensor(list(chain.from_iterable(rows["loss_mask"])), dtype=torch.uint8)
        self._offsets = torch.tensor([0, *self._lengths]).cumsum(0)
        self._arrays: dict[str, Tensor] = {}  # the memory of the payload, taken with the first features
        self._rows_done = 0
        self._largest_L = torch.zeros(len(contract.layer_ids.ids))
        self._codec_error: list[float] = []

    @property
    def input_ids(self) -> tuple[Tensor, ...]:
        """Ids [T] int32 of each sample."""
        return self._input_ids_T.split(self._lengths)

    def add(self, features_TLD: Tensor, teacher_state_TD: Tensor | None) -> None:
        """Takes the next rows, in the order of the samples; the last ones write the shard.

        Raises UserError naming sample, layer and row when a value is not finite, and when the shard cannot be written.
        """
        self._check_finite(features_TLD, teacher_state_TD)
        if not self._arrays:
            layout = shard_layout(self._contract, self._codec, len(self._lengths), len(self._input_ids_T))
            self._arrays = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
            self._codec_error = self._codec.relative_error(features_TLD[:_ERROR_ROWS])
        encoded = self._codec.encode(features_TLD)
        if teacher_state_TD is not None:
            encoded["teacher_state"] = teacher_state_TD.to(torch.bfloat16)
        first, last = self._rows_done, self._rows_done + len(features_TLD)
        for name, rows in encoded.items():
            self._arrays[name][first:last].copy_(rows)
        self._rows_done = last  # only now: a forward that failed on the way leaves a shard that is never whole
        if self._rows_done == len(self._input_ids_T):
            self._write()

    def _check_finite(self, features_TLD: Tensor, teacher_state_TD: Tensor | None) -> None:
        largest_L = torch.linalg.vector_norm(features_TLD, ord=torch.inf, dim=(0, 2)).float().cpu()  # nan and inf survive a maximum
        self._largest_L = torch.maximum(self._largest_L, largest_L)
        for plane, largest in enumerate(largest_L.tolist()):
            if not math.isfinite(largest):
                self._refuse(features_TLD[:, plane], f"the feature of layer {self._contract.layer_ids.ids[plane]}")
        if teacher_state_TD is not None and not torch.isfinite(teacher_state_TD).all():
            self._refuse(teacher_state_TD, "the teacher state")

    def _refuse(self, values_TD: Tensor, what: str) -> None:
        row, column = torch.nonzero(~torch.isfinite(values_TD))[0].tolist()
        sample = int(torch.searchsorted(self._offsets, self._rows_done + row, right=True)) - 1
        row_of_sample = self._rows_done + row - int(self._offsets[sample])
        raise UserError(
            f"sample {self._sample_ids[sample]}: {what} is {values_TD[row, column].item()} at row {row_of_sample} of "
            f"{self._lengths[sample]}: the target overflows on this text or its dtype is too narrow (target.dtype)"
        )

    def _write(self) -> None:
        self._arrays |= {"offsets": self._offsets, "input_ids": self._input_ids_T, "loss_mask": self._loss_mask_T}
        write_shard(self._path, self._arrays, self._metadata())
        self._arrays = {}

    def _metadata(self) -> dict[str, Any]:
        return {
            "contract": self._contract.to_dict(),
            "codec": {"name": self._codec.name, "relative_error": self._codec_error},
            "sample_ids": self._sample_ids,
            "splits": self._splits,
            "num_supervised": self._num_supervised,
            "statistics": {
                "num_samples": len(self._lengths),
                "num_tokens": sum(self._lengths),
                "num_supervised": sum(self._num_supervised),
                "largest_value": self._largest_L.tolist(),
                "tokens_per_forward": self._tokens_per_forward,
            },
        }


class WriterThread:
    """Feeds builders in one thread, in order. An exception of the thread appears in the caller's next `add` or at the end.

    >>> with WriterThread(device) as writer:
    ...     writer.add(builder, features_TLD, None)
    """

    def __init__(self, device: torch.device) -> None:
        self._pending: deque[Future[None]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feature-writer")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # copies do not wait for the next forward

    def add(self, builder: ShardBuilder, features_TLD: Tensor, teacher_state_TD: Tensor | None) -> None:
        """Hands over one forward's rows; waits while too many are on their way."""
        while len(self._pending) >= _FORWARDS_AHEAD:
            self._pending.popleft().result()
        computed = torch.cuda.current_stream(features_TLD.device).record_event() if self._stream else None
        self._pending.append(self._executor.submit(self._add, builder, features_TLD, teacher_state_TD, computed))

    def _add(self, builder: ShardBuilder, features_TLD: Tensor, teacher_state_TD: Tensor | None, computed: torch.cuda.Event | None) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):  # no stream: does nothing
            if computed is not None:
                computed.wait()
            builder.add(features_TLD, teacher_state_TD)

    def __enter__(self) -> "WriterThread":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._executor.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._pending:
                future.result()
