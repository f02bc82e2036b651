"""The record of a training run: `metrics.jsonl`, and wandb where a project is set.

In: one dictionary per logged step. Out: one JSON object per line, flushed at once. A resumed run first cuts the file back to its
checkpoint's step, so a step never stands in it twice. Only the main process writes.
"""

import json
import netrc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO
from urllib.parse import urlparse

from dflash_train.atomic import write_text

_WANDB_INIT_SECONDS = 30
_WANDB_FINISH_SECONDS = 120


class Tracker:
    """Appends to `folder/metrics.jsonl` what follows `step`; does nothing unless `enabled`. `wandb_project=None` means no wandb."""

    def __init__(
        self, folder: Path, step: int, enabled: bool, wandb_project: str | None, wandb_name: str | None, settings: dict[str, Any]
    ) -> None:
        self._file: TextIO | None = None
        self._wandb_run: Any = None
        if enabled:
            path = folder / "metrics.jsonl"
            write_text(path, "".join(_rows_up_to(path, step)))
            self._file = path.open("a", encoding="utf-8")
            self._wandb_run = start_wandb(folder, wandb_project, wandb_name, settings) if wandb_project else None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._wandb_run is not None:
            self._try_wandb(lambda run: run.finish(exit_code=int(kind is not None)))

    def log(self, row: dict[str, Any]) -> None:
        """Records `row`, which has a `step`."""
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        if self._wandb_run is not None:
            self._try_wandb(lambda run: run.log(_scalars(row), step=row["step"]))

    def _try_wandb(self, call: Callable[[Any], None]) -> None:
        """What wandb meets must not end a training run: it is told once, and metrics.jsonl goes on alone."""
        try:
            call(self._wandb_run)
        except Exception as error:
            _warn(f"wandb failed, training goes on without it: {_one_line(error)}")
            self._wandb_run = None


def start_wandb(folder: Path, project: str, name: str | None, settings: dict[str, Any]):
    """A wandb run that cannot stop or question the training: offline without a login, None with a warning where wandb fails."""
    try:
        import wandb
    except ImportError:
        _warn("train.wandb_project is set, but wandb is not installed (pip install wandb): training goes on without it")
        return None

    def start(mode: str | None):
        patience = {"init_timeout": _WANDB_INIT_SECONDS, "finish_timeout": _WANDB_FINISH_SECONDS}
        quiet = wandb.Settings(**patience, silent=True, console="off", disable_git=True)
        return wandb.init(project=project, name=name, dir=folder, config=settings, mode=mode, settings=quiet)

    mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_login() else "offline")
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            return start(attempt)
        except Exception as error:  # whatever wandb meets (network, login, quota) must not end a training run
            _warn(f"wandb cannot start ({attempt}): {_one_line(error)}")
    _warn("training goes on without wandb")
    return None


def _has_wandb_login() -> bool:
    """A key in the environment or in ~/.netrc, the places in which wandb looks before it would ask."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as wandb can plot it: no nulls, and a list as NAME/0, NAME/1, ... (NAME/1, ... where it counts slots, whose first is 1)."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        first = 1 if name.endswith("_by_position") else 0
        items = {f"{name}/{i}": item for i, item in enumerate(value, start=first)} if isinstance(value, list) else {name: value}
        flat |= {key: item for key, item in items.items() if item is not None}
    return flat


def _rows_up_to(path: Path, step: int) -> list[str]:
    """The whole lines of steps up to `step`; a line that a kill cut short is dropped."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
