"""stage=verify on tiny datasets: what it prints, every kind of damage, every wrong content, and that extract makes it good again."""

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from planted_faults import FAULTS
from tiny_datasets import extract_config, make_samples, rewrite_shard

from dflash_train.capture import Capture
from dflash_train.config import Config, Dtype, VerifyConfig
from dflash_train.errors import UserError
from dflash_train.features import writer
from dflash_train.features.checks import ContentChecks
from dflash_train.features.codec import Bf16Codec
from dflash_train.features.shard import read_header, read_offsets
from dflash_train.samples import load_samples
from dflash_train.stages import extract, verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Config:
    run_dir = tmp_path_factory.mktemp("run")
    target = tiny_models.make_qwen3(run_dir / "target")
    make_samples(run_dir, target)
    config = extract_config(run_dir, target, teacher_state=True)
    extract.run(config)
    return config


@pytest.fixture
def copied(tmp_path, finished) -> Config:
    shutil.copytree(finished.run_dir, tmp_path / "run")
    return extract_config(tmp_path / "run", Path(finished.target.path), teacher_state=True)


def without_target(config: Config) -> Config:
    return dataclasses.replace(config, verify=VerifyConfig(samples_per_shard=0))


def test_a_sound_dataset(copied, capsys):
    before = {path.name: path.read_bytes() for path in Path(copied.features.dir).iterdir()}
    verify.run(copied)
    out = capsys.readouterr().out
    assert "[1, 3] of 6, 32 wide" in out and "Qwen3ForCausalLM" in out and "all 4 shards are whole" in out
    assert "read: 40 of 40 samples, 923 of 923 tokens" in out
    lengths = [len(ids) for ids in load_samples(Path(copied.run_dir) / "prepare").dataset["input_ids"]]
    width = -(-(max(lengths) - min(lengths) + 1) // 12)
    first = sum(length < min(lengths) + width for length in lengths)
    assert re.search(rf"{min(lengths)} to {min(lengths) + width - 1} +│ {first} ", out)
    assert "layer 1: bf16 error 0.1" in out
    assert before == {path.name: path.read_bytes() for path in Path(copied.features.dir).iterdir()}


def test_the_target_is_loaded_only_when_samples_are_recomputed(copied, monkeypatch):
    monkeypatch.setattr(verify, "load_target", None)
    monkeypatch.setattr(verify, "contract_for", None)
    verify.run(without_target(copied))


def test_recomputing_all_samples(copied, monkeypatch):
    calls = []
    genuine = Capture.recompute
    monkeypatch.setattr(Capture, "recompute", lambda self, ids: calls.append(len(ids)) or genuine(self, ids))
    verify.run(dataclasses.replace(copied, verify=VerifyConfig(samples_per_shard=None)))
    assert len(calls) == 40 and sum(calls) == 923


def _flip(path: Path, array: str, row: int, byte: int = 0) -> None:
    stored = read_header(path).arrays[array]
    with path.open("r+b") as file:
        file.seek(stored.start + row * stored.row_bytes + byte)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("array", ["features", "input_ids", "loss_mask", "teacher_state"])
def test_a_flipped_bit_names_its_sample(copied, finished, capsys, array):
    path = Path(copied.features.dir) / "shard-00001.safetensors"
    header = read_header(path)
    with path.open("rb", buffering=0) as file:
        offsets = read_offsets(file, header)
    owner = next(sample for sample, end in enumerate(offsets[1:]) if end > 50)
    _flip(path, array, 50)
    with pytest.raises(UserError, match=r"of 4 shards, damaged or wrong: 1 \(shard-00001.safetensors\); run stage=extract again"):
        verify.run(without_target(copied))
    err = capsys.readouterr().err
    assert f"shard-00001.safetensors: sample {header.metadata['sample_ids'][owner]}, rows {offsets[owner]} to" in err
    assert err.count("do not have the checksum") == 1
    assert not path.exists() and path.with_name("shard-00001.safetensors.damaged").exists()
    extract.run(copied)
    assert path.read_bytes() == (Path(finished.features.dir) / path.name).read_bytes()
    verify.run(copied)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is damaged: it has"),
        (lambda path: path.write_bytes(b"no shard"), "is damaged: its header"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"sample-", b"SAMPLE-", 1)), "its header does not have the checksum"),
        (lambda path: _flip(path, "offsets", 1), "offsets do not cut|do not have the checksum"),
    ],
)
def test_damaged_files(copied, capsys, damage, said):
    damage(Path(copied.features.dir) / "shard-00002.safetensors")
    with pytest.raises(UserError, match=r"damaged or wrong: 1 \(shard-00002.safetensors\)"):
        verify.run(without_target(copied))
    assert re.search(f"shard-00002.safetensors: .*({said})", capsys.readouterr().err)


