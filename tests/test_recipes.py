"""No shipped recipe can rot: each composes for every stage, says what was measured, and names only settings that exist."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash_train.cli import package_root, register_recipes, to_config
from dflash_train.config import Config, Stage

ROOT = Path(__file__).parents[1]
RECIPES = register_recipes()


def composed(recipe: str, *overrides: str) -> Config:
    with initialize_config_dir(version_base="1.3", config_dir=str(package_root() / "conf")):
        return to_config(compose("config", [f"recipe={recipe}", *overrides]))


def header(recipe: str) -> str:
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("recipe", RECIPES)
def test_composes_for_every_stage(recipe: str, stage: Stage) -> None:
    config = composed(recipe, f"stage={stage}")
    assert config.stage is stage and config.run_dir == f"runs/{recipe}" and config.features.dir == f"runs/{recipe}/extract"


@pytest.mark.parametrize("recipe", RECIPES)
def test_header_names_target_hardware_commands_and_results(recipe: str) -> None:
    text = header(recipe)
    for heading in ("Target", "Hardware", "Results"):
        assert f"# {heading}" in text, heading
    commands = re.findall(r"^#   .*?(stage=.*)$", text, flags=re.MULTILINE)
    assert commands or "tools/quickstart.sh" in text
    for command in commands:
        arguments = [argument for argument in command.split("#")[0].split() if "=" in argument]
        composed(recipe, *(argument for argument in arguments if not argument.startswith("recipe=")))


def test_the_readme_s_commands_compose() -> None:
    commands = re.findall(r"^.*-m dflash_train (.*stage=.*recipe=.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        arguments = dict(argument.split("=", 1) for argument in command.split())
        composed(arguments.pop("recipe"), *(f"{key}={value}" for key, value in arguments.items()))


def test_files_a_recipe_ships_exist_and_are_small() -> None:
    for file in composed("quickstart", "stage=all").data.files:
        assert Path(file).is_file(), file
    for file in (ROOT / "recipes").rglob("*"):
        assert file.stat().st_size < 2_000_000, file


def test_headline_recipe_is_the_published_layout() -> None:
    config = composed("qwen3_6_27b", "stage=train")
    assert config.features.layer_ids == [1, 16, 31, 46, 61]
    assert config.drafter.resolved_layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert (config.drafter.sliding_window, config.drafter.block_size, config.drafter.mask_token_id) == (2048, 16, 248070)
