"""`manifest.json`: what a feature dataset is made from and which shards make it whole.

Written once, before the first shard, and never changed: a dataset is complete when every shard it lists is there. Whoever reads or
continues a dataset compares all of it. `features.tokens_per_forward` is not part of it: after an out-of-memory a run may go on with less,
and each shard records what it was computed with.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_train.atomic import write_json
from dflash_train.errors import UserError
from dflash_train.features.codec import codec_named
from dflash_train.features.shard import DamagedShardError, Layout, ShardHeader, read_header, shard_layout
from dflash_train.layers import FeatureContract

FILE_NAME = "manifest.json"
_FORMAT = "dflash_train features 1"
_SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")


@dataclass(frozen=True)
class ShardEntry:
    """One shard of the plan. `name` is a plain file name, so a manifest cannot point out of its folder."""

    name: str
    num_samples: int
    num_tokens: int

    def __post_init__(self) -> None:
        if not _SHARD_NAME.fullmatch(self.name):
            raise UserError(f"shard name {self.name!r} is not of the form shard-00000.safetensors")


@dataclass(frozen=True)
class Manifest:
    """All that decides a dataset's content, and its shards."""

    contract: FeatureContract
    codec: str
    target_dtype: str  # target.dtype
    seed: int  # of the shard plan
    shard_tokens: int  # of the shard plan
    samples_digest: str  # of the prepared samples
    answers_from_target: str  # "true", "false" or "unknown"
    shards: tuple[ShardEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT} | asdict(self) | {"contract": self.contract.to_dict()}

    def save(self, folder: Path) -> None:
        write_json(folder / FILE_NAME, self.to_dict())

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Raises UserError, in one line that names the file, when there is none or it cannot be read."""
        path = folder / FILE_NAME
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            found = fields.pop("format")
            if found != _FORMAT:
                raise UserError(f"{path}: format {found!r} is unknown to this version, which reads {_FORMAT!r}")
            contract = FeatureContract.from_dict(fields.pop("contract"))
            shards = tuple(ShardEntry(**shard) for shard in fields.pop("shards"))
            return cls(contract=contract, shards=shards, **fields)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: run stage=extract first") from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error

    def shard_layout(self, shard: ShardEntry) -> Layout:
        """The arrays that `shard` has to hold."""
        return shard_layout(self.contract, codec_named(self.codec), shard.num_samples, shard.num_tokens)

    def read_shard_header(self, folder: Path, shard: ShardEntry) -> ShardHeader:
        """The header of `shard`, checked against this manifest and the file's size.

        Raises DamagedShardError, in one line that names the file, when it is not the whole shard it should be.
        """
        path = folder / shard.name
        header = read_header(path)
        metadata = header.metadata
        if wrong := _differences(header.layout, self.shard_layout(shard)):
            raise DamagedShardError(f"{path} is damaged: it does not hold what {FILE_NAME} says: {'; '.join(wrong)}")
        if len(metadata.get("sample_ids", ())) != shard.num_samples:
            raise DamagedShardError(f"{path} is damaged: it does not name the {shard.num_samples} samples that {FILE_NAME} says")
        if metadata.get("contract") != self.contract.to_dict() or metadata.get("codec", {}).get("name") != self.codec:
            raise DamagedShardError(f"{path} is damaged: it was made with another contract than {FILE_NAME} says")
        return header

    def require_continues(self, other: "Manifest", folder: Path) -> None:
        """Raises UserError, in one line with both sides, unless `other`, the manifest found in `folder`, is this one."""
        found = other.contract.differences(self.contract)
        for name in ("codec", "target_dtype", "seed", "shard_tokens", "samples_digest", "answers_from_target"):
            there, here = getattr(other, name), getattr(self, name)
            if there != here:
                found.append(f"{name}: {there} there, {here} here")
        if not found and other.shards != self.shards:
            found.append(f"shards: {len(other.shards)} there, {len(self.shards)} here, or of other sizes")
        if found:
            raise UserError(
                f"{folder / FILE_NAME} is of another dataset ({'; '.join(found)}): "
                f"choose another features.dir or run_dir, or delete {folder}"
            )


def _differences(found: Layout, expected: Layout) -> list[str]:
    """One string per array that is not as expected."""
    shown = {name: tuple(_shown(layout.get(name)) for layout in (found, expected)) for name in [*expected, *found]}
    return [f"{name} is {there}, not {here}" for name, (there, here) in shown.items() if there != here]


def _shown(array: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if array is None else f"{list(array[1])} in {array[0]}"
