"""The folders of a run: `run_dir/{regenerate,prepare,extract,train,evaluate,export}`, each with the resolved config that made it."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

from dflash_train.atomic import write_json, write_text
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError

_RECORDED_PACKAGES = ("dflash-train", "torch", "transformers", "accelerate", "datasets", "safetensors")


def stage_dir(config: Config, stage: Stage) -> Path:
    """Where `stage` writes and where later stages read; nothing is created."""
    match stage:
        case Stage.extract:
            return Path(config.features.dir)
        case Stage.export:
            return Path(config.export.dir)
        case _:
            return Path(config.run_dir) / stage.value


def open_stage_dir(config: Config, stage: Stage, is_main_process: bool = True) -> Path:
    """Creates the stage's folder and, on the main process, writes `config.yaml` and `versions.json` into it.

    Raises UserError when the folder cannot be created or written.
    """
    folder = stage_dir(config, stage)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder} (run_dir={config.run_dir}): {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} (run_dir={config.run_dir}) is not writable")
    if is_main_process:
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        write_json(folder / "versions.json", _versions())
    return folder


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
