"""A start from the target's last layers: the copy computes what the target computes, and what does not fit is named."""

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from dflash_train.blocks import Context
from dflash_train.config import DrafterConfig, TargetConfig
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.drafter_init import init_from_target
from dflash_train.errors import UserError
from dflash_train.layers import LayerIds
from dflash_train.target import load_config, text_config

SOME_FEATURES = torch.ones(2, 3, 32)


def make_drafter(path, ids=(1, 3, 4), **settings):
    text = text_config(load_config(TargetConfig(path=str(path))))
    settings = {"num_layers": 1, "block_size": 4, "mask_token_id": 300} | settings
    return DFlashDraftModel(drafter_config(DrafterConfig(**settings), LayerIds(ids, text.num_hidden_layers), text, 320))


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request, tmp_path_factory):
    """A target with q and k norms and one without."""
    make = {"qwen3": tiny_models.make_qwen3, "llama": tiny_models.make_llama}[request.param]
    path = make(tmp_path_factory.mktemp(request.param))
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def test_the_context_has_the_targets_own_keys_and_values(target):
    path, model = target
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    streams = model(tokens, output_hidden_states=True).hidden_states
    features_TLD = torch.stack([streams[i][0] for i in (2, 4, 5)], dim=1)  # after layers 1, 3, 4: the last one enters layer 5
    drafter = make_drafter(path)
    init_from_target(drafter, TargetConfig(path=str(path)), features_TLD)

    cache = model(tokens, use_cache=True).past_key_values.layers[5]
    context = drafter.extend(None, features_TLD, Context(torch.zeros(12, dtype=torch.long), torch.arange(12)))
    torch.testing.assert_close(context.values[0], cache.values[0].transpose(0, 1), rtol=0, atol=1e-4)
    keys_THd = cache.keys[0].transpose(0, 1)
    if hasattr(model.model.layers[5].self_attn, "k_norm"):
        torch.testing.assert_close(context.keys[0], keys_THd, rtol=0, atol=1e-4)
    else:  # same directions; the sizes of single keys are lost, their mean square is kept
        torch.testing.assert_close(torch.cosine_similarity(context.keys[0], keys_THd, dim=-1), torch.ones(12, 2), rtol=0, atol=1e-5)
        assert float(context.keys[0].square().mean()) == pytest.approx(float(keys_THd.square().mean()), rel=1e-3)


@torch.no_grad()
def test_layers_norm_and_fc_come_from_the_target(target):
    path, model = target
    drafter = make_drafter(path, num_layers=2)
    init_from_target(drafter, TargetConfig(path=str(path)), SOME_FEATURES)
    for ours, theirs in zip(drafter.layers, model.model.layers[4:], strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        torch.testing.assert_close(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight * theirs.input_layernorm.weight)
        assert torch.equal(ours.post_attention_layernorm.weight, theirs.post_attention_layernorm.weight)
        assert torch.equal(ours.input_layernorm.weight, torch.ones(32))
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)
    assert torch.equal(drafter.fc.weight, torch.cat([torch.zeros(32, 64), torch.eye(32)], dim=1))


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (tiny_models.make_qwen3, {"num_attention_heads": 8}, [r"self_attn.q_proj.weight is \[32, 32\] in the target, \[64, 32\]"]),
        (tiny_models.make_qwen3, {"num_layers": 7}, ["the target has 6 layers, the drafter 7"]),
        (tiny_models.make_qwen3, {"rope_theta": 500.0}, ["rope theta is .* in the target, 500.0 in the drafter"]),
        (tiny_models.make_gemma3, {}, ["form of the norms is 1\\+w", "pre_feedforward_layernorm.weight, which the drafter's lack"]),
        (
            tiny_models.make_qwen35_wrapper,
            {},
            [r"q_proj.weight is \[64, 32\]", "rotated share of a head is 0.25", "form of the norms is 1\\+w"],
        ),
    ],
)
def test_what_does_not_fit_is_listed(tmp_path, make, settings, named):
    path = make(tmp_path)
    drafter = make_drafter(path, **settings)
    with pytest.raises(UserError, match="drafter.init_from=target") as error:
        init_from_target(drafter, TargetConfig(path=str(path)), SOME_FEATURES)
    for pattern in named:
        assert error.match(pattern)


def test_a_bias_and_a_scaled_rope_are_listed(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = tiny_models.make_llama(tmp_path, attention_bias=True, rope_parameters=rope)
    with pytest.raises(UserError, match="have self_attn.q_proj.bias, which the drafter's lack.*rope type is llama3"):
        init_from_target(make_drafter(path), TargetConfig(path=str(path)), SOME_FEATURES)


def test_the_run_beside_the_target_catches_what_no_list_foresees(tmp_path, monkeypatch):
    path = tiny_models.make_qwen3(tmp_path)
    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.rotate_half", lambda x: x.roll(1, -1))
    with pytest.raises(UserError, match="run on the same tokens, the outputs of the last layers differ by"):
        init_from_target(make_drafter(path), TargetConfig(path=str(path)), SOME_FEATURES)
