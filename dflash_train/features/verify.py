"""Reads whole shards and says what is wrong with them, sample by sample.

Comes in: a dataset's folder and manifest. Goes out: a `ShardReport` per shard; nothing is changed here. `read_shard` needs nothing but the
file: header, checksums, content checks. `recompute_samples` holds samples to what the target gives for them alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from dflash_train.capture import Capture
from dflash_train.errors import UserError
from dflash_train.features.checks import ContentChecks, ContentError, SamplePlaces, require_sample
from dflash_train.features.codec import codec_named
from dflash_train.features.manifest import Manifest, ShardEntry
from dflash_train.features.shard import ShardHeader, read_offsets, read_rows, sample_checksum


@dataclass(frozen=True)
class ShardReport:
    """What reading one shard showed. `faults` has one line each; a shard that is not there has none but is missing."""

    name: str
    missing: bool = False
    faults: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each sample
    num_supervised: int = 0
    codec_error: list[float] = field(default_factory=list)  # per layer, as measured when the shard was written


def read_shard(manifest: Manifest, folder: Path, entry: ShardEntry) -> ShardReport:
    """Reads every byte of a shard; what the disk does not give is a fault as well."""
    path = folder / entry.name
    if not path.exists():
        return ShardReport(entry.name, missing=True)
    try:
        header = manifest.read_shard_header(folder, entry)
        with FileIO(path) as file:
            offsets = read_offsets(file, header)
            faults = list(_sample_faults(manifest, header, file, offsets))
    except UserError as error:
        return ShardReport(entry.name, faults=[str(error)])
    except OSError as error:
        return ShardReport(entry.name, faults=[f"{path} cannot be read: {error.strerror}"])
    lengths = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
    statistics = header.metadata["statistics"]
    return ShardReport(entry.name, False, faults, lengths, statistics["num_supervised"], header.metadata["codec"]["relative_error"])


def recompute_samples(manifest: Manifest, folder: Path, entry: ShardEntry, capture: Capture, num_samples: int | None) -> list[str]:
    """Recomputes `num_samples` samples of a whole shard (None: all), drawn by hash; returns one line per sample that differs."""
    header = manifest.read_shard_header(folder, entry)
    codec, sample_ids = codec_named(manifest.codec), header.metadata["sample_ids"]
    drawn = sorted(range(len(sample_ids)), key=lambda place: xxhash.xxh3_64_intdigest(f"verify:{entry.name}:{place}".encode()))
    faults = []
    with FileIO(folder / entry.name) as file:
        offsets = read_offsets(file, header)
        for place in drawn[:num_samples]:
            rows = _read_sample(file, header, offsets[place], offsets[place + 1])
            recomputed = capture.recompute(rows.pop("input_ids"))
            rows.pop("loss_mask")
            try:
                require_sample(sample_ids[place], manifest.contract.layer_ids.ids, codec, rows, recomputed)
            except ContentError as error:
                faults.append(str(error))
    return faults


def _sample_faults(manifest: Manifest, header: ShardHeader, file: FileIO, offsets: list[int]) -> Iterator[str]:
    sample_ids, codec = header.metadata["sample_ids"], codec_named(manifest.codec)
    checks = ContentChecks(manifest.contract.layer_ids.ids, SamplePlaces(sample_ids, torch.tensor(offsets)))
    encoded = codec.token_layout(len(manifest.contract.layer_ids.ids), manifest.contract.hidden_size)
    for place, checksum in enumerate(header.metadata["sample_checksums"]):
        begin, end = offsets[place : place + 2]
        rows = _read_sample(file, header, begin, end)
        if sample_checksum(begin, rows) != checksum:
            yield f"sample {sample_ids[place]}, rows {begin} to {end - 1} of the shard: its bytes do not have the checksum in the header"
            continue
        try:
            checks.check(begin, codec.decode({name: rows[name] for name in encoded}), rows.get("teacher_state"))
        except ContentError as error:
            yield str(error)


def _read_sample(file: FileIO, header: ShardHeader, begin: int, end: int) -> dict[str, Tensor]:
    """A sample's rows of every array but `offsets`."""
    return {
        name: read_rows(file, array, begin, torch.empty((end - begin, *array.shape[1:]), dtype=array.dtype))
        for name, array in header.arrays.items()
        if name != "offsets"
    }
