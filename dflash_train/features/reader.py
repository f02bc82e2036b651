"""Reads a feature dataset: which samples there are, and one sample's ids, mask and features in one contiguous read each.

Comes in: a folder written by stage=extract. Goes out: `SampleRef`s in shard order and `Sample`s on the CPU. Files are read with `preadv`
straight into the tensors handed out, never mapped; descriptors are opened by the process that reads, so a dataset can be pickled or
inherited by loader workers. Checksums are not read here.
"""

import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_train.errors import UserError
from dflash_train.features.codec import codec_named
from dflash_train.features.manifest import Manifest
from dflash_train.features.shard import read_rows
from dflash_train.layers import FeatureContract

_MAX_OPEN_FILES = 64


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
    """One sample on the CPU: `input_ids_T` int64, `loss_mask_T` bool, `features_TLD` and `teacher_state_TD` bf16."""

    sample_id: str
    input_ids_T: Tensor
    loss_mask_T: Tensor
    features_TLD: Tensor
    teacher_state_TD: Tensor | None


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
        self._files: dict[str, FileIO] = {}
        self._files_owner = os.getpid()
        self._refs = [ref for name, header in headers.items() for ref in self._shard_refs(name, header.metadata)]

    @property
    def contract(self) -> FeatureContract:
        return self.manifest.contract

    def refs(self, split: str) -> list[SampleRef]:
        """The samples of `split` ("train" or "heldout") in shard order."""
        return [ref for ref in self._refs if ref.split == split]

    def read(self, ref: SampleRef) -> Sample:
        """Reads one sample. Raises UserError naming the file when it is gone or ends early."""
        encoded = {name: self._rows(name, ref) for name in self._codec.token_layout(*self._feature_shape)}
        return Sample(
            sample_id=ref.sample_id,
            input_ids_T=self._rows("input_ids", ref).long(),
            loss_mask_T=self._rows("loss_mask", ref).bool(),
            features_TLD=self._codec.decode(encoded),
            teacher_state_TD=self._rows("teacher_state", ref) if self.contract.teacher_state else None,
        )

    @property
    def _feature_shape(self) -> tuple[int, int]:
        return len(self.contract.layer_ids.ids), self.contract.hidden_size

    def _rows(self, name: str, ref: SampleRef) -> Tensor:
        array = self._arrays[ref.shard][name]
        return read_rows(self._file(ref.shard), array, ref.row, torch.empty((ref.num_tokens, *array.shape[1:]), dtype=array.dtype))

    def _file(self, shard: str) -> FileIO:
        if self._files_owner != os.getpid():  # a forked worker opens its own
            self._files, self._files_owner = {}, os.getpid()
        if shard not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:
                del self._files[next(iter(self._files))]
            try:
                self._files[shard] = FileIO(self.folder / shard)
            except OSError as error:
                raise UserError(f"cannot read {self.folder / shard}: {error.strerror}") from error
        return self._files[shard]

    def _shard_refs(self, shard: str, metadata: dict[str, Any]) -> list[SampleRef]:
        array = self._arrays[shard]["offsets"]
        offsets = read_rows(self._file(shard), array, 0, torch.empty(array.shape, dtype=array.dtype)).tolist()
        columns = (metadata["sample_ids"], offsets, offsets[1:], metadata["num_supervised"], metadata["splits"])
        return [
            SampleRef(sample_id, shard, row, end - row, num_supervised, split)
            for sample_id, row, end, num_supervised, split in zip(*columns, strict=False)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}
