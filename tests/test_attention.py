"""Attention against a loop over queries and keys written out here, in float64: values and gradients."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from dflash_train.attention import attention_for, mask_mod, plan_tiles, resolve_backend
from dflash_train.blocks import Blocks, Context, build_blocks
from dflash_train.config import AttentionBackend
from dflash_train.masks import block_visible_KK, context_visible_AKT


@st.composite
def layouts(draw):
    """Documents, anchors (0 included, so that a block sees no context), block size, window and heads."""
    block_size = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    anchors = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) for n in lengths]
    window = draw(st.one_of(st.none(), st.integers(block_size, 8)))
    num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return lengths, anchors, block_size, window, num_kv_heads, group


def slow_attention(q, context_k, context_v, block_k, block_v, questions, tokens, window, scale):
    """One query after the other over the list of keys that the rule lets it see."""
    out = 0 * q
    group = q.shape[2] // context_k.shape[1]
    for a, (document, anchor) in enumerate(questions):
        for j in range(q.shape[1]):
            for h in range(q.shape[2]):
                near = [
                    t for t, (d, p) in enumerate(tokens) if d == document and p < anchor and (window is None or anchor + j - p < window)
                ]
                own = [i for i in range(q.shape[1]) if window is None or (i <= j and j - i < window)]
                keys = torch.stack([context_k[t, h // group] for t in near] + [block_k[a, i, h // group] for i in own])
                values = torch.stack([context_v[t, h // group] for t in near] + [block_v[a, i, h // group] for i in own])
                out[a, j, h] = ((keys @ q[a, j, h]) * scale).softmax(0) @ values
    return out


def pack(lengths, anchors, block_size, mask_token_id=300):
    documents = [(torch.arange(n), torch.ones(n)) for n in lengths]
    return build_blocks(documents, [torch.tensor(a, dtype=torch.long) for a in anchors], block_size, mask_token_id)


def random_inputs(blocks, context, num_heads, num_kv_heads, head_dim=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    slots, tokens = blocks.input_ids_AK.shape, context.position_T.shape
    shapes = [(*slots, num_heads), *[(*tokens, num_kv_heads)] * 2, *[(*slots, num_kv_heads)] * 2]
    return [torch.randn(*shape, head_dim, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def values_and_gradients(attend, inputs):
    out = attend(*inputs)
    direction = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)
    return out, *torch.autograd.grad((out * direction).sum(), inputs, materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("backend", [AttentionBackend.dense, AttentionBackend.tiled])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(layout=layouts())
def test_equals_the_slow_loop_in_values_and_gradients(backend, layout):
    lengths, anchors, block_size, window, num_kv_heads, group = layout
    context, blocks = pack(lengths, anchors, block_size)
    questions = [(d, a) for d, of_document in enumerate(anchors) for a in of_document]
    tokens = [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    inputs = random_inputs(blocks, context, num_kv_heads * group, num_kv_heads)
    slow = values_and_gradients(lambda *x: slow_attention(*x, questions, tokens, window, 1 / math.sqrt(4)), inputs)
    fast = values_and_gradients(attention_for(backend, blocks, context, window), inputs)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(layout=layouts())
def test_flex_equals_dense_in_mask_and_values(layout):
    lengths, anchors, block_size, window, num_kv_heads, group = layout
    context, blocks = pack(lengths, anchors, block_size)
    num_slots, num_context = blocks.input_ids_AK.numel(), len(context.position_T)
    query, key = torch.arange(num_slots)[:, None], torch.arange(num_context + num_slots)
    mask = mask_mod(blocks, context, window)(None, None, query, key).unflatten(0, (-1, block_size))
    own = torch.eye(len(blocks.position_A), dtype=torch.bool)[:, None, :, None] & block_visible_KK(block_size, window)[:, None]
    assert torch.equal(mask[..., :num_context], context_visible_AKT(blocks, context, window).expand(-1, block_size, -1))
    assert torch.equal(mask[..., num_context:], own.flatten(2))

    inputs = [x.detach().float() for x in random_inputs(blocks, context, num_kv_heads * group, num_kv_heads, head_dim=16)]
    dense, flex = (attention_for(backend, blocks, context, window)(*inputs) for backend in (AttentionBackend.dense, AttentionBackend.flex))
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [AttentionBackend.dense, AttentionBackend.tiled, AttentionBackend.flex])
@pytest.mark.parametrize(("num_blocks", "num_context"), [(0, 0), (0, 5), (2, 0)])
def test_empty_packs_are_finite_and_keep_the_graph(backend, num_blocks, num_context):
    if backend is AttentionBackend.flex and num_blocks:
        pytest.skip("FlexAttention has no backward on a CPU")
    context = Context(torch.zeros(num_context, dtype=torch.long), torch.arange(num_context))
    none = torch.zeros(num_blocks, dtype=torch.long)
    blocks = Blocks(none, none, torch.zeros(num_blocks, 3, dtype=torch.long), torch.zeros(num_blocks, 3), torch.zeros(num_blocks, 3))
    inputs = random_inputs(blocks, context, 4, 2)
    out = attention_for(backend, blocks, context, None)(*inputs)
    out.sum().backward()
    assert out.shape == inputs[0].shape and out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


LENGTHS, ANCHORS = (40, 31, 7), ([0, 2, 5, 6, 9, 13, 14, 30, 38], [1, 3, 4, 17, 29], [2])


@pytest.mark.parametrize("backend", [AttentionBackend.dense, AttentionBackend.tiled])
@pytest.mark.parametrize("window", [None, 8])
def test_survives_autocast_and_gradient_checkpointing(backend, window):
    context, blocks = pack(LENGTHS, ANCHORS, 4)
    inputs = random_inputs(blocks, context, 4, 2, dtype=torch.float32)
    attend = attention_for(backend, blocks, context, window)
    exact = values_and_gradients(attend, inputs)
    checkpointed = values_and_gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs)
    assert all(map(torch.equal, checkpointed, exact))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = values_and_gradients(attend, inputs)
        rounded = values_and_gradients(attend, [x.bfloat16() for x in inputs])
    for ours, halves, theirs in zip(under_autocast, rounded, exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.1)
        torch.testing.assert_close(halves.float(), theirs, rtol=0, atol=0.1)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("tile_keys", [1, 100, 1 << 16])
def test_tiles_of_any_size_and_blocks_in_any_order(monkeypatch, window, tile_keys):
    monkeypatch.setattr("dflash_train.attention.TILE_KEYS", tile_keys)
    context, blocks = pack(LENGTHS, ANCHORS, 4)
    shuffled = torch.randperm(len(blocks.position_A), generator=torch.Generator().manual_seed(2))
    blocks = blocks[shuffled]
    inputs = random_inputs(blocks, context, 4, 2)
    dense, tiled = (
        values_and_gradients(attention_for(backend, blocks, context, window), inputs)
        for backend in (AttentionBackend.dense, AttentionBackend.tiled)
    )
    for ours, theirs in zip(tiled, dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_tiles_touch_only_the_window_and_never_two_documents():
    context, blocks = pack((300, 200), [list(range(0, 296, 4)), list(range(0, 196, 4))], 4)
    plan = plan_tiles(blocks, context, 16)
    assert [tile.last for tile in plan.tiles[:-1]] == [tile.first for tile in plan.tiles[1:]] and plan.order_A is None
    assert max(tile.last - tile.first for tile in plan.tiles) > 1
    for tile in plan.tiles:
        anchors = blocks.position_A[tile.first : tile.last]
        start = 300 * int(blocks.document_A[tile.first])
        assert len(set(blocks.document_A[tile.first : tile.last].tolist())) == 1
        assert tile.hi == start + int(anchors[-1]) and tile.lo == start + max(0, int(anchors[0]) - 15)


def test_tiled_refuses_a_context_out_of_order():
    context, blocks = pack(LENGTHS, ANCHORS, 4)
    with pytest.raises(ValueError, match="tiled attention needs the tokens of a document behind one another"):
        plan_tiles(blocks, Context(context.document_T.flip(0), context.position_T.flip(0)), None)
    mixed = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="tiled attention needs"):
        plan_tiles(blocks, Context(mixed, torch.tensor([0, 0, 1])), None)


def test_auto_picks_by_device():
    assert resolve_backend(AttentionBackend.auto, torch.device("cpu")) == "tiled"
    assert resolve_backend(AttentionBackend.auto, torch.device("cuda")) == "flex"
    assert resolve_backend(AttentionBackend.dense, torch.device("cuda")) == "dense"


def test_groups_of_blocks_give_what_all_blocks_at_once_give(monkeypatch):
    context, blocks = pack((9, 7), ([0, 2, 5, 6], [1, 3, 4]), 4)
    inputs = random_inputs(blocks, context, 4, 2, head_dim=8)

    def run(scores_bytes):
        monkeypatch.setattr("dflash_train.attention.SCORES_BYTES", scores_bytes)
        return values_and_gradients(attention_for(AttentionBackend.dense, blocks, context, 6), inputs)

    three_blocks = 3 * 4 * 4 * 4 * (16 + 4)
    for grouped, whole in zip(run(three_blocks), run(1 << 30), strict=True):
        torch.testing.assert_close(grouped, whole, rtol=0, atol=1e-13)


ON_EVERY_DEVICE = [
    *[("cpu", backend) for backend in (AttentionBackend.dense, AttentionBackend.tiled)],
    *[pytest.param("cuda", b, marks=pytest.mark.gpu) for b in (AttentionBackend.dense, AttentionBackend.tiled, AttentionBackend.flex)],
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # of the norm


def random_pack(seed, block_size=16):
    """Documents with many anchors, the first one's start among them, and one with none; number and lengths change with the seed."""
    draw = random.Random(seed)
    lengths = [draw.randint(100, 500) for _ in range(draw.randint(2, 4))]
    anchors = [sorted(draw.sample(range(n), draw.randint(12, 24))) for n in lengths]
    anchors[0] = sorted({0, *anchors[0]})
    return pack([*lengths, 50], [*anchors, []], block_size, mask_token_id=1000)


