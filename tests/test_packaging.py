"""The wheel carries conf/ and recipes/, the README's tree is the real one, and its commands exist."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_settings_and_recipes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {path.relative_to(ROOT).as_posix() for folder in ("conf", "recipes") for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {f"dflash_train/{name}" for name in shipped} <= names and "dflash_train/conf/config.yaml" in names


def test_installed_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """A clean environment with the wheel; its dependencies are lent by the environment that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [str(tmp_path / "env" / "bin" / "dflash-train"), "stage=extract", "recipe=quickstart"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, cwd=empty, capture_output=True, text=True, env=env)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert "stage=prepare" in line and "runs/quickstart/prepare" in line
    where = subprocess.run([python, "-c", "import dflash_train; print(dflash_train.__file__)"], cwd=empty, capture_output=True, text=True)
    assert where.stdout.startswith(str(site))


def test_readme_names_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    modules = [path for path in (ROOT / "dflash_train").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert not [path.name for path in modules if not re.search(rf"\b{re.escape(path.name)}\b", readme)]


def test_documents_name_only_files_that_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for name in re.findall(r"`((?:dflash_train|tools|recipes|conf|tests)/[\w./]+)`", text):
            assert (ROOT / name).exists(), f"{document}: {name}"
