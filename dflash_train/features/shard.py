"""One shard on disk: a safetensors file of flat arrays over the tokens of many samples.

Arrays (T tokens of S samples, sample after sample): `input_ids` int32 [T], `loss_mask` uint8 [T], the codec's arrays (bf16: `features`
[T, L, D]), `teacher_state` bf16 [T, D] where the contract has it, `offsets` int64 [S+1]: sample s owns rows offsets[s] to offsets[s+1]-1 of
every other array. The header's metadata is one key with canonical JSON: safetensors' own writer puts several keys in random order, and
the bytes of a shard must depend on its content alone.

The file is written here and not by the safetensors package, which would hold a second copy of it in memory; any safetensors reader
reads it. Format: https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from dflash_train.atomic import atomic_path
from dflash_train.errors import UserError
from dflash_train.features.codec import Codec
from dflash_train.layers import FeatureContract

METADATA_KEY = "dflash_train"
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by array name

_DTYPE_NAMES = {torch.int64: "I64", torch.int32: "I32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors package accepts


class DamagedShardError(UserError):
    """A file under a shard's name that is not the whole shard it should be."""


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies in the file: `start` is the absolute offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape[1:])


@dataclass(frozen=True)
class ShardHeader:
    """What stands before a shard's payload."""

    metadata: dict[str, Any]
    arrays: dict[str, StoredArray]

    @property
    def layout(self) -> Layout:
        return {name: (array.dtype, array.shape) for name, array in self.arrays.items()}


def shard_layout(contract: FeatureContract, codec: Codec, num_samples: int, num_tokens: int) -> Layout:
    """The arrays of a shard that holds `num_samples` samples with `num_tokens` tokens together."""
    per_token: Layout = {"input_ids": (torch.int32, ()), "loss_mask": (torch.uint8, ())}
    per_token |= codec.token_layout(len(contract.layer_ids.ids), contract.hidden_size)
    if contract.teacher_state:
        per_token["teacher_state"] = (torch.bfloat16, (contract.hidden_size,))
    layout: Layout = {name: (dtype, (num_tokens, *shape)) for name, (dtype, shape) in per_token.items()}
    return layout | {"offsets": (torch.int64, (num_samples + 1,))}


def payload_bytes(layout: Layout) -> int:
    """Bytes of all arrays, without the header."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in layout.values())


def canonical_json(value: Any) -> str:
    """The one spelling of `value`: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_shard(path: Path, arrays: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Writes a whole shard under its final name, with the checksum of its payload added to `metadata`.

    `arrays` are contiguous CPU tensors. Raises UserError when the disk is full.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # widest first keeps every array aligned
    buffers = [arrays[name].flatten().view(torch.uint8).numpy().data for name in names]
    checksum = xxhash.xxh3_128()
    entries: dict[str, Any] = {}
    end = 0
    for name, buffer in zip(names, buffers, strict=True):
        checksum.update(buffer)
        start, end = end, end + buffer.nbytes
        entries[name] = {"dtype": _DTYPE_NAMES[arrays[name].dtype], "shape": list(arrays[name].shape), "data_offsets": [start, end]}
    metadata = metadata | {"checksum": f"xxh3_128:{checksum.hexdigest()}"}
    header = canonical_json({"__metadata__": {METADATA_KEY: canonical_json(metadata)}} | entries).encode()
    header += b" " * (-len(header) % 8)
    with atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for buffer in buffers:
                file.write(buffer)
        read_header(temporary)


def read_header(path: Path) -> ShardHeader:
    """Reads and checks a shard's header against the file's size; the payload is not read.

    Raises DamagedShardError, in one line that names the file, when it is not a whole shard.
    """
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MAX_HEADER_BYTES:
                raise DamagedShardError(f"{path} is damaged: its header would be {header_bytes} bytes long")
            raw = json.loads(file.read(header_bytes))
            file_bytes = os.fstat(file.fileno()).st_size
        metadata = dict(json.loads(raw.pop("__metadata__")[METADATA_KEY]))
        payload_start = 8 + header_bytes
        arrays = {
            name: StoredArray(_DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), payload_start + entry["data_offsets"][0])
            for name, entry in raw.items()
        }
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedShardError(f"{path} is damaged: its header cannot be read ({type(error).__name__})") from error
    header = ShardHeader(metadata, arrays)
    expected_bytes = payload_start + payload_bytes(header.layout)
    if file_bytes != expected_bytes:
        raise DamagedShardError(f"{path} is damaged: it has {file_bytes} bytes, its header says {expected_bytes}")
    return header


def read_rows(file: FileIO, array: StoredArray, start: int, out: Tensor) -> Tensor:
    """Fills `out` [rows, ...], a contiguous CPU tensor, with the rows of `array` from `start` on, in one contiguous read; returns it.

    Raises DamagedShardError when the file ends early.
    """
    assert out.is_contiguous() and out.dtype == array.dtype and out.shape[1:] == array.shape[1:] and start + len(out) <= array.shape[0]
    buffer = out.flatten().view(torch.uint8).numpy().data
    position = array.start + start * array.row_bytes
    while buffer.nbytes:  # Linux reads 2 GiB at most per call
        num_bytes = os.preadv(file.fileno(), [buffer], position)
        if num_bytes == 0:
            raise DamagedShardError(f"{file.name} is damaged: it ends at byte {position}")
        buffer, position = buffer[num_bytes:], position + num_bytes
    return out