@pytest.mark.parametrize(("window", "num_heads", "num_kv_heads", "head_dim"), [(None, 9, 3, 64), (48, 4, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "backend"), ON_EVERY_DEVICE)
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # beyond it flex would run uncompiled
def test_every_device_gives_what_dense_gives_in_float64_on_the_cpu(device, backend, dtype, window, num_heads, num_kv_heads, head_dim):
    torch._dynamo.reset()
    for seed in range(2):  # flex: the first compiles for its sizes, the second for any
        context, blocks = random_pack(seed)
        drawn = [x.detach().to(dtype) for x in random_inputs(blocks, context, num_heads, num_kv_heads, head_dim)]
        oracle = attention_for(AttentionBackend.dense, blocks, context, window)
        expected = values_and_gradients(oracle, [x.double().requires_grad_() for x in drawn])
        attend = attention_for(backend, blocks.to(device), context.to(device), window)
        got = values_and_gradients(attend, [x.to(device).requires_grad_() for x in drawn])
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.device.type == device and ours.dtype == dtype
            assert (ours.cpu().double() - theirs).norm() / theirs.norm() < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [AttentionBackend.dense, AttentionBackend.tiled, AttentionBackend.flex])
@pytest.mark.parametrize(("num_blocks", "num_context"), [(0, 0), (0, 5), (2, 0)])
def test_empty_packs_on_a_gpu(backend, num_blocks, num_context):
    lengths = [num_context] if num_context else []
    context, blocks = (x.to("cuda") for x in pack(lengths, [[] for _ in lengths], 3))
    if num_blocks:
        none = torch.zeros(num_blocks, dtype=torch.long, device="cuda")
        slots = torch.zeros(num_blocks, 3, device="cuda")
        blocks = Blocks(none, none, slots.long(), slots.long(), slots)
    inputs = [x.detach().float().cuda().requires_grad_() for x in random_inputs(blocks, context, 4, 2, head_dim=16)]
    out = attention_for(backend, blocks, context, None)(*inputs)
    out.sum().backward()
    assert out.shape == inputs[0].shape and all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.gpu
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_flex_stays_compiled_whatever_the_packs():
    torch._dynamo.reset()
    for seed in range(12):
        context, blocks = (x.to("cuda") for x in random_pack(seed))
        inputs = [x.detach().bfloat16().cuda().requires_grad_() for x in random_inputs(blocks, context, 4, 2, head_dim=64)]
        for window in (None, 48):
            assert all(
                x.isfinite().all() for x in values_and_gradients(attention_for(AttentionBackend.flex, blocks, context, window), inputs)
            )
