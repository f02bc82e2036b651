"""Attention of blocks over a shared context and over their own slots, with one softmax over both.

All blocks of a pack share the context's keys and values, so these are projected once per context token; a block's own keys concern that
block alone. The scores are therefore [A, K, T] and [A, K, K] per head, never [A*K, A*K]. Who sees whom comes from `masks.py`.

Blocks do not see each other, so they can be computed group by group: where the scores of all blocks would need more than `SCORES_BYTES`,
each group is a checkpoint of its own, whose scores are computed again in the backward. Memory is then that of one group.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORES_BYTES = 1 << 30  # of one group's scores, in fp32


def dense_attention(
    q_AKHd: Tensor,
    context_k_THd: Tensor,
    context_v_THd: Tensor,
    block_k_AKHd: Tensor,
    block_v_AKHd: Tensor,
    context_visible_AKT: Tensor,
    block_visible_KK: Tensor,
    scale: float,
) -> Tensor:
    """Attention output [A, K, H, d] of queries with H heads; keys and values may have fewer heads, which groups of queries share.

    `context_visible_AKT` (bool, broadcasts to [A, K, T]) and `block_visible_KK` (bool) say which keys a query sees. Every slot must see
    itself, so a row is finite even where it sees no context. Works for T = 0 and A = 0.
    """
    num_blocks, block_size, num_heads, _ = q_AKHd.shape
    block_bytes = 4 * block_size * num_heads * (len(context_k_THd) + block_size)
    group = max(1, SCORES_BYTES // block_bytes)
    if num_blocks <= group:
        return _attend(q_AKHd, context_k_THd, context_v_THd, block_k_AKHd, block_v_AKHd, context_visible_AKT, block_visible_KK, scale)
    outputs = []
    for first in range(0, num_blocks, group):
        q, k, v, visible = (x[first : first + group] for x in (q_AKHd, block_k_AKHd, block_v_AKHd, context_visible_AKT))
        inputs = (q, context_k_THd, context_v_THd, k, v, visible, block_visible_KK, scale)
        outputs.append(checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


def _attend(
    q_AKHd: Tensor,
    context_k_THd: Tensor,
    context_v_THd: Tensor,
    block_k_AKHd: Tensor,
    block_v_AKHd: Tensor,
    context_visible_AKT: Tensor,
    block_visible_KK: Tensor,
    scale: float,
) -> Tensor:
    num_blocks, block_size, num_heads, head_dim = q_AKHd.shape
    num_kv_heads, num_context = context_k_THd.shape[1], context_k_THd.shape[0]
    group = num_heads // num_kv_heads
    # kv heads first, then [A, K, group] as rows: one product with the context per kv head, one with the own block per kv head and block
    q_hAKGd = (q_AKHd * scale).unflatten(2, (num_kv_heads, group)).permute(2, 0, 1, 3, 4).contiguous()
    context_scores = torch.matmul(q_hAKGd.flatten(1, 3), context_k_THd.permute(1, 2, 0))
    context_scores = context_scores.view(num_kv_heads, num_blocks, block_size, group, num_context)
    block_scores = torch.matmul(q_hAKGd.flatten(2, 3), block_k_AKHd.permute(2, 0, 3, 1))
    block_scores = block_scores.view(num_kv_heads, num_blocks, block_size, group, block_size)

    # in place: a product's backward does not need its result
    context_scores.masked_fill_(~context_visible_AKT[:, :, None], float("-inf"))
    block_scores.masked_fill_(~block_visible_KK[:, None], float("-inf"))
    probability = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1)
    context_probability, block_probability = probability.split([num_context, block_size], dim=-1)

    from_context = torch.matmul(context_probability.flatten(1, 3), context_v_THd.transpose(0, 1)).view_as(q_hAKGd)
    from_block = torch.matmul(block_probability.flatten(2, 3), block_v_AKHd.permute(2, 0, 1, 3)).view_as(q_hAKGd)
    return (from_context + from_block).permute(1, 2, 0, 3, 4).reshape(num_blocks, block_size, num_heads, head_dim)
