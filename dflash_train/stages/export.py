"""Stage `export`: a checkpoint as the drafter folder that vLLM and SGLang serve, in z-lab's format, with a model card.

Reads a checkpoint of `run_dir/train`, the target's config and identity, and the report of `run_dir/evaluate` if there is one. Writes
`export.dir` as a whole, or not at all.
"""

import json
from pathlib import Path
from typing import Any

from dflash_train.checkpoint import choose_weights, load_drafter, resolve_checkpoint, weights_digest
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError
from dflash_train.launch import refuse_several_processes
from dflash_train.layers import FeatureContract
from dflash_train.report import console_lines
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.serving.model_card import Provenance, model_card
from dflash_train.serving.zlab import refuse_foreign_folder, write_drafter, zlab_config
from dflash_train.target import contract_for


def run(config: Config) -> None:
    """Raises UserError for a checkpoint that was not made with this config's target, and for a folder that holds something else."""
    refuse_several_processes(Stage.export)
    folder = stage_dir(config, Stage.export)
    refuse_foreign_folder(folder)
    checkpoint = resolve_checkpoint(stage_dir(config, Stage.train), config.export.checkpoint, "export.checkpoint")
    weights = choose_weights(checkpoint, config.export.weights, "export.weights")
    drafter, state = load_drafter(checkpoint, "cpu", weights)
    contract = FeatureContract.from_dict(state["contract"])
    wanted = contract_for(config.target, config.features.layer_ids, config.features.teacher_state, config.data.template_kwargs)
    contract.require_equal(wanted, f"checkpoint {checkpoint}", "the config with its target")

    report = _report_about(weights_digest(checkpoint, weights), stage_dir(config, Stage.evaluate) / "report.json")
    provenance = Provenance(config.target.path, state["step"], state["answers_from_target"], report, weights)
    card = model_card(zlab_config(drafter.config), contract, provenance)
    open_stage_dir(config, Stage.export)
    shapes = write_drafter(folder, drafter.config, drafter.state_dict(), contract, card)
    print(f"exported {checkpoint.name}: {len(shapes)} tensors in bfloat16 ({weights} weights) to {folder}; README.md says how to serve it")
    if report is not None:
        print("\n".join(["measured by stage=evaluate:", *console_lines(report)]))


def _report_about(digest: str, path: Path) -> dict[str, Any] | None:
    """The report at `path`, if it is about the weights of this `digest` and not about those of an earlier run or step."""
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return report if report.get("weights") == digest else None
