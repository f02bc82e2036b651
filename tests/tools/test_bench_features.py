"""The benchmark of the feature dataset on a tiny target: every table comes out, with figures that can be checked by hand."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_datasets import extract_config, make_samples

from dflash_train.features.reader import FeatureDataset
from dflash_train.samples import load_samples
from dflash_train.stages.extract import run

SCRIPT = Path(__file__).parents[2] / "tools" / "bench_features.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
bench_features = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_features)

NUM_LAYERS, WIDTH = 2, 32  # captured layers of the tiny target, and their width


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared samples and features of a tiny target."""
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_models.make_qwen3(folder / "target")
    make_samples(folder / "run", target)
    run(extract_config(folder / "run", target))
    return folder / "run"


def _settings(run_dir: Path) -> list[str]:
    features = ["features.layer_ids=[1,3]", "features.shard_tokens=256", "features.tokens_per_forward=16"]
    return [f"target.path={run_dir.parent / 'target'}", "drafter.mask_token_id=300", "drafter.init_from=random", *features]


def _rows(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: object) -> list[dict]:
    """The rows of the --json file, after the printed table was held to them."""
    file = tmp_path / "rows.json"
    command, *rest = map(str, arguments)
    assert bench_features.main([command, "--json", str(file), *rest]) == 0
    rows = json.loads(file.read_text())["rows"]
    head, _, *lines = capsys.readouterr().out.strip().split("\n")
    assert len(lines) == len(rows) and all(f"| {name} |" in head for name in rows[0])
    return rows


def test_extract_is_compared_with_the_bare_forward(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run_dir.iterdir())
    bare, whole, waited, beside = _rows(capsys, tmp_path, "extract", "--run-dir", run_dir, "--rounds", 2, *_settings(run_dir))
    assert bare["share"] == bare["share by CPU"] == 1
    assert bare["tokens/s"] > whole["tokens/s"] > 0 and 0 < whole["share"] < 1  # 16 tokens a forward: mostly bookkeeping
    assert 0 < waited["share"] < 1 and 0 < beside["share"] < 1
    assert sorted(run_dir.iterdir()) == before


def test_extract_memory_compares_a_tenth_of_the_samples_with_all(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(arguments: object, part: Path) -> float:
        return 100.0 + len(load_samples(part / "prepare").dataset)

    monkeypatch.setattr(bench_features, "_peak_mb", count)
    tenth, whole = _rows(capsys, tmp_path, "extract", "--memory", "--run-dir", run_dir, *_settings(run_dir))
    assert (tenth["samples"], whole["samples"]) == (4, 40) and tenth["tokens"] < whole["tokens"]
    assert (tenth["peak MB"], whole["peak MB"]) == (104, 140)
    assert tenth["growth"] == 0 and whole["growth"] == pytest.approx(36 / 104)


@pytest.mark.slow
def test_peak_memory_is_that_of_the_extraction_alone(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "prepare").symlink_to(run_dir / "prepare")
    ballast = torch.ones(500_000_000)  # 2 GB of this process
    peak_mb = bench_features._peak_mb(argparse.Namespace(settings=_settings(run_dir)), tmp_path / "run")
    assert 100 < peak_mb < ballast.nbytes / 1e6


def test_read_compares_two_ways_to_the_same_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(bench_features, "SHAPES", {"S": (64, 2, 128), "M": (128, 2, 128)})
    sizes = ["--samples", 20, "--tokens-per-batch", 128, "--rounds", 3, "--folder", tmp_path]
    rows = _rows(capsys, tmp_path, "read", *sizes)
    assert [row["shape"] for row in rows] == ["S", "M"]
    for row in rows:
        assert row["dataset, MB per CPU second"] > row["torch.save, MB per CPU second"] > 0 and row["ratio"] > 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_codecs_are_sized_held_to_the_values_and_timed(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "halves.py"
    experiment.write_text(HALVES)
    arguments = ["--run-dir", run_dir, "--tokens", 200, "--rounds", 1, "--experiment", experiment]
    rows = {row["codec"]: row for row in _rows(capsys, tmp_path, "codecs", *arguments, *_settings(run_dir))}
    assert list(rows) == ["bf16", "fp8", "halves"]
    assert rows["bf16"]["bytes per token"] == NUM_LAYERS * WIDTH * 2 and rows["bf16"]["encode GB/s"] is None
    assert rows["fp8"]["bytes per token"] == NUM_LAYERS * WIDTH + NUM_LAYERS * 4
    for figure in ("error", "outside 8 outlier channels", "median row"):
        assert 2**-11 < rows["bf16"][figure] < 2**-8  # bf16 rounds by at most 2^-9 of a value, fp8 by 2^-4, and halving leaves a half
        assert 2**-7 < rows["fp8"][figure] < 2**-4
        assert rows["halves"][figure] == pytest.approx(0.5, rel=0.01)
    assert all(rows[codec]["decode GB/s"] > 0 for codec in rows) and rows["fp8"]["encode GB/s"] > 0


HALVES = """
from dflash_train.features.codec import Bf16Codec, Codec


class Halves(Codec):
    name = "halves"
    spacing = 1.0

    def token_layout(self, num_layers, hidden_size):
        return Bf16Codec().token_layout(num_layers, hidden_size)

    def encode(self, features_TLD):
        return {"features": features_TLD.bfloat16() / 2}

    def decode(self, arrays, *options, **more):
        return Bf16Codec().decode(arrays, *options, **more)
"""


def test_tau_of_a_short_training_on_every_codec(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(capsys, tmp_path, "tau", "--run-dir", run_dir, "--steps", 2, "--seeds", 1, *_settings(run_dir))
    assert [row["codec"] for row in rows] == ["bf16", "fp8"]
    assert all(1 <= row["tau, seed 0"] <= 8 and 0 < row["core-minutes, seed 0"] < 1 for row in rows)


def test_recoded_samples_hold_what_the_codec_makes_of_them(run_dir: Path, tmp_path: Path) -> None:
    source = FeatureDataset(run_dir / "extract")
    (tmp_path / "halves.py").write_text(HALVES)
    codecs = bench_features.codecs_of(argparse.Namespace(experiment=tmp_path / "halves.py"))
    for codec, stored in zip(codecs, ("bf16", "fp8", "bf16"), strict=True):
        bench_features.recode(source, codec, tmp_path / codec.name)
        recoded = FeatureDataset(tmp_path / codec.name)
        assert recoded.manifest.codec == stored
        for split in ("train", "heldout"):
            assert recoded.refs(split) == source.refs(split)
            for ref in source.refs(split):
                exact, found = source.read(ref), recoded.read(ref)
                assert torch.equal(found.input_ids_T, exact.input_ids_T) and torch.equal(found.loss_mask_T, exact.loss_mask_T)
                assert torch.equal(found.features_TLD, codec.decode(codec.encode(exact.features_TLD)))


@pytest.mark.parametrize(
    ("command", "missing", "stage"), [("extract", "prepare/summary", "prepare"), ("tau", "extract/manifest", "extract")]
)
def test_a_stage_that_has_not_run_is_said(
    command: str, missing: str, stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_features.main([command, "--run-dir", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/nowhere/{missing}.json is missing: run stage={stage} first\n"
