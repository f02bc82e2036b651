"""The safetensors files of a model folder: which tensors they hold, one tensor of them, a digest of each file's sample.

Comes in: a Hugging Face folder. Goes out: `StoredTensor`s read from the file headers alone, so that a 100 GB target is described in
seconds; nothing is unpickled. Source of the header layout: safetensors format, 8 bytes of length and a JSON object.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from dflash_train.errors import UserError

SAMPLE_BYTES = 1 << 20  # read per file for its digest
_SAMPLE_PIECES = 16


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file header describes it; `dtype` is safetensors' name, e.g. BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path


def weight_paths(folder: Path) -> list[Path]:
    """The files that `model.safetensors` or its index names, sorted. Raises UserError when there are none or one is missing."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UserError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json; other weight formats are not read")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{index} names the weight file {name!r} outside its own folder")
        if not (folder / name).is_file():
            raise UserError(f"{index} names the weight file {name}, which is missing in {folder}")
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weight files by name. Raises UserError for a file that is broken or cut short."""
    return {tensor.name: tensor for path in weight_paths(folder) for tensor in _read_header(path)}


def read_tensor(stored: StoredTensor, device: torch.device) -> torch.Tensor:
    """Loads this one tensor onto `device`, in the dtype of the file."""
    name = "cpu" if device.type == "cpu" else str(device)  # safetensors does not know the cpu:0 of a gloo process
    with safe_open(stored.path, framework="pt", device=name) as file:
        return file.get_tensor(stored.name)


def sample_digest(path: Path) -> str:
    """Digest of the file's size and of 1 MiB spread evenly over it (the whole file when it is smaller)."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    piece = SAMPLE_BYTES // _SAMPLE_PIECES
    with path.open("rb") as file:
        if size <= SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_SAMPLE_PIECES):
                file.seek(i * (size - piece) // (_SAMPLE_PIECES - 1))
                digest.update(file.read(piece))
    return digest.hexdigest()[:16]


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, path.stat().st_size)))
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = [StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path) for name, entry in entries.items()]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"weight file {path} has no readable safetensors header: {error!r}") from error
    if path.stat().st_size != end:
        raise UserError(f"weight file {path} has {path.stat().st_size} bytes where its header announces {end}: it is cut short or damaged")
    return tensors
