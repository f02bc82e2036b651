"""Attention against a loop over queries and keys written out here, in float64: values and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.attention import dense_attention
from dflash_train.blocks import build_blocks
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
    out = torch.zeros_like(q)
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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(layouts())
def test_equals_the_slow_loop_in_values_and_gradients(layout):
    lengths, anchors, block_size, window, num_kv_heads, group = layout
    documents = [(torch.arange(n), torch.ones(n)) for n in lengths]
    context, blocks = build_blocks(documents, [torch.tensor(a, dtype=torch.long) for a in anchors], block_size, 300)
    questions = [(d, a) for d, of_document in enumerate(anchors) for a in of_document]
    tokens = [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    slots, num_heads, head_dim = (len(questions), block_size), num_kv_heads * group, 4
    inputs = [
        random(*slots, num_heads, head_dim),
        *(random(len(tokens), num_kv_heads, head_dim) for _ in range(2)),
        *(random(*slots, num_kv_heads, head_dim) for _ in range(2)),
    ]
    scale = 1 / math.sqrt(head_dim)
    visible = context_visible_AKT(blocks, context, window), block_visible_KK(block_size, window)
    fast = dense_attention(*inputs, *visible, scale)
    slow = slow_attention(*inputs, questions, tokens, window, scale)
    assert fast.shape == slow.shape
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    if questions:
        direction = torch.randn(slow.shape, dtype=torch.float64, generator=generator)
        fast_gradients = torch.autograd.grad((fast * direction).sum(), inputs)
        slow_gradients = torch.autograd.grad((slow * direction).sum(), inputs, materialize_grads=True, allow_unused=True)
        for ours, theirs in zip(fast_gradients, slow_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_blocks", "num_context"), [(0, 0), (0, 5), (2, 0)])
def test_empty_packs_are_finite_and_keep_the_graph(num_blocks, num_context):
    q = torch.randn(num_blocks, 3, 4, 8, requires_grad=True)
    context = torch.randn(num_context, 2, 8, requires_grad=True)
    block = torch.randn(num_blocks, 3, 2, 8, requires_grad=True)
    visible = torch.zeros(num_blocks, 1, num_context, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)
    out = dense_attention(q, context, context, block, block, *visible, 1.0)
    out.sum().backward()
    assert out.shape == q.shape and out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, context, block))


def test_bf16_autocast_stays_close():
    q, context, block = torch.randn(3, 4, 4, 8), torch.randn(6, 2, 8), torch.randn(3, 4, 2, 8)
    visible = torch.ones(3, 1, 6, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    exact = dense_attention(q, context, context, block, block, *visible, 0.35)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = dense_attention(q, context, context, block, block, *visible, 0.35)
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.05)


def test_groups_of_blocks_give_what_all_blocks_at_once_give(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    documents = [(torch.arange(n), torch.ones(n)) for n in (9, 7)]
    context, blocks = build_blocks(documents, [torch.tensor([0, 2, 5, 6]), torch.tensor([1, 3, 4])], 4, 300)
    visible = context_visible_AKT(blocks, context, 6), block_visible_KK(4, 6)
    shapes = [(7, 4, 4, 8), (16, 2, 8), (16, 2, 8), (7, 4, 2, 8), (7, 4, 2, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    direction = torch.randn(shapes[0], dtype=torch.float64, generator=generator)

    def run(scores_bytes):
        monkeypatch.setattr("dflash_train.attention.SCORES_BYTES", scores_bytes)
        out = dense_attention(*inputs, *visible, 0.3)
        return out, *torch.autograd.grad((out * direction).sum(), inputs)

    three_blocks = 3 * 4 * 4 * 4 * (16 + 4)
    for grouped, whole in zip(run(three_blocks), run(1 << 30), strict=True):
        torch.testing.assert_close(grouped, whole, rtol=0, atol=1e-13)
