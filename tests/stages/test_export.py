"""Stage export: a checkpoint becomes a served folder, and only together with the target it was trained for."""

import json

import pytest
import tiny_models
import torch

from dflash_train.checkpoint import save_checkpoint, weights_digest
from dflash_train.config import Config, DrafterConfig, ExportConfig, FeaturesConfig, Stage, TargetConfig, Weights
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.layers import LayerIds
from dflash_train.optimizer import make_optimizer
from dflash_train.stages.export import run
from dflash_train.target import contract_for, load_config


@pytest.fixture
def config(tmp_path):
    """A run with a trained checkpoint at step 20."""
    target = TargetConfig(path=str(tiny_models.make_qwen3(tmp_path / "target")))
    layer_ids = LayerIds((1, 3, 4), 6)
    settings = DrafterConfig(num_layers=1, block_size=4, mask_token_id=300)
    drafter = DFlashDraftModel(drafter_config(settings, layer_ids, load_config(target), 320))
    contract = contract_for(target, list(layer_ids.ids), False, {})
    state = {"step": 20, "contract": contract.to_dict(), "answers_from_target": "true"}
    (tmp_path / "train").mkdir()
    optimizer = make_optimizer(drafter, weight_decay=0.0)
    save_checkpoint(tmp_path / "train", drafter, optimizer, state)
    ema = Ema(drafter, decay=0.9)
    ema.tensors["norm.weight"].fill_(3.0)
    save_checkpoint(tmp_path / "train", drafter, optimizer, state | {"step": 21}, ema)
    return Config(
        stage=Stage.export,
        run_dir=str(tmp_path),
        target=target,
        features=FeaturesConfig(layer_ids=[1, 3, 4], dir=str(tmp_path / "extract")),
        drafter=settings,
        export=ExportConfig(checkpoint=str(tmp_path / "train" / "checkpoints" / "step-00000020"), dir=str(tmp_path / "served")),
    )


def test_a_checkpoint_is_exported_again_and_again(config, tmp_path, capsys):
    for _ in range(2):
        run(config)
        assert "exported step-00000020: 14 tensors" in capsys.readouterr().out
    served = tmp_path / "served"
    names = {path.name for path in served.iterdir()}
    assert names == {"config.json", "model.safetensors", "contract.json", "README.md", "config.yaml", "versions.json"}
    assert DFlashDraftModel.from_pretrained(served, dtype=torch.float32).layer_ids.ids == (1, 3, 4)
    card = (served / "README.md").read_text()
    assert config.target.path in card and "tau: not measured" in card


def test_the_card_and_the_last_lines_quote_the_evaluation(config, tmp_path, capsys):
    (tmp_path / "evaluate").mkdir()
    measured = {"prompts": "heldout", "mode": "replay", "tau": 2.5, "tau_ci95": None, "num_verifications": 9, "answers_from_target": "true"}
    measured["num_answers"] = 3
    weights = weights_digest(tmp_path / "train" / "checkpoints" / "step-00000020")
    report = {"step": 20, "weights": weights, "block_size": 4, "dtype": "float32", "sets": [measured]}
    (tmp_path / "evaluate" / "report.json").write_text(json.dumps(report))
    run(config)
    assert "| heldout | replay | 2.500 | - | 9 | true |" in (tmp_path / "served" / "README.md").read_text()
    assert capsys.readouterr().out.endswith("heldout, replay: tau 2.500, block size 4, 9 verifications of 3 answers\n")


def test_a_report_about_other_weights_is_not_quoted(config, tmp_path):
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "report.json").write_text(json.dumps({"step": 20, "weights": "of an earlier run", "sets": []}))
    run(config)
    assert "tau: not measured (no report" in (tmp_path / "served" / "README.md").read_text()


def test_ema_weights_are_exported_with_the_report_about_them(config, tmp_path, capsys):
    (tmp_path / "evaluate").mkdir()
    latest = tmp_path / "train" / "checkpoints" / "step-00000021"
    digests = {kind: weights_digest(latest, kind) for kind in (Weights.raw, Weights.ema)}
    assert digests["raw"] == weights_digest(latest.with_name("step-00000020")) != digests["ema"]
    report = {"step": 21, "weights": digests["ema"], "block_size": 4, "dtype": "float32", "sets": []}
    (tmp_path / "evaluate" / "report.json").write_text(json.dumps(report))
    config.export.checkpoint = "latest"
    for wanted, norm, kind in ((Weights.auto, 3.0, "ema"), (Weights.ema, 3.0, "ema"), (Weights.raw, 1.0, "raw")):
        config.export.weights = wanted
        run(config)
        assert f"14 tensors in bfloat16 ({kind} weights)" in capsys.readouterr().out
        served, card = DFlashDraftModel.from_pretrained(tmp_path / "served"), (tmp_path / "served" / "README.md").read_text()
        assert (served.norm.weight == norm).all()
        assert ("moving average of the steps" in card) == ("tau: not measured" not in card) == (kind == "ema")


def test_ema_weights_that_are_not_there_are_refused(config):
    config.export.weights = Weights.ema
    with pytest.raises(UserError, match=r"export\.weights=ema, but .*step-00000020 holds no moving average .*; allowed here: auto, raw"):
        run(config)


def test_what_a_killed_export_left_does_not_stop_the_next(config, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / ".tmp-config.yaml").touch()
    run(config)
    assert not (tmp_path / "served" / ".tmp-config.yaml").exists()


@pytest.mark.parametrize("change", ["layer ids", "target", "template"])
def test_another_contract_is_refused_with_both_sides(config, tmp_path, change):
    match change:
        case "layer ids":
            config.features.layer_ids, sides = [1, 2, 4], r"layer_ids: \[1, 3, 4\] != \[1, 2, 4\]"
        case "target":
            tiny_models.make_qwen3(tmp_path / "target", seed=1)
            sides = "target.weights.* != "
        case "template":
            config.data.template_kwargs, sides = {"enable_thinking": False}, "template_kwargs.*enable_thinking"
    with pytest.raises(UserError, match=sides):
        run(config)
    assert not (tmp_path / "served").exists()


def test_several_processes_and_foreign_folders_are_refused(config, tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "thesis.tex").touch()
    with pytest.raises(UserError, match="thesis.tex"):
        run(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="stage=export runs on one process"):
        run(config)
