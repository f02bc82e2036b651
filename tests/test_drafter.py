"""The drafter: training forward against step-by-step decoding, who influences whom (case C20), sizes, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen3_5Config, Qwen3Config

from dflash_train.blocks import Blocks, Context, build_blocks, single_blocks
from dflash_train.config import AttentionBackend, DrafterConfig
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.errors import UserError
from dflash_train.layers import LayerIds

CASE = json.loads((Path(__file__).parent / "data" / "cases" / "C20.json").read_text())
FULL, SLIDING = "full_attention", "sliding_attention"
LAYOUTS = {"full": [FULL, FULL], "sliding": [SLIDING, SLIDING], "mixed": [SLIDING, FULL]}
MASK = 300
TARGET = Qwen3Config(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)


def make_drafter(layer_types, block_size=4, window=5, head_dim=None):
    settings = DrafterConfig(
        num_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=window if SLIDING in layer_types else None,
        block_size=block_size,
        mask_token_id=MASK,
        head_dim=head_dim,
    )
    torch.manual_seed(0)
    drafter = DFlashDraftModel(drafter_config(settings, LayerIds((1, 3, 4), 6), TARGET, 320)).eval()
    with torch.no_grad():  # fresh weights are so small and norms so even that mistakes would not show
        for weight in drafter.parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.3 * torch.randn_like(weight))
    return drafter


def embed(blocks, dtype=torch.float32):
    table = torch.randn(320, 32, generator=torch.Generator().manual_seed(1))
    return table[blocks.input_ids_AK].to(dtype)


def make_pack(lengths, anchors, block_size=4):
    generator = torch.Generator().manual_seed(2)
    documents = [(torch.randint(0, 256, (n,), generator=generator), torch.ones(n)) for n in lengths]
    context, blocks = build_blocks(documents, [torch.tensor(a, dtype=torch.long) for a in anchors], block_size, MASK)
    return torch.randn(len(context.position_T), 3, 32, generator=generator), context, blocks


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_decoding_step_by_step_equals_the_training_forward(layout):
    drafter = make_drafter(LAYOUTS[layout])
    anchors = [[0, 3, 4, 9], [2, 6]]
    features_TLD, context, blocks = make_pack([12, 8], anchors)
    trained_AKD = drafter(features_TLD, context, embed(blocks), blocks)

    decoded, cache = [], None
    for document, of_document in enumerate(anchors):  # one cache for both documents, as replay has it
        done = 0
        for anchor in of_document:
            new_T = (context.document_T == document) & (context.position_T >= done) & (context.position_T < anchor)
            cache = drafter.extend(cache, features_TLD[new_T], Context(context.document_T[new_T], context.position_T[new_T]))
            row = int(((blocks.document_A == document) & (blocks.position_A == anchor)).nonzero())
            block = single_blocks(blocks.input_ids_AK[row, :1], torch.tensor([anchor]), torch.tensor([document]), 4, MASK)
            decoded.append(drafter.draft(embed(block), block, cache))
            done = anchor
    torch.testing.assert_close(torch.cat(decoded), trained_AKD, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_case_c20_a_block_sees_nothing_at_or_after_its_anchor(layout):
    drafter = make_drafter(LAYOUTS[layout])
    features_TLD, context, blocks = make_pack([CASE["seq_len"]], [CASE["anchors"]])
    before_AKD = drafter(features_TLD, context, embed(blocks), blocks)
    changed_TLD = features_TLD.clone()
    changed_TLD[3:] += 1
    after_AKD = drafter(changed_TLD, context, embed(blocks), blocks)
    assert torch.equal(before_AKD[0], after_AKD[0])
    assert not torch.equal(before_AKD[1], after_AKD[1])  # positions 3 and 4 are context of the block at 5
    changed_TLD = features_TLD.clone()
    changed_TLD[5:] += 1
    assert torch.equal(before_AKD, drafter(changed_TLD, context, embed(blocks), blocks))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_case_c20_blocks_documents_and_padding_do_not_touch_each_other(layout):
    drafter = make_drafter(LAYOUTS[layout]).double()  # the case asks for 1e-6; fp32 rounds to 2e-6 when the shapes differ
    features_TLD, context, blocks = make_pack([CASE["seq_len"]], [CASE["anchors"]])
    together_AKD = drafter(features_TLD, context, embed(blocks, torch.float64), blocks)
    for row in range(2):
        alone = Blocks(**{name: value[row : row + 1] for name, value in vars(blocks).items()})
        alone_KD = drafter(features_TLD, context, embed(alone, torch.float64), alone)[0]
        torch.testing.assert_close(alone_KD, together_AKD[row], rtol=0, atol=1e-6)
    padded = Context(torch.cat([context.document_T, torch.full((5,), -1)]), torch.cat([context.position_T, torch.arange(5)]))
    noisy_TLD = torch.cat([features_TLD, 100 * torch.ones(5, 3, 32)])
    padded_AKD = drafter(noisy_TLD, padded, embed(blocks, torch.float64), blocks)
    torch.testing.assert_close(padded_AKD, together_AKD, rtol=0, atol=1e-6)


@torch.no_grad()
def test_only_the_sliding_layers_forget():
    outputs = {}
    for layout in ("full", "sliding"):
        drafter = make_drafter(LAYOUTS[layout])
        features_TLD, context, blocks = make_pack([12], [[9]])
        before_AKD = drafter(features_TLD, context, embed(blocks), blocks)
        features_TLD[:5] += 1  # slot 0 at 9 with window 5 sees 5..8
        outputs[layout] = before_AKD, drafter(features_TLD, context, embed(blocks), blocks)
    assert torch.equal(*outputs["sliding"])
    assert not torch.equal(*outputs["full"])


@torch.no_grad()
def test_only_distances_matter():
    drafter = make_drafter(LAYOUTS["mixed"])
    features_TLD, context, blocks = make_pack([12], [[3, 7]])
    moved = Context(context.document_T, context.position_T + 1000)
    moved_blocks = Blocks(**vars(blocks) | {"position_A": blocks.position_A + 1000})
    torch.testing.assert_close(
        drafter(features_TLD, moved, embed(blocks), moved_blocks),
        drafter(features_TLD, context, embed(blocks), blocks),
        rtol=0,
        atol=1e-3,
    )


def test_an_empty_pack_reaches_every_parameter_with_zero_gradient():
    drafter = make_drafter(LAYOUTS["mixed"])
    features_TLD, context, blocks = make_pack([], [])
    drafter(features_TLD, context, embed(blocks), blocks).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


def test_a_real_pack_gives_every_parameter_a_gradient_under_autocast():
    drafter = make_drafter(LAYOUTS["mixed"])
    features_TLD, context, blocks = make_pack([9, 7], [[2, 5], [3]])
    exact_AKD = drafter(features_TLD.bfloat16(), context, embed(blocks), blocks)
    with torch.autocast("cpu", torch.bfloat16):
        hidden_AKD = drafter(features_TLD.bfloat16(), context, embed(blocks), blocks)
    torch.testing.assert_close(hidden_AKD.float(), exact_AKD, rtol=0, atol=0.15)
    hidden_AKD.square().sum().backward()
    assert all(weight.grad.dtype == torch.float32 and weight.grad.any() for weight in drafter.parameters())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_compiled_layers_compute_the_same_for_packs_of_any_size():
    plain, compiled = make_drafter(LAYOUTS["mixed"]), make_drafter(LAYOUTS["mixed"])
    compiled.compile_layers()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for lengths, anchors in (([12, 8], [[0, 3, 4, 9], [2, 6]]), ([30], [[5, 20]]), ([9, 4, 11], [[1], [], [2, 3, 8]])):
        features_TLD, context, blocks = make_pack(lengths, anchors)
        outs = [drafter(features_TLD, context, embed(blocks), blocks) for drafter in (plain, compiled)]
        gradients = [torch.autograd.grad(out.square().sum(), list(d.parameters())) for out, d in zip(outs, (plain, compiled), strict=True)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(gradients[1], gradients[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def outputs_and_gradients(drafter, backend, device, autocast=False):
    drafter.to(device).attention = backend
    features_TLD, context, blocks = make_pack([12, 8, 30], [[0, 3, 4, 9], [2, 6], [5, 20, 21]])
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        hidden_AKD = drafter(features_TLD.to(device), context.to(device), embed(blocks).to(device), blocks.to(device))
    gradients = torch.autograd.grad(hidden_AKD.float().square().sum(), list(drafter.parameters()))
    return [x.detach().cpu() for x in (hidden_AKD, *gradients)]


@pytest.mark.parametrize(
    ("device", "backend", "is_compiled"),
    [
        ("cpu", "tiled", False),
        *[pytest.param("cuda", b, False, marks=pytest.mark.gpu) for b in ("dense", "tiled", "auto")],
        *[pytest.param("cuda", b, True, marks=pytest.mark.gpu) for b in ("tiled", "flex")],
    ],
)
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-4), (True, 5e-2)], ids=["fp32", "bf16"])
def test_every_device_gives_what_dense_gives_on_the_cpu(device, backend, is_compiled, autocast, tolerance):
    """Values and the gradients of all weights; heads of 16, the least that FlexAttention's kernels take."""
    expected = outputs_and_gradients(make_drafter(LAYOUTS["mixed"], head_dim=16), AttentionBackend.dense, "cpu")
    drafter = make_drafter(LAYOUTS["mixed"], head_dim=16)
    torch._dynamo.reset()
    if is_compiled:
        drafter.compile_layers()
    for ours, theirs in zip(outputs_and_gradients(drafter, AttentionBackend(backend), device, autocast), expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance


@pytest.mark.parametrize("num_layers", [2, 5])
def test_the_state_is_eleven_tensors_per_layer_and_three(num_layers):
    names = make_drafter([FULL] * num_layers).state_dict().keys()
    assert len(names) == 11 * num_layers + 3
    assert not [n for n in names if "rotary" in n or "bias" in n]


@torch.no_grad()
def test_saved_and_loaded_it_computes_the_same(tmp_path):
    drafter = make_drafter(LAYOUTS["mixed"])
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    features_TLD, context, blocks = make_pack([9], [[2, 5]])
    assert torch.equal(loaded(features_TLD, context, embed(blocks), blocks), drafter(features_TLD, context, embed(blocks), blocks))
    assert (loaded.block_size, loaded.mask_token_id) == (4, MASK)


def config_for(text_config, **settings):
    settings = {"num_layers": 1, "block_size": 4, "mask_token_id": MASK} | settings
    return drafter_config(DrafterConfig(**settings), LayerIds((1, 3), text_config.num_hidden_layers), text_config, 320)


def test_partial_and_multimodal_rope_are_not_inherited():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    target = Qwen3_5Config(text_config={"hidden_size": 64, "head_dim": 32, "rope_parameters": rope}).text_config
    config = config_for(target)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert config.head_dim == 32 and config.hidden_size == 64


def test_theta_of_the_full_layers_where_the_target_has_one_per_type():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert config_for(Gemma3TextConfig(rope_parameters=rope)).rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_own_sizes_win_and_unknown_ones_are_asked_for():
    config = config_for(TARGET, num_attention_heads=8, num_key_value_heads=4, head_dim=16, intermediate_size=48, rope_theta=500.0)
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
    assert sizes == (8, 4, 16, 48)
    assert config.rope_parameters["rope_theta"] == 500
    bare = PreTrainedConfig(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64)
    with pytest.raises(UserError, match=r"drafter.rms_norm_eps=null, and the target's config .* has no rms_norm_eps: set it"):
        config_for(bare)
    with pytest.raises(UserError, match="drafter.rope_theta=null"):
        config_for(bare, rms_norm_eps=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dflash_config": {"target_layer_ids": [1], "causal": True}}, " causal=True"),
        ({"dflash_config": {"mask_token_id": MASK}}, "no dflash_config.target_layer_ids"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters="),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters="),
        ({"layer_types": [SLIDING], "sliding_window": None}, "sliding_window=None"),
    ],
)
def test_a_config_of_another_model_is_refused_by_name(change, named):
    config = config_for(TARGET)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=named):
        DFlashDraftModel(config)
