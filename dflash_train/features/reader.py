"""Reads a feature dataset: which samples there are, and the ids, mask and features of one or of several behind one another.

Comes in: a folder written by stage=extract. Goes out: `SampleRef`s in shard order, `Sample`s with decoded features, and
`EncodedSamples`, whose features are as stored, so that a compact codec's bytes are what crosses to another device. Each sample's rows of
an array are one `preadv` straight into the tensor that is handed out, nothing is mapped. A dataset may be read from several threads at
once, and be pickled or inherited by other processes. Checksums are not read here.
"""

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import UserError
from dflash_train.features.codec import Codec, codec_named
from dflash_train.features.manifest import Manifest
from dflash_train.features.shard import ShardHeader, read_offsets, read_rows, shard_layout
from dflash_train.layers import FeatureContract

_MAX_OPEN_FILES = 64
_FREE_BUFFERS = 4  # kept of each size


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample lies: `row` is its first token's row in the arrays of `shard`."""

    sample_id: str
    shard: str
    row: int
    num_tokens: int
    num_supervised: int
    split: str


@dataclass(frozen=True)
class Sample:
    """One sample: `input_ids_T` int64 and `loss_mask_T` bool on the CPU, `features_TLD` and `teacher_state_TD` on the device asked for."""

    sample_id: str
    input_ids_T: Tensor
    loss_mask_T: Tensor
    features_TLD: Tensor
    teacher_state_TD: Tensor | None