def test_a_second_damaged_file_does_not_replace_the_first(copied):
    path = Path(copied.features.dir) / "shard-00002.safetensors"
    for content in (b"first", b"second"):
        path.write_bytes(content)
        with pytest.raises(UserError):
            verify.run(without_target(copied))
    assert path.with_name(f"{path.name}.damaged").read_bytes() == b"first"
    assert path.with_name(f"{path.name}.damaged1").read_bytes() == b"second"


def test_missing_shards_are_listed(copied):
    (Path(copied.features.dir) / "shard-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"of 4 shards, missing: 1 \(shard-00000.safetensors\); run stage=extract again"):
        verify.run(without_target(copied))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.by_verify])
def test_planted_faults_are_found_with_the_target(tmp_path, name, monkeypatch, capsys):
    """A dataset that a faulty capture wrote without any check: checksums are right, contents are wrong."""
    target = tiny_models.make_qwen35_wrapper(tmp_path / "target")
    make_samples(tmp_path / "run", target)
    config = extract_config(tmp_path / "run", target, tokens_per_forward=120, shard_tokens=1920)
    with monkeypatch.context() as careless:
        careless.setattr(Capture, "run", FAULTS[name].plant(Capture.run))
        careless.setattr(writer, "require_sample", lambda *arguments: None)
        careless.setattr(ContentChecks, "check", lambda self, *arguments: None)
        careless.setattr(ContentChecks, "median_norms", lambda self: [1.0, 1.0])
        careless.setattr(Bf16Codec, "squared_error", lambda self, features_TLD: (torch.zeros(2).double(), torch.ones(2).double()))
        careless.setattr(extract, "far_norms", lambda *arguments: [])
        extract.run(config)
    config.verify.samples_per_shard = None
    with pytest.raises(UserError, match="damaged or wrong: 1"):
        verify.run(config)
    err = capsys.readouterr().err
    assert re.search(FAULTS[name].by_verify, err), err


def test_teacher_states_behind_the_norm_are_found(copied, capsys):
    """The last hidden state instead of the input of the final norm."""
    norm = verify.load_target(copied.target, torch.device("cpu")).final_norm
    rewrite_shard(
        Path(copied.features.dir) / "shard-00001.safetensors",
        lambda arrays: arrays.update(teacher_state=norm(arrays["teacher_state"].float()).bfloat16()),
    )
    with pytest.raises(UserError, match="damaged or wrong: 1"):
        verify.run(copied)
    assert "the teacher state is not what the target gives" in capsys.readouterr().err


def test_another_target_or_dtype_is_refused(copied, tmp_path):
    other = dataclasses.replace(copied, target=dataclasses.replace(copied.target, path=str(tiny_models.make_qwen3(tmp_path / "o", seed=1))))
    with pytest.raises(UserError, match="the features and this run do not belong together.*target.weights"):
        verify.run(other)
    other = dataclasses.replace(copied, target=dataclasses.replace(copied.target, dtype=Dtype.bfloat16))
    with pytest.raises(UserError, match="made with target.dtype=float32, this run has bfloat16"):
        verify.run(other)
