"""The command line: composes one typed `Config` with Hydra and runs a stage. Mistakes end in one line, without a traceback.

Comes in: `stage=NAME recipe=NAME section.setting=value ...`. Goes out: the stage's folder in `run_dir`; exit status 0, 1 (the run
cannot go on) or 2 (the command line or recipe is wrong). Imports no torch, so what the settings alone can tell is told at once.

`conf/config.yaml` holds what Hydra itself needs; the settings and their defaults are the dataclasses of `config.py`; every file of
`recipes/` becomes an option of the group `recipe`. Both folders are found beside the package (a checkout, an editable install) or
inside it (a wheel).
"""

import dataclasses
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
import typing
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_train import config as settings
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError
from dflash_train.launch import refuse_several_processes
from dflash_train.layers import LayerIds

_USAGE = """\
dflash_train trains DFlash drafters: from chats and a target model to a drafter that vLLM and SGLang serve.

  python -m dflash_train stage=STAGE recipe=RECIPE [section.setting=value ...]
  accelerate launch -m dflash_train stage=STAGE recipe=RECIPE     (regenerate, extract, train, evaluate: any number of processes)

stages, in the order in which stage=all runs them:
  regenerate  the target's own answers to regenerate.prompts     train     the drafter, on the feature dataset
  prepare     chats -> token ids and loss mask                   evaluate  acceptance: replay, or decoding with the target
  extract     features of the target's layers, on disk           export    the drafter folder for vLLM and SGLang
  plan        by name only: memory, steps, FLOP, disk and time, from the target's config.json alone; fails when something does not fit
  verify      by name only: reads the whole feature dataset, sets damaged shards aside, recomputes samples with the target

recipes: {recipes}
your own: --config-dir DIR recipe=NAME reads DIR/recipe/NAME.yaml, whose first line is `# @package _global_`
--cfg job prints the resolved settings and runs nothing; debug=true shows the traceback of a mistake.

settings (type, default, meaning):
"""


def package_root() -> Path:
    """The folder that holds `conf/` and `recipes/`. Raises UserError naming both places when neither has them."""
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        if (folder / "conf" / "config.yaml").is_file():
            return folder
    raise UserError(f"conf/config.yaml is neither in {package} nor in {package.parent}: the installation is incomplete")


def register_recipes() -> list[str]:
    """Makes the schema, every shipped recipe and the resolver `recipes_dir` known to Hydra; returns the recipes' names."""
    recipes = package_root() / "recipes"
    OmegaConf.register_new_resolver("recipes_dir", lambda: str(recipes), replace=True)
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    names = sorted(path.stem for path in recipes.glob("*.yaml"))
    for name in names:
        store.store(group="recipe", name=name, node=OmegaConf.load(recipes / f"{name}.yaml"), package="_global_")
    return names


def to_config(composed: DictConfig) -> Config:
    """The typed `Config` of a composed dictionary. Raises UserError for an unknown key, a missing value or a wrong combination."""
    values = OmegaConf.to_container(composed)
    _refuse_unknown_keys(values, Config, "")
    for key in _missing(values, ""):
        raise UserError(f"{key} is missing: set it on the command line or in a recipe{_allowed_values(key)}")
    return OmegaConf.to_object(composed)


def run_stage(config: Config, arguments: list[str]) -> None:
    """Runs one stage in this process; `all` runs the stages one after the other, each in a process of its own."""
    _check_layer_ids(config)
    if config.stage is not Stage.all:
        importlib.import_module(f"dflash_train.stages.{config.stage.value}").run(config)
        return
    refuse_several_processes("all")
    for stage in Stage:
        if stage in (Stage.all, Stage.plan, Stage.verify) or (stage is Stage.regenerate and config.data.files):
            continue
        print(f"── stage={stage} " + "─" * 60, flush=True)
        others = [argument for argument in arguments if not argument.startswith("stage=")]
        status = subprocess.run([sys.executable, "-m", "dflash_train", f"stage={stage}", *others]).returncode
        if status:
            raise SystemExit(status if status > 0 else 128 - status)


def main() -> None:
    """Entry point of `python -m dflash_train` and of the console script `dflash-train`."""
    arguments = sys.argv[1:]
    try:
        recipes = register_recipes()
        if not arguments or {"-h", "--help"} & set(arguments):
            print(_USAGE.format(recipes=", ".join(recipes)) + settings_help())
            return
        if {"-m", "--multirun"} & set(arguments):
            raise UserError("several runs in one command (--multirun) are not supported: start them one by one")
        composed = _compose()
        if composed is not None:
            run_stage(to_config(composed), arguments)
    except (HydraException, OmegaConfBaseException) as error:
        _fail(_explain(error), 2)
    except UserError as error:
        if "debug=true" in arguments:
            traceback.print_exc()
        _fail(str(error).split("\n    full_key:")[0], 1)  # OmegaConf appends lines to what __post_init__ raises
    except KeyboardInterrupt:
        _fail("interrupted; the same command continues", 130)