@dataclass(frozen=True)
class EncodedFeatures:
    """Features as a codec stores them: `arrays` are those of its `token_layout`, each [T, ...]."""

    codec: Codec
    arrays: dict[str, Tensor]

    def to(self, device: torch.device | str) -> "EncodedFeatures":
        """What was read, on `device`, still encoded."""
        return EncodedFeatures(self.codec, {name: array.to(device, non_blocking=True) for name, array in self.arrays.items()})

    def decode(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Features [T, L, D] in bf16 or fp32, on the device they are on."""
        return self.codec.decode(self.arrays, dtype)


@dataclass(frozen=True)
class EncodedSamples:
    """Samples behind one another on the CPU, T tokens together: `input_ids_T` int64, `loss_mask_T` bool, `teacher_state_TD` bf16."""

    input_ids_T: Tensor
    loss_mask_T: Tensor
    features: EncodedFeatures
    teacher_state_TD: Tensor | None  # where asked for


class FeatureDataset:
    """The samples of a dataset folder. Raises UserError when it is incomplete, unless `allow_incomplete`, or a shard is damaged."""

    def __init__(self, folder: str | os.PathLike[str], allow_incomplete: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        self._codec = codec_named(self.manifest.codec)
        present = [entry for entry in self.manifest.shards if (self.folder / entry.name).exists()]
        num_planned = len(self.manifest.shards)
        if len(present) < num_planned and not (allow_incomplete and present):
            raise UserError(
                f"{self.folder} is incomplete: {num_planned - len(present)} of {num_planned} shards are missing; "
                "run stage=extract again with the same settings to finish it, or set train.allow_incomplete_features=true"
            )
        headers = {entry.name: self.manifest.read_shard_header(self.folder, entry) for entry in present}
        self._arrays = {name: header.arrays for name, header in headers.items()}
        self._layout = shard_layout(self.contract, self._codec, num_samples=0, num_tokens=0)
        self._open_nothing()
        self._refs = [ref for name, header in headers.items() for ref in self._shard_refs(name, header)]

    @property
    def contract(self) -> FeatureContract:
        return self.manifest.contract

    def refs(self, split: str) -> list[SampleRef]:
        """The samples of `split` ("train" or "heldout") in shard order."""
        return [ref for ref in self._refs if ref.split == split]

    def read(self, ref: SampleRef, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Sample:
        """Reads one sample; features and teacher state in `dtype` (bf16 or fp32) on `device`.

        Raises UserError naming the file when it is gone or ends early.
        """
        pin_memory = torch.device(device).type == "cuda"
        encoded = self.read_encoded([ref], pin_memory, self.contract.teacher_state)
        state_TD = encoded.teacher_state_TD
        teacher_state_TD = None if state_TD is None else state_TD.to(device, non_blocking=True).to(dtype)
        features_TLD = encoded.features.to(device).decode(dtype)
        return Sample(ref.sample_id, encoded.input_ids_T, encoded.loss_mask_T, features_TLD, teacher_state_TD)

    def read_encoded(self, refs: Sequence[SampleRef], pin_memory: bool = False, teacher_state: bool = False) -> EncodedSamples:
        """Reads the samples `refs` behind one another, with `teacher_state` their teacher states too; none at all gives T = 0.

        `pin_memory` makes the copy of features and states to a GPU asynchronous. Raises UserError like `read`.
        """
        names = self._codec.token_layout(len(self.contract.layer_ids.ids), self.contract.hidden_size)
        return EncodedSamples(
            input_ids_T=self._rows("input_ids", refs).long(),
            loss_mask_T=self._rows("loss_mask", refs).bool(),
            features=EncodedFeatures(self._codec, {name: self._rows(name, refs, pin_memory) for name in names}),
            teacher_state_TD=self._rows("teacher_state", refs, pin_memory) if teacher_state else None,
        )

    def read_loss_mask(self, ref: SampleRef) -> Tensor:
        """The loss mask of one sample, bool [T], and nothing else. Raises UserError like `read`."""
        return self._rows("loss_mask", [ref]).bool()

    def _rows(self, name: str, refs: Sequence[SampleRef], pin_memory: bool = False) -> Tensor:
        """The rows of array `name` that belong to `refs`."""
        dtype, (_, *token_shape) = self._layout[name]
        out = self._buffers.take((sum(ref.num_tokens for ref in refs), *token_shape), dtype, pin_memory)
        start = 0
        for ref in refs:
            self._read(ref.shard, name, ref.row, out[start : start + ref.num_tokens])
            start += ref.num_tokens
        return out

    def _read(self, shard: str, name: str, row: int, out: Tensor) -> None:
        try:
            # a file that falls out of the cache while another thread reads it is closed when that read is done
            read_rows(self._open(shard), self._arrays[shard][name], row, out)
        except OSError as error:
            raise UserError(f"cannot read {self.folder / shard}: {error.strerror}") from error

    def _shard_refs(self, shard: str, header: ShardHeader) -> list[SampleRef]:
        metadata = header.metadata
        spans = pairwise(read_offsets(self._open(shard), header))
        columns = (metadata["sample_ids"], spans, metadata["num_supervised"], metadata["splits"])
        return [
            SampleRef(sample_id, shard, row, end - row, num_supervised, split)
            for sample_id, (row, end), num_supervised, split in zip(*columns, strict=True)
        ]

    def _open_nothing(self) -> None:
        self._open = lru_cache(maxsize=_MAX_OPEN_FILES)(partial(_open, self.folder))
        self._buffers = _Buffers()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_buffers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_nothing()


def _open(folder: Path, shard: str) -> FileIO:
    return FileIO(folder / shard)


class _Buffers:
    """Memory that is lent again once no tensor refers to it: touching fresh memory costs several times what reading into it does.

    Every tensor made of a lent one, a view or what autograd keeps, holds its storage, and the storage holds the array it was made of;
    so the end of that array is the moment when the memory is free.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[Tensor]] = defaultdict(lambda: deque(maxlen=_FREE_BUFFERS))  # by size; full, it forgets one

    def take(self, shape: Sequence[int], dtype: torch.dtype, pin_memory: bool) -> Tensor:
        """A tensor whose memory no other tensor has. torch itself lends pinned memory again, once copies from it are done."""
        if pin_memory:
            return torch.empty(*shape, dtype=dtype, pin_memory=True)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        size = 1 << num_bytes.bit_length()  # what is not touched costs no memory
        try:
            memory = self._free[size].pop()
        except IndexError:
            memory = torch.empty(size, dtype=torch.uint8)
        lent = memory.numpy()[:num_bytes]
        weakref.finalize(lent, self._free[size].append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).view(*shape)
