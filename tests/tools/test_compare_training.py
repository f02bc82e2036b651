"""Short trainings compared: the variants compose with the recipe, what a training leaves is read, failures stand in the table."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from test_recipes import composed

TOOL = Path(__file__).parents[2] / "tools" / "compare_training.py"
sys.path.insert(0, str(TOOL.parent))
compare_training = importlib.import_module(TOOL.stem)


@pytest.mark.parametrize("name", compare_training.VARIANTS)
def test_every_variant_changes_one_thing_of_the_quickstart(name: str) -> None:
    settings = compare_training.VARIANTS[name]
    assert len(settings) == (name != "base")
    assert composed("quickstart", "stage=train", "features.teacher_state=true", *settings) is not None


def fake_python(folder: Path) -> Path:
    """Stands for `python -m dflash_train`: fails for seed 1, else writes the metrics of a run that ended with tau 3.25."""
    script = folder / "python"
    script.write_text(f"""#!{sys.executable}
import json, pathlib, sys
settings = dict(word.split("=", 1) for word in sys.argv if "=" in word)
if settings["seed"] == "1":
    sys.exit("error: no luck")
folder = pathlib.Path(settings["run_dir"]) / "train"
folder.mkdir(parents=True)
rows = [{{"step": 1, "loss": 2.0}}, {{"step": int(settings["train.max_steps"]), "tau": 3.25, "tau_ci95": [3.0, 3.5]}}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
""")
    script.chmod(0o755)
    return script


def test_the_table_shows_taus_and_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", str(fake_python(tmp_path)))
    (tmp_path / "extract").mkdir()
    (tmp_path / "extract" / "manifest.json").touch()
    arguments = ["--run-dir", str(tmp_path), "--steps", "7", "--only", "base", "--variant", "slow", "train.lr=1e-4"]
    assert compare_training.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 1
    out, err = capsys.readouterr()
    assert "| base | 3.25, failed: error: no luck |  |" in out and "| slow | 3.25, failed: error: no luck |  |" in out
    assert "4/4 slow, seed 1: error: no luck; about 0 min left" in err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["variant"], row["seed"], row["tau"]) for row in rows] == [
        ("base", 0, 3.25), ("slow", 0, 3.25), ("base", 1, None), ("slow", 1, None)
    ]  # fmt: skip


def test_a_folder_without_features_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_training.main(["--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'extract'} holds no features: see --help\n"
