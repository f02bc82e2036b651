"""Reading whole shards: the bad shards of case C19 and what is said of each, sample by sample."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_train.capture import Recomputed
from dflash_train.features import verify
from dflash_train.features.manifest import Manifest, ShardEntry
from dflash_train.features.shard import open_shard, sample_checksum
from dflash_train.features.verify import read_shard, recompute_samples
from dflash_train.layers import FeatureContract, LayerIds

CASE = json.loads((Path(__file__).parents[1] / "data" / "cases" / "C19.json").read_text())
ENTRY = ShardEntry("shard-00000.safetensors", 1, 34)
MANIFEST = Manifest(FeatureContract(LayerIds((1, 3, 4), 8), 32, False, {}, {}), "bf16", "bfloat16", 0, 1, "", "true", (ENTRY,))


def whole() -> dict[str, Tensor]:
    """34 tokens, 3 layers, width 32, as the case's own shards."""
    features_TLD = torch.randn(34, 3, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids_T = torch.arange(34, dtype=torch.int32)
    return {"input_ids": ids_T, "loss_mask": torch.ones(34, dtype=torch.uint8), "features": features_TLD, "offsets": torch.tensor([0, 34])}


def write(folder: Path, arrays: dict[str, Tensor]) -> None:
    """A shard with one sample `x` as a faulty writer leaves it: all checksums are right."""
    rows = {name: array[:34] for name, array in arrays.items() if name != "offsets"}
    metadata = {
        "contract": MANIFEST.contract.to_dict(),
        "codec": {"name": "bf16", "relative_error": [0.0] * 3},
        "sample_ids": ["x"],
        "sample_checksums": [sample_checksum(0, rows)],
        "statistics": {"num_supervised": 34},
    }
    with open_shard(folder / ENTRY.name, {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}, metadata) as file:
        for name, array in arrays.items():
            file.write_rows(name, 0, array)
        file.finish(metadata)


def put(row: int, plane: int, value: float) -> Callable[[dict[str, Tensor]], None]:
    def edit(arrays: dict[str, Tensor]) -> None:
        arrays["features"][row, plane] = value

    return edit


BAD = {
    "ok": (lambda arrays: None, None),
    "nan": (put(2, 1, float("nan")), "sample x, row 2 of 34: the feature of layer 3 is nan"),
    "inf": (put(33, 0, float("inf")), "sample x, row 33 of 34: the feature of layer 1 is inf"),
    "short_rows": (lambda a: a.update(features=a["features"][:-1]), "features is [33, 3, 32] in torch.bfloat16, not [34, 3, 32]"),
    "missing_plane": (lambda a: a.update(features=a["features"][:, :2]), "features is [34, 2, 32] in torch.bfloat16, not [34, 3, 32]"),
    "float32": (
        lambda a: a.update(features=a["features"].float()),
        "features is [34, 3, 32] in torch.float32, not [34, 3, 32] in torch.bfloat16",
    ),
    "long_mask": (lambda a: a.update(loss_mask=torch.ones(35, dtype=torch.uint8)), "loss_mask is [35] in torch.uint8, not [34]"),
    "all_zero": (
        lambda a: a["features"].zero_(),
        "sample x, row 0 of 34: the feature of layer 1 is zero in all rows: nothing was captured",
    ),
}


@pytest.mark.parametrize("name", CASE["expect"])
def test_bad_shards(tmp_path, name):
    edit, said = BAD[name]
    arrays = whole()
    edit(arrays)
    write(tmp_path, {name: array.contiguous() for name, array in arrays.items()})
    report = read_shard(MANIFEST, tmp_path, ENTRY)
    if said is None:
        assert not report.faults and report.lengths == [34]
    else:
        assert len(report.faults) == 1 and said in report.faults[0], report.faults


def test_what_the_disk_does_not_give_is_a_fault(tmp_path, monkeypatch):
    write(tmp_path, whole())

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify, "sample_checksum", fail)
    (fault,) = read_shard(MANIFEST, tmp_path, ENTRY).faults
    assert fault.endswith("shard-00000.safetensors cannot be read: Input/output error")


def test_a_missing_shard_has_no_fault_but_is_missing(tmp_path):
    report = read_shard(MANIFEST, tmp_path, ENTRY)
    assert report.missing and not report.faults


def test_recomputing_names_sample_layer_and_row(tmp_path):
    write(tmp_path, whole())
    exact = whole()["features"].float()

    class Capture:
        def recompute(self, input_ids_T: Tensor) -> Recomputed:
            assert input_ids_T.tolist() == list(range(34))
            return Recomputed(torch.float32, exact, None)

    assert recompute_samples(MANIFEST, tmp_path, ENTRY, Capture(), None) == []
    exact[20, 2] += 1
    (fault,) = recompute_samples(MANIFEST, tmp_path, ENTRY, Capture(), 1)
    assert "sample x, row 20 of 34: the feature of layer 4 is not what the target gives for this sample alone" in fault
    assert recompute_samples(MANIFEST, tmp_path, ENTRY, Capture(), 0) == []
