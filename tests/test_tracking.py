"""`metrics.jsonl` holds every step once, and wandb can neither stop nor question a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_train.tracking import Tracker, start_wandb

NO_WANDB = {"wandb_project": None, "wandb_name": None, "settings": {}}


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_cuts_back_to_its_checkpoint(tmp_path: Path) -> None:
    with Tracker(tmp_path, 0, True, **NO_WANDB) as tracker:
        for step in (1, 2, 2, 3):  # the second 2 is an evaluation
            tracker.log({"step": step, "loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    with Tracker(tmp_path, 2, True, **NO_WANDB) as tracker:
        tracker.log({"step": 3, "loss": 0.25})
    assert steps(tmp_path) == [1, 2, 2, 3]


def test_a_run_from_the_start_forgets_an_earlier_one(tmp_path: Path) -> None:
    for _ in range(2):
        with Tracker(tmp_path, 0, True, **NO_WANDB) as tracker:
            tracker.log({"step": 1})
    assert steps(tmp_path) == [1]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path, 0, False, "project", None, {}) as tracker:
        tracker.log({"step": 1})
    assert not list(tmp_path.iterdir())


def test_c32_wandb_without_key_network_or_stdin_runs_offline(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from dflash_train.tracking import Tracker
with Tracker(Path(sys.argv[1]), 0, True, "project", "name", {"seed": 0}) as tracker:
    tracker.log({"step": 1, "loss": 0.5})
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = ["bash", "-c", 'exec "$0" -c "$1" "$2" <&-', sys.executable, script, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert steps(tmp_path) == [1]
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_wandb_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb

    modes: list[str] = []

    def fail(mode: str, **_: object) -> None:
        modes.append(mode)
        raise wandb.errors.CommError("no route\nto host")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert start_wandb(tmp_path, "project", None, {}) is None
    assert modes == ["offline"]
    assert capsys.readouterr().err.splitlines() == [
        "warning: wandb cannot start (offline): no route to host",
        "warning: training goes on without wandb",
    ]


def test_a_wandb_that_fails_on_the_way_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def log(self, row: dict, step: int) -> None:
            raise OSError("no space left")

    monkeypatch.setattr("dflash_train.tracking.start_wandb", lambda *_: Broken())
    with Tracker(tmp_path, 0, True, wandb_project="p", wandb_name=None, settings={}) as tracker:
        for step in (1, 2):
            tracker.log({"step": step})
    assert capsys.readouterr().err == "warning: wandb failed, training goes on without it: no space left\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_wandb_gets_scalars_and_metrics_jsonl_the_row_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        rows: list[tuple[int, dict]] = []

        def log(self, row: dict, step: int) -> None:
            self.rows.append((step, row))

        def finish(self, exit_code: int) -> None:
            pass

    monkeypatch.setattr("dflash_train.tracking.start_wandb", lambda *_: Recorder())
    row = {"step": 7, "tau": 2.5, "anchor_tau": None, "tau_ci95": [2.0, 3.0], "acceptance_by_position": [0.5, 0.25, None]}
    with Tracker(tmp_path, 0, True, wandb_project="p", wandb_name=None, settings={}) as tracker:
        tracker.log(row)
    scalars = {"tau_ci95/0": 2.0, "tau_ci95/1": 3.0, "acceptance_by_position/1": 0.5, "acceptance_by_position/2": 0.25}
    assert Recorder.rows == [(7, {"step": 7, "tau": 2.5} | scalars)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row


def test_a_login_without_a_network_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def only_offline(mode: str, **_: object) -> str:
        if mode != "offline":
            raise wandb.errors.CommError("unreachable")
        return "a run"

    monkeypatch.setattr(wandb, "init", only_offline)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert start_wandb(tmp_path, "project", None, {}) == "a run"
    assert len(capsys.readouterr().err.splitlines()) == 1