def settings_help() -> str:
    """One line per setting, read from `config.py`: the comment beside a field is its documentation."""
    sections = {name: kind for name, kind in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(kind)}
    lines = _field_lines("", Config, skip=set(sections))
    for name, kind in sections.items():
        lines += _field_lines(f"{name}.", kind)
    return "\n".join(lines)


def _compose() -> DictConfig | None:
    """The composed settings, or None where Hydra only printed something (`--cfg job`)."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hands us Hydra's exceptions instead of printing several lines
    found: list[DictConfig] = []

    def keep(composed: DictConfig) -> None:
        found.append(composed)

    hydra.main(version_base="1.3", config_path=str(package_root() / "conf"), config_name="config")(keep)()
    return found[0] if found else None


def _field_lines(prefix: str, kind: type, skip: set[str] = frozenset()) -> list[str]:
    source = Path(settings.__file__).read_text(encoding="utf-8")
    body = source.split(f"class {kind.__name__}:\n")[1].split("\n@dataclass")[0]
    found = re.findall(r"^    (\w+): (.+?) = (.+?)(?:  # (.*))?$", body, flags=re.MULTILINE)
    lines = []
    for name, annotation, default, comment in found:
        if name not in skip:
            default = re.sub(r"^field\(default_factory=(\w+)\)$", lambda m: {"list": "[]", "dict": "{}"}[m[1]], default)
            default = re.sub(r"^[A-Z]\w+\.(\w+)$", r"\1", default)
            shown = (
                "required" if default == "MISSING" else default.replace("None", "null").replace("True", "true").replace("False", "false")
            )
            lines.append(
                f"  {prefix + name:34} {annotation.replace(' | None', '?'):20} {shown:12} {comment}".rstrip() + _choices(kind, name)
            )
    return lines


def _choices(kind: type, name: str) -> str:
    annotation = typing.get_type_hints(kind)[name]
    return f" [{', '.join(annotation)}]" if isinstance(annotation, type) and issubclass(annotation, settings.StrEnum) else ""


def _refuse_unknown_keys(value: Any, kind: Any, prefix: str) -> None:
    if not dataclasses.is_dataclass(kind) or not isinstance(value, dict):
        return
    hints = typing.get_type_hints(kind)
    for key, child in value.items():
        if key not in hints:
            raise UserError(f"{prefix}{key} is not a setting{_closest(prefix + str(key))}")
        _refuse_unknown_keys(child, hints[key], f"{prefix}{key}.")


def _check_layer_ids(config: Config) -> None:
    """Tells a wrong layer id of a local target at once, before the seconds that torch and transformers take to import.

    Whatever else is wrong with the target's `config.json`, or where it says less, the stage tells.
    """
    try:
        written = json.loads((Path(config.target.path) / "config.json").read_text(encoding="utf-8"))
        num_layers = written.get("text_config", written)["num_hidden_layers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if isinstance(num_layers, int):
        LayerIds(tuple(config.features.layer_ids), num_layers)


def _missing(values: dict[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for key, value in values.items():
        found += _missing(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"] * (value == MISSING)
    return found


def _setting_types() -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            types |= {f"{name}.{key}": hint for key, hint in typing.get_type_hints(kind).items()}
        else:
            types[name] = kind
    return types


def _closest(key: str) -> str:
    leaf = {name.rsplit(".", 1)[-1]: name for name in _setting_types()}
    near = difflib.get_close_matches(key, _setting_types(), n=1) or [
        leaf[name] for name in difflib.get_close_matches(key.rsplit(".", 1)[-1], leaf, n=1)
    ]
    return f": did you mean {near[0]}?" if near else ": `python -m dflash_train --help` lists all"


def _allowed_values(key: str) -> str:
    annotation = _setting_types().get(key)
    return f" (one of {', '.join(annotation)})" if isinstance(annotation, type) and issubclass(annotation, settings.StrEnum) else ""


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, in one line that says what to do."""
    text, cause = (" ".join(str(e).split()) for e in (error, error.__cause__ or ""))
    if unknown := re.search(r"Could not override '([\w.]+)'", text):
        return f"{unknown[1]} is not a setting{_closest(unknown[1])}"
    if "Ambiguous value" in text:
        return "several values without brackets: write a list as section.setting=[1,2,3]"
    if type(error).__name__ == "OverrideParseException":
        text = text.split(" See https")[0]
        return f"{text}: quote a value that holds = , or spaces twice, as in 'data.files=[\"/x=1/y.jsonl\"]'"
    if recipe := re.search(r"Could not (?:find|load) 'recipe/([^']+)'", text):
        return f"recipe={recipe[1]} is not a recipe: shipped are {', '.join(register_recipes())}; your own need --config-dir DIR"
    if (merging := re.search(r"Error merging override (\S+)", text)) and cause:
        return f"{merging[1]}: {cause.split(' full_key: ')[0]}"
    return text


def _fail(message: str, status: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    print(f"error{f' on rank {rank}' if rank else ''}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(status)
