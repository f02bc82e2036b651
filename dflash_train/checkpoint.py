"""Checkpoints of a training run: whole folders that appear at once, and the record of which one is best.

    run_dir/train/best.json                     {"step", "tau", "checkpoint"}
    run_dir/train/checkpoints/step-00000020/    model.safetensors      fp32 weights under the drafter's own names
                                                ema.safetensors        their moving average, with train.ema
                                                optimizer.safetensors  NAME/exp_avg, NAME/exp_avg_sq, ... of each weight
                                                config.json            of the drafter
                                                state.json             position, contract, settings, best so far

Everything is safetensors or JSON, nothing is pickled, and nothing in a folder depends on the time, the host or the number of
processes. Only the main process writes.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_train.atomic import TEMPORARY_PREFIX, atomic_path, write_json
from dflash_train.config import Weights
from dflash_train.drafter import DFlashDraftModel
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.optimizer import DrafterOptimizer
from dflash_train.weight_files import sample_digest

_FILES = {Weights.raw: "model.safetensors", Weights.ema: "ema.safetensors"}


def save_checkpoint(
    train_dir: Path, drafter: DFlashDraftModel, optimizer: DrafterOptimizer, state: dict[str, Any], ema: Ema | None = None
) -> Path:
    """Writes the checkpoint after `state["step"]` optimizer steps. One that is there already is the same one and is left alone."""
    path = _checkpoints_dir(train_dir) / _name(state["step"])
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    with atomic_path(path) as folder:
        folder.mkdir()
        save_file(_on_cpu(drafter.state_dict()), folder / _FILES[Weights.raw], metadata={"format": "pt"})
        if ema is not None:
            save_file(_on_cpu(ema.tensors), folder / _FILES[Weights.ema], metadata={"format": "pt"})
        save_file(_on_cpu(optimizer.tensors()), folder / "optimizer.safetensors", metadata={"format": "pt"})
        drafter.config.save_pretrained(folder)
        write_json(folder / "state.json", state)
    return path


def choose_weights(path: Path, wanted: Weights, setting: str) -> Weights:
    """Which weights of the checkpoint in `path` are meant: raw or ema. Raises UserError for an ema that is not there."""
    has_ema = (path / _FILES[Weights.ema]).is_file()
    if wanted is Weights.ema and not has_ema:
        raise UserError(f"{setting}=ema, but {path} holds no moving average (it was trained with train.ema=null); allowed here: auto, raw")
    return Weights.ema if has_ema and wanted is not Weights.raw else Weights.raw


def load_drafter(path: Path, device: torch.device | str, weights: Weights = Weights.raw) -> tuple[DFlashDraftModel, dict[str, Any]]:
    """The drafter of a checkpoint, in fp32 on `device`, with its raw or ema `weights`, and the checkpoint's state.

    Raises UserError when the folder is not a whole checkpoint.
    """
    state = read_state(path)
    drafter = DFlashDraftModel(DFlashDraftModel.config_class.from_pretrained(path)).to(device=device, dtype=torch.float32)
    load_weights(path, drafter, weights)
    return drafter, state


def load_weights(path: Path, drafter: DFlashDraftModel, weights: Weights = Weights.raw) -> None:
    """Overwrites the drafter's weights with those of a checkpoint; every tensor must be there and fit."""
    file = path / _FILES[weights]
    try:
        drafter.load_state_dict(_read(file))
    except RuntimeError as error:
        raise UserError(f"{file} does not fit the drafter: {' '.join(str(error).split())}") from error


def load_optimizer(path: Path, optimizer: DrafterOptimizer) -> None:
    """Restores the optimizer's state of every parameter; hyper-parameters stay those of `optimizer`."""
    optimizer.load(_read(path / "optimizer.safetensors"))


def load_ema(path: Path, ema: Ema) -> None:
    """Restores the moving average of the weights."""
    ema.load(_read(path / _FILES[Weights.ema]))


def weights_digest(path: Path, weights: Weights = Weights.raw) -> str:
    """Stands for the raw or ema weights of the checkpoint in `path`."""
    return sample_digest(path / _FILES[weights])


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    try:
        return json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a checkpoint: cannot read its state.json ({error})") from error


def latest_checkpoint(train_dir: Path) -> Path | None:
    """The checkpoint of the highest step."""
    return max(all_checkpoints(train_dir), default=None)


def best_checkpoint(train_dir: Path) -> Path | None:
    """The checkpoint with the highest held-out replay tau, as `best.json` records it."""
    record = Path(train_dir) / "best.json"
    if not record.is_file():
        return None
    return _checkpoints_dir(train_dir) / json.loads(record.read_text(encoding="utf-8"))["checkpoint"]


def record_best(train_dir: Path, best: dict[str, Any] | None) -> None:
    """Writes `best.json` for `{"step", "tau"}`; removes a stale one for None."""
    record = Path(train_dir) / "best.json"
    if best is None:
        record.unlink(missing_ok=True)
    else:
        write_json(record, best | {"checkpoint": _name(best["step"])})


def resolve_checkpoint(train_dir: Path, wanted: str, setting: str) -> Path:
    """`best`, `latest` or a checkpoint folder, as `setting` names it. Raises UserError that names the checkpoints there are."""
    match wanted:
        case "best":
            path = best_checkpoint(train_dir)
        case "latest":
            path = latest_checkpoint(train_dir)
        case _:
            path = Path(wanted)
    if path is not None and (path / "state.json").is_file():
        return path
    there = ", ".join(map(str, all_checkpoints(train_dir))) or f"none in {_checkpoints_dir(train_dir)}: run stage=train first"
    raise UserError(
        f"{setting}={wanted} is not there; allowed are best (needs held-out samples: data.heldout_share), latest, or a folder; "
        f"checkpoints: {there}"
    )


def remove_old_checkpoints(train_dir: Path, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints and the best one, and what killed writers left behind."""
    kept = {*all_checkpoints(train_dir)[-keep:], best_checkpoint(train_dir)}
    for path in all_checkpoints(train_dir):
        if path not in kept:
            # renamed first, so that a half-deleted folder never carries a checkpoint's name
            path.rename(path.with_name(f"{TEMPORARY_PREFIX}{path.name}"))
    for leftover in _checkpoints_dir(train_dir).glob(f"{TEMPORARY_PREFIX}*"):
        if re.fullmatch(rf"{re.escape(TEMPORARY_PREFIX)}(\w{{8}}-)?step-\d{{8}}", leftover.name):
            shutil.rmtree(leftover)


def _name(step: int) -> str:
    return f"step-{step:08}"


def _checkpoints_dir(train_dir: Path) -> Path:
    return Path(train_dir) / "checkpoints"


def all_checkpoints(train_dir: Path) -> list[Path]:
    """Every checkpoint there is, oldest first."""
    folder = _checkpoints_dir(train_dir)
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name))


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
