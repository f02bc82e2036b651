"""One shard on disk: a safetensors file of flat arrays over the tokens of many samples.

Arrays (T tokens of S samples, sample after sample): `input_ids` int32 [T], `loss_mask` uint8 [T], the codec's arrays (bf16: `features`
[T, L, D]), `teacher_state` bf16 [T, D] where the contract has it, `offsets` int64 [S+1]: sample s owns rows offsets[s] to offsets[s+1]-1 of
every other array. The header's metadata is one key with canonical JSON: safetensors' own writer puts several keys in random order, and
the bytes of a shard must depend on its content alone. It holds one checksum per sample, over the sample's place and its rows of every
array, so that a damaged sample can be named, and a checksum of the header, which therefore stands for the whole file.

Where every byte will lie is known before the first row is there: rows are written as they come, and no more than that is in memory. The
safetensors package can only write a file that is in memory as a whole; any safetensors reader reads ours. Format:
https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import count, pairwise
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

_DTYPE_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
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


def sample_checksum(first_row: int, rows: Mapping[str, Tensor]) -> str:
    """xxh3_128 of one sample: its place in the shard and its rows of every array but `offsets`, contiguous and on the CPU."""
    digest = xxhash.xxh3_128(first_row.to_bytes(8, "little"))
    for name in sorted(rows):
        digest.update(byte_view(rows[name]))
    return digest.hexdigest()


def byte_view(rows: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes."""
    return rows.flatten().view(torch.uint8).numpy().data


class ShardFile:
    """A shard that is being written: rows in any order, the header last. Made by `open_shard`."""

    def __init__(self, file: FileIO, layout: Layout, header_bytes: int) -> None:
        self._file, self._layout, self._header_bytes = file, layout, header_bytes
        entries, end = _entries(layout)
        self.arrays = {
            name: StoredArray(dtype, shape, 8 + header_bytes + entries[name]["data_offsets"][0]) for name, (dtype, shape) in layout.items()
        }
        os.ftruncate(file.fileno(), 8 + header_bytes + end)

    def write_rows(self, name: str, first: int, rows: Tensor) -> None:
        """Writes `rows` [rows, ...], contiguous and on the CPU, as rows `first` and following of array `name`."""
        array = self.arrays[name]
        assert rows.dtype == array.dtype and rows.shape[1:] == array.shape[1:] and first + len(rows) <= array.shape[0]
        self._write(array.start + first * array.row_bytes, byte_view(rows))

    def read_rows(self, name: str, first: int, num_rows: int) -> Tensor:
        """Rows that were written, as any reader gets them."""
        array = self.arrays[name]
        return read_rows(self._file, array, first, torch.empty((num_rows, *array.shape[1:]), dtype=array.dtype))

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Writes the header, which makes the file a shard."""
        header = _header(self._layout, metadata)
        assert len(header) <= self._header_bytes, "longer than open_shard was told"
        self._write(0, memoryview(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes)))

    def _write(self, position: int, buffer: memoryview) -> None:
        while buffer.nbytes:  # Linux writes 2 GiB at most per call
            num_bytes = os.pwrite(self._file.fileno(), buffer, position)
            buffer, position = buffer[num_bytes:], position + num_bytes


@contextmanager
def open_shard(path: Path, layout: Layout, longest_metadata: Mapping[str, Any]) -> Iterator[ShardFile]:
    """Yields a file under a temporary name; the caller writes all rows and finishes it, and on a clean exit it is the shard `path`.

    `longest_metadata` is as long in JSON as what `finish` will get, or longer. Raises UserError when the disk is full; whatever is raised
    inside leaves nothing behind.
    """
    header_bytes = -(-len(_header(layout, longest_metadata)) // 8) * 8
    with atomic_path(path) as temporary:
        with FileIO(temporary, "w+") as file:
            yield ShardFile(file, layout, header_bytes)
        read_header(temporary)


def read_offsets(file: FileIO, header: ShardHeader) -> list[int]:
    """First row of each sample, and the end. Raises DamagedShardError unless every sample has a token and they fill the shard."""
    array = header.arrays["offsets"]
    offsets = read_rows(file, array, 0, torch.empty(array.shape, dtype=array.dtype)).tolist()
    num_tokens = header.arrays["input_ids"].shape[0]
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(end <= begin for begin, end in pairwise(offsets)):
        raise DamagedShardError(f"{file.name} is damaged: its offsets do not cut {num_tokens} tokens into samples")
    return offsets


def set_aside(path: Path) -> Path:
    """Renames a damaged shard, never over another one, so that stage=extract makes it again; returns its new path."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return aside


def canonical_json(value: Any) -> str:
    """The one spelling of `value`: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _entries(layout: Layout) -> tuple[dict[str, Any], int]:
    """What the header says of each array, and the bytes of all together."""
    entries: dict[str, Any] = {}
    end = 0
    for name in sorted(layout, key=lambda name: (-layout[name][0].itemsize, name)):  # widest first keeps every array aligned
        dtype, shape = layout[name]
        start, end = end, end + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return entries, end


def _header(layout: Layout, metadata: Mapping[str, Any]) -> bytes:
    entries, _ = _entries(layout)
    metadata = {**metadata, "checksum": _header_checksum(metadata, entries)}
    return canonical_json({"__metadata__": {METADATA_KEY: canonical_json(metadata)}} | entries).encode()


def _header_checksum(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical_json([dict(metadata), dict(entries)]).encode())}"


def read_header(path: Path) -> ShardHeader:
    """Reads a shard's header and checks it against its own checksum and the file's size; the payload is not read.

    Raises DamagedShardError, in one line that names the file, when it is not a whole shard.
    """
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            raw = json.loads(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
            file_bytes = os.fstat(file.fileno()).st_size
        metadata = dict(json.loads(raw.pop("__metadata__")[METADATA_KEY]))
        is_right = metadata.pop("checksum") == _header_checksum(metadata, raw)
        payload_start = 8 + header_bytes
        arrays = {
            name: StoredArray(_DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), payload_start + entry["data_offsets"][0])
            for name, entry in raw.items()
        }
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedShardError(f"{path} is damaged: its header cannot be read ({type(error).__name__})") from error
    if not is_right:
        raise DamagedShardError(f"{path} is damaged: its header does not have the checksum that it holds")
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
    buffer = byte_view(out)
    position = array.start + start * array.row_bytes
    while buffer.nbytes:  # Linux reads 2 GiB at most per call
        num_bytes = os.preadv(file.fileno(), [buffer], position)
        if num_bytes == 0:
            raise DamagedShardError(f"{file.name} is damaged: it ends at byte {position}")
        buffer, position = buffer[num_bytes:], position + num_bytes
    return out
