"""Folders of a run, and the progress line beside long work."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dflash_train.config import Config, ExportConfig, FeaturesConfig, Stage
from dflash_train.errors import UserError
from dflash_train.progress import Progress
from dflash_train.run_folder import open_stage_dir, stage_dir


def config(run_dir: Path) -> Config:
    return Config(
        run_dir=str(run_dir), features=FeaturesConfig(layer_ids=[1], dir=f"{run_dir}/extract"), export=ExportConfig(dir=f"{run_dir}/export")
    )


def test_every_stage_has_its_folder(tmp_path: Path) -> None:
    folders = {stage: stage_dir(config(tmp_path), stage) for stage in Stage if stage is not Stage.all}
    assert folders == {stage: tmp_path / stage.value for stage in folders} and not list(tmp_path.iterdir())


def test_the_resolved_config_lies_beside_the_output(tmp_path: Path) -> None:
    folder = open_stage_dir(config(tmp_path / "run"), Stage.train)
    written = OmegaConf.load(folder / "config.yaml")
    assert written.features.layer_ids == [1] and written.train.lr == 6e-4
    assert (folder / "versions.json").read_text().count("torch") == 1


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    assert not list(open_stage_dir(config(tmp_path), Stage.train, is_main_process=False).iterdir())


def test_a_run_dir_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot create .*file/run/train \(run_dir=.*file/run\): Not a directory"):
        open_stage_dir(config(tmp_path / "file" / "run"), Stage.train)


def test_progress_says_rate_and_time_left(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dflash_train.progress.time.monotonic", lambda: now[0])
    with Progress("train", total=100, unit="steps") as progress:
        progress.skip(40)
        now[0] += 10
        progress.advance(20, note="loss 1.0")
    first, last = capsys.readouterr().err.splitlines()
    assert first == last == "train  60.0% 60/100 steps, 2.00 steps/s, 0:20 left · loss 1.0"


def test_other_processes_say_nothing(capsys: pytest.CaptureFixture) -> None:
    with Progress("train", total=1, unit="steps", enabled=False) as progress:
        progress.advance(1)
    assert capsys.readouterr().err == ""
