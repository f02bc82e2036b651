"""A real language model through the whole pipeline, and the exported drafter against z-lab's own package. Minutes long: `-m slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "recipes" / "quickstart_data" / "questions.jsonl"
LAYOUTS = {
    "full": ["drafter.layer_types=[]", "drafter.sliding_window=null"],
    "mixed": [],  # the recipe's own
}


def run(*command: object) -> str:
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Features of 40 answers of SmolLM2-135M-Instruct, and the settings that lead to them."""
    folder = tmp_path_factory.mktemp("real")
    run("tools/fetch_smollm2.py", folder / "target")
    answers = (ROOT / "recipes" / "quickstart_data" / "answers.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "answers.jsonl").write_text("".join(answers))
    settings = ["recipe=quickstart", f"target.path={folder}/target", f"data.files=[{folder}/answers.jsonl]", "data.heldout_share=0.1"]
    settings += [f"run_dir={folder}/run", f"features.dir={folder}/run/extract"]
    for stage in ("prepare", "extract"):
        run("-m", "dflash_train", f"stage={stage}", *settings)
    return folder, settings


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_drafter_is_what_zlabs_package_runs(features: tuple[Path, list[str]], layout: str, tmp_path: Path) -> None:
    folder, settings = features
    own = [f"run_dir={tmp_path}", "train.max_steps=12", *LAYOUTS[layout]]
    for stage in ("train", "evaluate", "export"):
        run("-m", "dflash_train", f"stage={stage}", *settings, *own)
    replayed, decoded = json.loads((tmp_path / "evaluate" / "report.json").read_text())["sets"]
    assert decoded["answers_equal"] + decoded["answers_near_tie"] == decoded["answers_compared"] > 0
    assert decoded["tau"] == pytest.approx(replayed["tau"], rel=0.03)
    print(run("tools/check_zlab.py", tmp_path / "export", folder / "target", QUESTIONS, "--num", 2))
