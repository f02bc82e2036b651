"""The exported folder: config keys (the published Qwen3.6-27B drafter's, case C29), exact tensors, nothing half-written or overwritten."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config

from dflash_train.config import DrafterConfig
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.errors import UserError
from dflash_train.layers import FeatureContract, LayerIds
from dflash_train.serving.model_card import Provenance, model_card
from dflash_train.serving.zlab import refuse_foreign_folder, write_drafter, zlab_config, zlab_tensors

TESTS = Path(__file__).parents[1]
CASE = json.loads((TESTS / "data" / "cases" / "C29.json").read_text())
EXPECT = CASE["expect"]
FULL, SLIDING = "full_attention", "sliding_attention"
TARGET = Qwen3Config(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7},
)
CONTRACT = FeatureContract(LayerIds((1, 3, 4), 6), 32, False, {"config": "aa"}, {"tokenizer": "bb"})


def make_drafter(layer_types=(SLIDING, FULL)):
    window = 8 if SLIDING in layer_types else None
    settings = DrafterConfig(len(layer_types), list(layer_types), sliding_window=window, block_size=8, mask_token_id=300)
    torch.manual_seed(0)
    return DFlashDraftModel(drafter_config(settings, CONTRACT.layer_ids, TARGET, 320))


def export(folder, drafter, card="card"):
    return write_drafter(folder, drafter.config, drafter.state_dict(), CONTRACT, card)


def test_the_headline_recipe_gives_the_published_config():
    recipe = OmegaConf.to_container(OmegaConf.load(TESTS.parent / "recipes" / "qwen3_6_27b.yaml"))
    target = AutoConfig.from_pretrained(TESTS / "data" / "cases" / "C05_configs" / "qwen35_wrapper").text_config
    target.max_position_embeddings = 262144
    layer_ids = LayerIds(tuple(recipe["features"]["layer_ids"]), 64)
    config = drafter_config(DrafterConfig(**recipe["drafter"]), layer_ids, target, 248320)
    published = json.loads((TESTS / "data" / "zlab_qwen3_6_27b.json").read_text())
    assert zlab_config(config) == published


def test_case_c29_names_shapes_and_dtype_from_a_wrapped_model():
    drafter = make_drafter()
    wrapped = torch.nn.DataParallel(torch.compile(drafter))  # the prefixes of DDP and torch.compile
    assert any(name.startswith("module._orig_mod.") for name in wrapped.state_dict())
    tensors = zlab_tensors(wrapped.state_dict(), drafter.config)
    assert {name: list(t.shape) for name, t in tensors.items()} == dict(EXPECT["tensors"])
    assert len(tensors) == EXPECT["count"]
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not [n for n in tensors for part in EXPECT["forbidden_substrings"] if part in n]


def test_case_c29_count_and_config_keys():
    drafter = make_drafter([FULL] * 5)
    assert len(zlab_tensors(drafter.state_dict(), drafter.config)) == EXPECT["count_for_5_layers"]
    config = zlab_config(make_drafter().config)
    wanted = EXPECT["config_keys"]
    assert config["architectures"] == wanted["architectures"] and config["model_type"] == wanted["model_type"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"] == {"target_layer_ids": [1, 3, 4], "mask_token_id": 300, "block_size": 8}
    assert config["num_target_layers"] == wanted["num_target_layers"]
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == wanted["rope_parameters.rope_theta"]
    assert config["layer_types"] == [SLIDING, FULL] and config["vocab_size"] == 320
    assert "is_causal" not in config and "causal" not in config["dflash_config"]


def test_an_all_full_drafter_has_no_window():
    config = zlab_config(make_drafter([FULL, FULL]).config)
    assert (config["use_sliding_window"], config["sliding_window"]) == (False, None)


def test_a_config_that_nests_its_block_size_is_read():
    config = make_drafter().config
    del config.block_size
    assert zlab_config(config)["block_size"] == 8


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda w: w.pop("hidden_norm.weight"), "hidden_norm.weight is missing"),
        (lambda w: w.update({"lm_head.weight": torch.ones(320, 32)}), "lm_head.weight does not belong there"),
        (lambda w: w.update({"model.norm.weight": w.pop("norm.weight")}), "norm.weight is missing; model.norm.weight does not belong"),
        (lambda w: w.update({"fc.weight": torch.ones(32, 64)}), r"fc.weight is \[32, 64\] instead of \[32, 96\]"),
        (lambda w: w["norm.weight"].fill_(float("nan")), "norm.weight is not finite"),
    ],
)
def test_weights_that_a_server_would_misread_are_refused(tmp_path, damage, named):
    drafter = make_drafter()
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    damage(weights)
    with pytest.raises(UserError, match=named):
        write_drafter(tmp_path / "export", drafter.config, weights, CONTRACT, "card")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_loads_as_written(tmp_path):
    drafter = make_drafter()
    export(tmp_path / "export", drafter)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["README.md", "config.json", "contract.json", "model.safetensors"]
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == zlab_config(drafter.config) == zlab_config(loaded.config)
    assert FeatureContract.from_dict(json.loads((tmp_path / "export" / "contract.json").read_text())) == CONTRACT


def test_an_earlier_export_is_replaced_as_a_whole_and_keeps_the_runs_records(tmp_path):
    folder = tmp_path / "export"
    export(folder, make_drafter([FULL, FULL]), card="old")
    (folder / "config.yaml").write_text("seed: 0")
    export(folder, make_drafter([FULL]), card="new")
    assert (folder / "README.md").read_text() == "new" and (folder / "config.yaml").read_text() == "seed: 0"
    assert len(load_file(folder / "model.safetensors")) == 14
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_what_a_killed_export_left_is_swept(tmp_path):
    for leftover in (".tmp-export-new", ".tmp-export-old", ".tmp-0a1b2c3d-.tmp-export-new"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").touch()
    export(tmp_path / "export", make_drafter())
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_foreign_folders_are_never_touched(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="not an earlier export .it holds notes.txt"):
        export(tmp_path, make_drafter())
    target = tmp_path / "target"
    TARGET.save_pretrained(target)
    with pytest.raises(UserError, match="its config.json is another model's"):
        export(target, make_drafter())
    with pytest.raises(UserError, match="is a file"):
        refuse_foreign_folder(tmp_path / "notes.txt")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["config.json", "notes.txt"]


def card_for(report, layer_types=(SLIDING, FULL)):
    config = zlab_config(make_drafter(layer_types).config)
    return model_card(config, CONTRACT, Provenance("org/target", step=20, answers_from_target="true", report=report))


def report_of(step):
    measured = {
        "prompts": "heldout",
        "mode": "decode",
        "tau": 3.25,
        "tau_ci95": [3.0, 3.5],
        "num_verifications": 40,
        "answers_from_target": "true",
    }
    return {"step": step, "block_size": 8, "dtype": "float32", "sets": [measured]}


def test_the_card_says_what_it_is_how_good_and_how_to_serve_it():
    card = card_for(report_of(20))
    for line in (
        "# DFlash drafter for org/target",
        "1 sliding (causal, window 8) + 1 full",
        "20 optimizer steps; answers written by the target itself: true",
        "| heldout | decode | 3.250 | 3.000 to 3.500 | 40 | true |",
        """vllm serve TARGET --speculative-config '{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 7}'""",
        "--speculative-num-draft-tokens 8",
        "vLLM 0.20.1 lacked both",
        "VLLM_USE_V2_MODEL_RUNNER=1",
        "| dflash_config.target_layer_ids | [1, 3, 4] |",
        "| vLLM aux layer ids | [2, 4, 5] |",
        "| Hugging Face hidden_states | [2, 4, 5] |",
    ):
        assert line in card
    assert "VLLM_USE_V2_MODEL_RUNNER" not in card_for(None, [FULL, FULL])


def test_the_card_without_a_report_says_so():
    assert "tau: not measured (no report" in card_for(None)
