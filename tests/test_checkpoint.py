"""What is written is what is read, nothing half-written carries a checkpoint's name, and only the stated retention deletes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_drafters import make_drafter

from dflash_train import checkpoint
from dflash_train.checkpoint import (
    best_checkpoint,
    choose_weights,
    latest_checkpoint,
    load_drafter,
    load_ema,
    load_optimizer,
    record_best,
    remove_old_checkpoints,
    resolve_checkpoint,
    save_checkpoint,
)
from dflash_train.config import Weights
from dflash_train.drafter import DFlashDraftModel
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.optimizer import DrafterOptimizer, make_optimizer


def trained(num_steps: int = 2) -> tuple[DFlashDraftModel, DrafterOptimizer]:
    drafter = make_drafter(["sliding_attention", "full_attention"], sliding_window=8)
    optimizer = make_optimizer(drafter, weight_decay=0.01)
    for _ in range(num_steps):
        step(drafter, optimizer)
    return drafter, optimizer


def step(drafter: DFlashDraftModel, optimizer: DrafterOptimizer) -> None:
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.set_lr(6e-4)
    optimizer.step()


def names(train_dir: Path) -> list[str]:
    return sorted(path.name for path in (train_dir / "checkpoints").iterdir())


def test_a_step_after_loading_is_the_step_that_would_have_followed(tmp_path: Path) -> None:
    drafter, optimizer = trained()
    path = save_checkpoint(tmp_path, drafter, optimizer, {"step": 2, "seed": 7})
    loaded, state = load_drafter(path, "cpu")
    assert state == {"step": 2, "seed": 7}
    fresh = make_optimizer(loaded, weight_decay=0.01)
    load_optimizer(path, fresh)
    step(drafter, optimizer)
    step(loaded, fresh)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert loaded.config.to_dict() | {"dtype": None} == drafter.config.to_dict() | {"dtype": None}


def test_c27_weights_are_fp32_on_disk_and_after_loading(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(), {"step": 2})
    with safe_open(path / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118 (no iterator)
        assert len(file.keys()) == 11 * 2 + 3
    loaded, _ = load_drafter(path, "cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    before = loaded.norm.weight.clone()
    optimizer = make_optimizer(loaded, weight_decay=0.0)
    load_optimizer(path, optimizer)
    step(loaded, optimizer)
    assert (loaded.norm.weight < before).all()


def test_the_average_stands_beside_the_weights(tmp_path: Path) -> None:
    drafter, optimizer = trained()
    ema = Ema(drafter, decay=0.9)
    step(drafter, optimizer)
    ema.update(2)
    path = save_checkpoint(tmp_path, drafter, optimizer, {"step": 3}, ema)
    assert {weights: choose_weights(path, weights, "export.weights") for weights in Weights} == {"auto": "ema", "raw": "raw", "ema": "ema"}
    averaged, _ = load_drafter(path, "cpu", Weights.ema)
    other = Ema(averaged, decay=0.9)
    assert all(torch.equal(tensor, averaged.state_dict()[name]) for name, tensor in ema.tensors.items())
    assert averaged.state_dict().keys() == ema.tensors.keys() and not torch.equal(averaged.norm.weight, drafter.norm.weight)
    load_ema(path, other)
    for average in (ema, other):
        average.parameters = dict(drafter.named_parameters())
        average.update(3)
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in ema.tensors.items())


def test_a_writer_that_dies_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, optimizer = trained()
    monkeypatch.setattr(checkpoint, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, drafter, optimizer, {"step": 2})
    assert latest_checkpoint(tmp_path) is None


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    drafter, optimizer = trained(0)
    for number in (1, 2, 3, 10):
        save_checkpoint(tmp_path, drafter, optimizer, {"step": number})
    record_best(tmp_path, {"step": 1, "tau": 2.5})
    (tmp_path / "checkpoints" / ".tmp-0a1b2c3d-step-00000009").mkdir()  # of a killed writer
    (tmp_path / "checkpoints" / ".tmp-step-00000008").mkdir()  # of a killed deletion
    own = [".tmp-step-by-step", "notes", "step-00000002-copy", "step-2"]  # the user's
    for name in own:
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "notes.txt").touch()
    remove_old_checkpoints(tmp_path, keep=2)
    assert names(tmp_path) == sorted([*own, "step-00000001", "step-00000003", "step-00000010"])
    assert (tmp_path / "notes.txt").is_file()
    assert latest_checkpoint(tmp_path).name == "step-00000010" and best_checkpoint(tmp_path).name == "step-00000001"
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 1, "tau": 2.5, "checkpoint": "step-00000001"}


def test_resolving(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint=best is not there.*run stage=train first"):
        resolve_checkpoint(tmp_path, "best", "export.checkpoint")
    path = save_checkpoint(tmp_path, *trained(0), {"step": 4})
    assert (
        resolve_checkpoint(tmp_path, "latest", "export.checkpoint") == resolve_checkpoint(tmp_path, str(path), "export.checkpoint") == path
    )
    for wanted in ("best", "newest"):
        with pytest.raises(UserError, match=rf"checkpoint={wanted} is not there.*{path}"):
            resolve_checkpoint(tmp_path, wanted, "export.checkpoint")
    record_best(tmp_path, {"step": 4, "tau": 1.5})
    assert resolve_checkpoint(tmp_path, "best", "export.checkpoint") == path
    record_best(tmp_path, None)
    assert best_checkpoint(tmp_path) is None


def test_a_broken_checkpoint_is_named_in_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained(0), {"step": 4})
    (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        load_drafter(path, "cpu")
    (path / "state.json").unlink()
    with pytest.raises(UserError, match=r"is not a checkpoint: cannot read its state\.json"):
        load_drafter(path, "cpu")
