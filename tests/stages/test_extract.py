"""stage=extract on tiny targets: content, byte equality however it is computed, resume after a kill, and what it refuses."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import datasets
import pytest
import tiny_models
import torch
from planted_faults import FAULTS
from tiny_datasets import extract_command, extract_config, make_samples

from dflash_train.capture import Capture, Captured
from dflash_train.config import Config, Dtype, FeatureCodec
from dflash_train.errors import UserError
from dflash_train.features.checks import ContentError
from dflash_train.features.reader import FeatureDataset
from dflash_train.features.shard import read_header
from dflash_train.layers import LayerIds
from dflash_train.samples import load_samples, save_samples
from dflash_train.stages.extract import run
from dflash_train.target import load_target

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_models.make_qwen3(tmp_path_factory.mktemp("target") / "qwen3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, target) -> Config:
    """A run with its features; tests that change files copy it."""
    run_dir = tmp_path_factory.mktemp("run")
    make_samples(run_dir, target)
    config = extract_config(run_dir, target)
    run(config)
    return config


@pytest.fixture
def copied(tmp_path, finished) -> Config:
    shutil.copytree(finished.run_dir, tmp_path / "run")
    return extract_config(tmp_path / "run", Path(finished.target.path))


def shards(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(config.features.dir).glob("shard-*.safetensors"))}


def test_reading_gives_what_capture_gives(finished):
    """Each sample alone and unpadded, through the target: to bf16 rounding, which is 2^-8 relative."""
    prepared = {row["sample_id"]: row for row in load_samples(Path(finished.run_dir) / "prepare").dataset}
    capture = Capture(load_target(finished.target, torch.device("cpu")), LayerIds((1, 3), 6))
    dataset = FeatureDataset(finished.features.dir)
    refs = dataset.refs("train") + dataset.refs("heldout")
    assert sorted(ref.sample_id for ref in refs) == sorted(prepared)
    for ref in refs:
        sample, row = dataset.read(ref), prepared[ref.sample_id]
        assert sample.input_ids_T.tolist() == row["input_ids"] and sample.loss_mask_T.tolist() == row["loss_mask"]
        assert (ref.split, ref.num_tokens, ref.num_supervised) == (row["split"], len(row["input_ids"]), sum(row["loss_mask"]))
        alone_TLD = capture.run(sample.input_ids_T[None], torch.ones(1, ref.num_tokens, dtype=torch.int64)).features_BTLD[0]
        torch.testing.assert_close(sample.features_TLD.float(), alone_TLD, rtol=2**-8, atol=1e-5)


def test_a_hybrid_wrapper_with_teacher_state(tmp_path):
    target = tiny_models.make_qwen35_wrapper(tmp_path / "target")
    make_samples(tmp_path / "run", target, num_samples=6)
    config = extract_config(tmp_path / "run", target, teacher_state=True, tokens_per_forward=60, shard_tokens=960)
    run(config)
    dataset = FeatureDataset(config.features.dir)
    capture = Capture(load_target(config.target, torch.device("cpu")), dataset.contract.layer_ids, teacher_state=True)
    for ref in dataset.refs("train"):
        sample = dataset.read(ref)
        alone = capture.run(sample.input_ids_T[None], torch.ones(1, ref.num_tokens, dtype=torch.int64))
        torch.testing.assert_close(sample.features_TLD.float(), alone.features_BTLD[0], rtol=2**-8, atol=1e-4)
        torch.testing.assert_close(sample.teacher_state_TD.float(), alone.teacher_state_BTD[0], rtol=2**-8, atol=1e-4)


def test_header_and_manifest_say_nothing_of_the_launch(finished):
    folder = Path(finished.features.dir)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["contract"]["layer_ids"] == [1, 3] and manifest["answers_from_target"] == "unknown"
    for entry in manifest["shards"]:
        metadata = read_header(folder / entry["name"]).metadata
        assert set(metadata) == {"contract", "codec", "sample_ids", "sample_checksums", "splits", "num_supervised", "statistics"}
        assert metadata["contract"] == manifest["contract"]
        assert all(2**-11 < error < 2**-8 for error in metadata["codec"]["relative_error"])  # fp32 rounded to 8 bits
        assert metadata["statistics"]["tokens_per_forward"] == 16
        assert finished.run_dir not in json.dumps(metadata)


def test_two_processes_write_what_one_writes(tmp_path, finished):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    config = extract_config(tmp_path, Path(finished.target.path))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    done = subprocess.run(extract_command(config, *launcher), cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert shards(config) == shards(finished) and len(shards(config)) > 2
    assert (Path(config.features.dir) / "manifest.json").read_text() == (Path(finished.features.dir) / "manifest.json").read_text()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_launchs_thread_count_changes_nothing(tmp_path, finished, num_threads):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    config = extract_config(tmp_path, Path(finished.target.path))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        run(config)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert shards(config) == shards(finished)


def test_kill_and_resume(tmp_path, target):
    make_samples(tmp_path / "undisturbed", target, num_samples=300)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "killed")
    undisturbed, killed = extract_config(tmp_path / "undisturbed", target), extract_config(tmp_path / "killed", target)
    run(undisturbed)
    process = subprocess.Popen(extract_command(killed), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(shards(killed)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = shards(killed)
    assert 3 <= len(there) < len(shards(undisturbed))
    assert there.items() <= shards(undisturbed).items()
    written = {name: (Path(killed.features.dir) / name).stat().st_mtime_ns for name in there}
    run(killed)
    assert shards(killed) == shards(undisturbed)
    assert written == {name: (Path(killed.features.dir) / name).stat().st_mtime_ns for name in there}  # not computed again
    assert not list(Path(killed.features.dir).glob(".tmp-*"))


def test_a_finished_run_loads_no_target(copied, monkeypatch):
    monkeypatch.setattr("dflash_train.stages.extract.load_target", None)
    run(copied)


@pytest.mark.parametrize("damage", ["torn", "longer", "header", "other contract", "other shard", "other samples"])
def test_a_damaged_shard_is_set_aside_and_made_again(copied, finished, capsys, damage):
    path, other = (Path(copied.features.dir) / f"shard-0000{i}.safetensors" for i in (0, 1))
    raw = path.read_bytes()
    match damage:
        case "torn":
            path.write_bytes(raw[:-100])
        case "longer":
            path.write_bytes(raw + b"x")
        case "header":
            path.write_bytes(raw[:20] + b"?" + raw[21:])
        case "other contract":
            path.write_bytes(raw.replace(b'\\"num_target_layers\\":6', b'\\"num_target_layers\\":7'))
        case "other shard":
            shutil.copy(other, path)
        case "other samples":  # of the same lengths: only extract, which has the samples, can tell
            path.write_bytes(raw.replace(b"sample-", b"SAMPLE-"))
    damaged = path.read_bytes()
    assert damaged != raw
    if damage != "other samples":
        with pytest.raises(UserError, match="shard-00000.safetensors is damaged"):
            FeatureDataset(copied.features.dir)
    run(copied)
    assert "shard-00000.safetensors.damaged" in capsys.readouterr().err
    assert shards(copied) == shards(finished)
    assert path.with_name("shard-00000.safetensors.damaged").read_bytes() == damaged


def test_fewer_tokens_per_forward_may_continue(copied, finished):
    (Path(copied.features.dir) / "shard-00001.safetensors").unlink()
    copied.features.tokens_per_forward = 8
    run(copied)
    first, second = (read_header(Path(copied.features.dir) / f"shard-0000{i}.safetensors").metadata for i in (0, 1))
    assert (first["statistics"]["tokens_per_forward"], second["statistics"]["tokens_per_forward"]) == (16, 8)
    FeatureDataset(copied.features.dir)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"layer_ids": [1, 2]}, r"layer_ids: \[1, 3\] != \[1, 2\]"),
        ({"teacher_state": True}, "teacher_state: False != True"),
        ({"shard_tokens": 512}, "shard_tokens: 256 there, 512 here"),
    ],
)
def test_other_settings_are_refused(copied, finished, change, shown):
    copied.features = dataclasses.replace(copied.features, **change)
    with pytest.raises(UserError, match=f"manifest.json is of another dataset .*{shown}.*choose another features.dir or run_dir"):
        run(copied)
    assert shards(copied) == shards(finished)


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, finished, capsys, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    monkeypatch.setattr("dflash_train.stages.extract.load_target", None)
    run(extract_config(tmp_path, Path(finished.target.path), dry_run=True))
    out = capsys.readouterr().out
    num_tokens = sum(len(ids) for ids in load_samples(tmp_path / "prepare").dataset["input_ids"])
    assert f"{num_tokens:,}" in out and "133" in out  # 2 layers x 32 x 2 bytes, id and mask: 133 bytes per token
    assert "nothing was computed" in out
    assert not (tmp_path / "extract").exists()


def test_a_dry_run_leaves_a_damaged_shard(copied, capsys):
    path = Path(copied.features.dir) / "shard-00000.safetensors"
    os.truncate(path, 1000)
    copied.features.dry_run = True
    run(copied)
    assert "shard-00000.safetensors is damaged" in capsys.readouterr().err
    assert path.stat().st_size == 1000


def test_fp8_features(tmp_path, finished):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    config = extract_config(tmp_path, Path(finished.target.path), codec=FeatureCodec.fp8)
    run(config)
    exact, coded = FeatureDataset(finished.features.dir), FeatureDataset(config.features.dir)
    for one, other in zip(exact.refs("train"), coded.refs("train"), strict=True):
        assert one == other
        exact_TLD, coded_TLD = exact.read(one).features_TLD.float(), coded.read(other).features_TLD.float()
        largest_TL1 = exact_TLD.abs().amax(-1, keepdim=True)
        assert ((coded_TLD - exact_TLD).abs() <= exact_TLD.abs() / 15 + largest_TL1 * 2**-16).all()  # 4 significant bits, and tiny values
        assert (coded_TLD != exact_TLD).any()
    error = read_header(Path(config.features.dir) / "shard-00000.safetensors").metadata["codec"]["relative_error"]
    assert all(0.005 < layer < 0.04 for layer in error)


def test_leftovers_of_killed_writers_are_removed(copied):
    leftover = Path(copied.features.dir) / ".tmp-shard-00099.safetensors"
    leftover.write_bytes(b"x" * 100)
    run(copied)
    assert not leftover.exists()


def test_a_layer_much_longer_than_elsewhere_is_warned_of(tmp_path, finished, capsys, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    genuine = Capture.compare_with_hidden_states
    monkeypatch.setattr(Capture, "compare_with_hidden_states", lambda self, *batch: genuine(self, *batch) * torch.tensor([[1.0], [0.01]]))
    config = extract_config(tmp_path, Path(finished.target.path))
    run(config)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: in the shard of sample")]
    assert len(warnings) == len(shards(config)) and all("the median norm of the features of layer 3 is" in line for line in warnings)
    assert shards(config) == shards(finished)


def test_another_dtype_or_seed_is_refused(copied):
    copied.target.dtype = Dtype.bfloat16
    copied.seed = 1
    with pytest.raises(UserError, match="target_dtype: float32 there, bfloat16 here; seed: 0 there, 1 here"):
        run(copied)


def test_other_samples_are_refused(copied):
    folder = Path(copied.run_dir) / "prepare"
    samples = load_samples(folder)
    in_memory = datasets.Dataset.from_dict(samples.dataset.select(range(39))[:], features=samples.dataset.features)
    save_samples(folder, in_memory, samples.summary)
    with pytest.raises(UserError, match="samples_digest: .* there, .* here"):
        run(copied)


def test_another_tokenizer_than_prepared_is_refused(copied, tmp_path):
    shutil.copytree(copied.target.path, tmp_path / "target")
    tiny_models.make_tokenizer(tmp_path / "target", template="think.jinja")
    copied.target.path = str(tmp_path / "target")
    with pytest.raises(UserError, match="prepared with another tokenizer.*chat_template .* != .*run stage=prepare again"):
        run(copied)


def test_missing_samples_are_told_before_the_target_is_looked_up(tmp_path):
    with pytest.raises(UserError, match="prepare.* is missing: run stage=prepare first"):
        run(extract_config(tmp_path, tmp_path / "no-such-target"))


def test_a_disk_too_small(tmp_path, finished, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(UserError, match=r"features.dir=.*: the features need \d+\.?\d* kB more, the disk has 1 kB free") as caught:
        run(extract_config(tmp_path, Path(finished.target.path)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "extract").exists()


def test_what_is_there_needs_no_space(copied, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(0))
    run(copied)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_stop_the_run(tmp_path, name, monkeypatch):
    """A hybrid target, so that padding can leak; a batch holds several samples, so that they can be swapped."""
    target = tiny_models.make_qwen35_wrapper(tmp_path / "target")
    make_samples(tmp_path / "run", target)
    config = extract_config(tmp_path / "run", target, tokens_per_forward=120, shard_tokens=1920)
    monkeypatch.setattr(Capture, "run", FAULTS[name].plant(Capture.run))
    with pytest.raises(ContentError, match=FAULTS[name].at_extraction) as caught:
        run(config)
    assert "\n" not in str(caught.value)
    assert [path.name for path in sorted(Path(config.features.dir).iterdir())] == ["config.yaml", "manifest.json", "versions.json"]


def test_a_sample_that_differs_may_only_be_warned_of(tmp_path, finished, capsys, monkeypatch):
    """A target whose rows depend on their batch mates for reasons of its own, say quantised activations."""
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    monkeypatch.setattr(Capture, "run", FAULTS["shifted by one"].plant(Capture.run))
    config = extract_config(tmp_path, Path(finished.target.path), check_samples=False)
    run(config)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: shard-0000")]
    assert len(warnings) == len(shards(config)) and all("is not what the target gives for this sample alone" in line for line in warnings)


def test_padding_may_hold_anything(tmp_path, finished, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    genuine = Capture.run

    def planted(self: Capture, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> Captured:
        captured = genuine(self, input_ids_BT, attention_mask_BT)
        captured.features_BTLD[attention_mask_BT == 0] = float("nan")
        return captured

    monkeypatch.setattr(Capture, "run", planted)
    config = extract_config(tmp_path, Path(finished.target.path))
    run(config)
    assert shards(config) == shards(finished)


def test_a_capture_that_differs_from_hidden_states_stops_the_run(tmp_path, finished, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    monkeypatch.setattr(LayerIds, "hf_hidden_states", property(lambda self: self.ids))
    config = extract_config(tmp_path, Path(finished.target.path))
    with pytest.raises(UserError, match="capture check failed: layer 1"):
        run(config)
    assert not shards(config)


def test_a_full_disk_ends_in_one_line(tmp_path, finished, monkeypatch):
    shutil.copytree(Path(finished.run_dir) / "prepare", tmp_path / "prepare")
    config = extract_config(tmp_path, Path(finished.target.path))
    genuine = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("shard-00001.safetensors"):
            raise OSError(28, "No space left on device")
        genuine(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot write .*shard-00001.safetensors: No space left on device"):
        run(config)
    monkeypatch.undo()
    run(config)
    assert shards(config) == shards(finished)
