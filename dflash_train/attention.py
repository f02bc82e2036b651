"""Attention of blocks over a shared context and over their own slots, with one softmax over both: three back ends behind one name.

    attend = attention_for(backend, blocks, context, window)    once per draft and layer kind (window None: a full layer)
    out_AKHd = attend(q_AKHd, context_k_THd, context_v_THd, block_k_AKHd, block_v_AKHd)

q is [A, K, H, d] and already rotated; keys and values [..., Hkv, d], H a multiple of Hkv: neighbouring query heads share a kv head. The
scale is d^-0.5. Who sees whom comes from `masks.py`; every slot sees itself, so a row is finite even where it sees no context. All work
for T = 0 and A = 0.

- **dense** scores every slot against every context token. Plain, and the only one whose context may come in any order (decoding).
- **tiled** groups neighbouring anchors of a document, which see nearly the same tokens: one product with the slice of the context that some
  of them see and with their own slots. Its backward is written out and computes the probabilities again, so a layer keeps its inputs and
  nothing of the size of the scores. A sliding layer costs what its window costs, whatever the document's length.
- **flex** is torch's FlexAttention with a block mask, for CUDA. On a CPU torch 2.13 has no backward for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_train.blocks import Blocks, Context
from dflash_train.config import AttentionBackend
from dflash_train.masks import block_visible_KK, context_visible_AKT, sees_block, sees_context

SCORES_BYTES = 1 << 30  # dense: scores of one group of blocks, in fp32; more are computed again in the backward
TILE_KEYS = 1 << 16  # tiled: at most so many keys times blocks in one tile
TILE_OVERHEAD = 1024  # tiled: what a tile costs beside its scores, in keys times blocks

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def resolve_backend(backend: AttentionBackend, device: torch.device) -> AttentionBackend:
    """What `auto` means on `device`: flex on CUDA, tiled elsewhere."""
    if backend is not AttentionBackend.auto:
        return backend
    return AttentionBackend.flex if device.type == "cuda" else AttentionBackend.tiled


def attention_for(backend: AttentionBackend, blocks: Blocks, context: Context, window: int | None) -> Attend:
    """The attention of `blocks` over the tokens of `context` in a layer of this window, to be used by all such layers.

    Raises ValueError when `tiled` gets a context in which the tokens of a document do not follow one another.
    """
    match resolve_backend(backend, blocks.position_A.device):
        case AttentionBackend.tiled:
            return TiledAttention(plan_tiles(blocks, context, window))
        case AttentionBackend.flex:
            return FlexAttention(blocks, context, window)
        case _:
            device = blocks.position_A.device
            return DenseAttention(context_visible_AKT(blocks, context, window), block_visible_KK(blocks.block_size, window, device))


@dataclass(frozen=True)
class DenseAttention:
    """`context_visible_AKT` (bool, broadcasts to [A, K, T]) and `block_visible_KK` (bool) say which keys a query sees.

    Where the scores of all blocks would need more than `SCORES_BYTES`, groups of blocks are checkpoints of their own.
    """

    context_visible_AKT: Tensor
    block_visible_KK: Tensor

    @torch.compiler.disable
    def __call__(self, q_AKHd: Tensor, context_k_THd: Tensor, context_v_THd: Tensor, block_k_AKHd: Tensor, block_v_AKHd: Tensor) -> Tensor:
        num_blocks, block_size, num_heads, _ = q_AKHd.shape
        block_bytes = 4 * block_size * num_heads * (len(context_k_THd) + block_size)
        group = max(1, SCORES_BYTES // block_bytes)
        if num_blocks <= group:
            inputs = (q_AKHd, context_k_THd, context_v_THd, block_k_AKHd, block_v_AKHd, self.context_visible_AKT)
            return _attend(*inputs, self.block_visible_KK)
        outputs = []
        for first in range(0, num_blocks, group):
            q, k, v, visible = (x[first : first + group] for x in (q_AKHd, block_k_AKHd, block_v_AKHd, self.context_visible_AKT))
            inputs = (q, context_k_THd, context_v_THd, k, v, visible, self.block_visible_KK)
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
) -> Tensor:
    num_blocks, block_size, num_heads, head_dim = q_AKHd.shape
    num_kv_heads, num_context = context_k_THd.shape[1], context_k_THd.shape[0]
    group = num_heads // num_kv_heads
    # kv heads first, then [A, K, group] as rows: one product with the context per kv head, one with the own block per kv head and block
    q_hAKGd = (q_AKHd * head_dim**-0.5).unflatten(2, (num_kv_heads, group)).permute(2, 0, 1, 3, 4).contiguous()
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


@dataclass(frozen=True)
class Tile:
    """Blocks `first` to `last` - 1 (in the order of the plan) against context rows `lo` to `hi` - 1."""

    first: int
    last: int
    lo: int
    hi: int
    context_visible_GKS: Tensor  # bool, [G, 1, S] on a full layer


@dataclass(frozen=True)
class TilePlan:
    """The tiles of all blocks. `order_A` sorts the blocks by document and position; None: they are sorted."""

    tiles: list[Tile]
    order_A: Tensor | None
    block_visible_KK: Tensor


def plan_tiles(blocks: Blocks, context: Context, window: int | None) -> TilePlan:
    """Neighbouring anchors of a document in groups whose cost per block is least. Raises ValueError as `attention_for` does."""
    key_A = blocks.document_A * (1 << 40) + blocks.position_A
    order_A = None if bool((key_A.diff() >= 0).all()) else key_A.argsort(stable=True)
    blocks = blocks if order_A is None else blocks[order_A]
    spans = _spans_of_blocks(blocks, context, window)
    tiles = []
    for first, last in _groups(spans, blocks.block_size):
        lo, hi = min(span[1] for span in spans[first:last]), max(span[2] for span in spans[first:last])
        tiles.append(Tile(first, last, lo, hi, context_visible_AKT(blocks[first:last], context[lo:hi], window)))
    return TilePlan(tiles, order_A, block_visible_KK(blocks.block_size, window, blocks.position_A.device))


def _spans_of_blocks(blocks: Blocks, context: Context, window: int | None) -> list[tuple[int, int, int]]:
    """Of every block its document, and the first and the end of the context rows that some slot of it sees."""
    documents, lengths = context.document_T.cpu().unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    offset_T = context.position_T.cpu() - torch.arange(len(context.position_T))
    if len(documents.unique()) < len(documents) or not torch.equal(offset_T, offset_T[starts].repeat_interleave(lengths)):
        raise ValueError("tiled attention needs the tokens of a document behind one another, in order; use dense")
    places = {
        document: (start, end, offset)
        for document, start, end, offset in zip(documents.tolist(), starts.tolist(), ends.tolist(), offset_T[starts].tolist(), strict=True)
    }
    spans = []
    for document, position in zip(blocks.document_A.tolist(), blocks.position_A.tolist(), strict=True):
        start, end, offset = places.get(document, (0, 0, 0))
        hi = min(max(position - offset, start), end)
        lo = start if window is None else min(max(position - offset - window + 1, start), hi)
        spans.append((document, lo, hi))
    return spans


def _groups(spans: Sequence[tuple[int, int, int]], block_size: int) -> Iterator[tuple[int, int]]:
    """First and end of each group of sorted blocks: a group takes the next block of its document while that lowers its cost per block."""
    first = 0
    while first < len(spans):
        document, lo, hi = spans[first]
        last, least = first + 1, float("inf")
        for end in range(first + 1, len(spans) + 1):
            if spans[end - 1][0] != document:
                break
            lo, hi, size = min(lo, spans[end - 1][1]), max(hi, spans[end - 1][2]), end - first
            keys = hi - lo + size * block_size
            cost = keys + TILE_OVERHEAD / size
            if cost > least or size > 1 and size * keys > TILE_KEYS:
                break
            last, least = end, cost
        yield first, last
        first = last


@dataclass(frozen=True)
class TiledAttention:
    """Attention tile by tile."""

    plan: TilePlan

    @torch.compiler.disable
    def __call__(self, q_AKHd: Tensor, context_k_THd: Tensor, context_v_THd: Tensor, block_k_AKHd: Tensor, block_v_AKHd: Tensor) -> Tensor:
        order_A = self.plan.order_A
        inputs = (q_AKHd, block_k_AKHd, block_v_AKHd)
        q, k, v = (x.flatten(0, 1) for x in (inputs if order_A is None else (x[order_A] for x in inputs)))
        context_kv = (x.to(q.dtype).transpose(0, 1).contiguous() for x in (context_k_THd, context_v_THd))
        out_AKHd = _Tiled.apply(q, *context_kv, k.to(q.dtype), v.to(q.dtype), self.plan).view_as(q_AKHd)
        return out_AKHd if order_A is None else out_AKHd[order_A.argsort()]


class _Tiled(torch.autograd.Function):
    """Slots [X, H, d], X = A*K, come as they are; context tokens, which many tiles copy, with their heads first."""

    @staticmethod
    def forward(ctx: Any, q_XHd: Tensor, ck_hTd: Tensor, cv_hTd: Tensor, bk_XHd: Tensor, bv_XHd: Tensor, plan: TilePlan) -> Tensor:
        inputs = (q_XHd, ck_hTd, cv_hTd, bk_XHd, bv_XHd)
        ctx.save_for_backward(*inputs)
        ctx.plan = plan
        out_XHd = torch.empty_like(q_XHd)
        with torch.autocast(q_XHd.device.type, enabled=False):
            for tile in _TileWork.of(plan, *inputs):
                tile.put_rows(out_XHd, tile.probabilities() @ tile.v_hSd)
        return out_XHd

    @staticmethod
    def backward(ctx: Any, grad_XHd: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        q_XHd, ck_hTd, cv_hTd, bk_XHd, bv_XHd = inputs
        wide = torch.promote_types(q_XHd.dtype, torch.float32)  # many tiles add to one context row
        dq, dbk, dbv = torch.empty_like(q_XHd), torch.empty_like(bk_XHd), torch.empty_like(bv_XHd)
        dck, dcv = torch.zeros_like(ck_hTd, dtype=wide), torch.zeros_like(cv_hTd, dtype=wide)
        with torch.autocast(grad_XHd.device.type, enabled=False):
            for tile in _TileWork.of(ctx.plan, *inputs):
                grad_hRd = tile.grouped(grad_XHd)
                p_hRS = tile.probabilities()
                dv_hSd = p_hRS.transpose(1, 2) @ grad_hRd
                dp_hRS = grad_hRd @ tile.v_hSd.transpose(1, 2)
                ds_hRS = torch._softmax_backward_data(dp_hRS, p_hRS, -1, p_hRS.dtype)
                tile.put_rows(dq, (ds_hRS @ tile.k_hSd).mul_(tile.scale))
                tile.put_keys(dck, dbk, ds_hRS.transpose(1, 2) @ tile.q_hRd)
                tile.put_keys(dcv, dbv, dv_hSd)
        return dq, dck.to(ck_hTd.dtype), dcv.to(cv_hTd.dtype), dbk, dbv, None


@dataclass(frozen=True)
class _TileWork:
    """A tile's scaled queries [Hkv, R, d], R = query heads per kv head times slots; its keys and values: context, then own slots."""

    rows: slice
    context: slice
    visible_GKS: Tensor
    block_visible_KK: Tensor
    q_hRd: Tensor
    k_hSd: Tensor
    v_hSd: Tensor

    @classmethod
    def of(cls, plan: TilePlan, q_XHd: Tensor, ck_hTd: Tensor, cv_hTd: Tensor, bk_XHd: Tensor, bv_XHd: Tensor) -> "Iterator[_TileWork]":
        """The tiles of a plan, one after the other."""
        block_size, num_kv_heads = len(plan.block_visible_KK), len(ck_hTd)
        for tile in plan.tiles:
            rows, context = slice(tile.first * block_size, tile.last * block_size), slice(tile.lo, tile.hi)
            k_hSd, v_hSd = (torch.cat([c[:, context], b[rows].transpose(0, 1)], dim=1) for c, b in ((ck_hTd, bk_XHd), (cv_hTd, bv_XHd)))
            q_hRd = _grouped(q_XHd[rows], num_kv_heads) * q_XHd.shape[-1] ** -0.5
            yield cls(rows, context, tile.context_visible_GKS, plan.block_visible_KK, q_hRd, k_hSd, v_hSd)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.q_hRd.shape[-1] ** -0.5

    def grouped(self, x_XHd: Tensor) -> Tensor:
        """Its rows of [X, H, d] as [Hkv, R, d]."""
        return _grouped(x_XHd[self.rows].to(self.q_hRd.dtype), len(self.k_hSd))

    def put_rows(self, out_XHd: Tensor, x_hRd: Tensor) -> None:
        """Its rows [Hkv, R, d] to where they belong."""
        out_XhGd = out_XHd[self.rows].unflatten(1, (len(x_hRd), -1))
        out_XhGd.copy_(x_hRd.view(len(x_hRd), -1, *out_XhGd.shape[::3]).permute(2, 0, 1, 3))

    def put_keys(self, context_hTd: Tensor, own_XHd: Tensor, x_hSd: Tensor) -> None:
        """Adds the context's part of [Hkv, S, d] and sets that of its own slots."""
        num_context = self.context.stop - self.context.start
        context_hTd[:, self.context] += x_hSd[:, :num_context]
        own_XHd[self.rows] = x_hSd[:, num_context:].transpose(0, 1)

    def probabilities(self) -> Tensor:
        """[Hkv, R, S + own slots]; the mask is added in place."""
        scores_hRS = self.q_hRd @ self.k_hSd.transpose(1, 2)
        block_size, num_context = len(self.block_visible_KK), self.context.stop - self.context.start
        num_blocks = (self.rows.stop - self.rows.start) // block_size
        own_GKGK = torch.eye(num_blocks, dtype=torch.bool, device=scores_hRS.device)[:, None, :, None] & self.block_visible_KK[:, None]
        scores = scores_hRS.view(len(scores_hRS), -1, num_blocks, block_size, scores_hRS.shape[-1])
        scores[..., :num_context] += _bias(self.visible_GKS, scores.dtype)
        scores[..., num_context:] += _bias(own_GKGK.flatten(2), scores.dtype)
        return scores_hRS.softmax(-1)


def _grouped(x_XHd: Tensor, num_kv_heads: int) -> Tensor:
    """Heads first, those that share a kv head behind one another: [X, H, d] as [Hkv, H/Hkv * X, d]."""
    return x_XHd.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


class FlexAttention:
    """FlexAttention over the context and all blocks' own slots behind it; the mask is made once, compiled on CUDA."""

    def __init__(self, blocks: Blocks, context: Context, window: int | None) -> None:
        num_slots, num_context, device = blocks.input_ids_AK.numel(), len(context.position_T), blocks.position_A.device
        make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
        sees = mask_mod(blocks, context, window)
        self.mask = make(sees, None, None, num_slots, num_context + num_slots, device=device) if num_slots else None

    @torch.compiler.disable
    def __call__(self, q_AKHd: Tensor, context_k_THd: Tensor, context_v_THd: Tensor, block_k_AKHd: Tensor, block_v_AKHd: Tensor) -> Tensor:
        if self.mask is None:  # a sum over nothing keeps the graph
            return q_AKHd + 0 * sum(x.sum() for x in (context_k_THd, context_v_THd, block_k_AKHd, block_v_AKHd))
        pairs = (context_k_THd, block_k_AKHd), (context_v_THd, block_v_AKHd)
        k, v = (torch.cat([c, b.flatten(0, 1)]).transpose(0, 1)[None] for c, b in pairs)
        attend = _compiled(flex_attention) if q_AKHd.is_cuda else flex_attention
        out_1HXd = attend(q_AKHd.flatten(0, 1).transpose(0, 1)[None], k, v, block_mask=self.mask, enable_gqa=True)
        return out_1HXd[0].transpose(0, 1).reshape(q_AKHd.shape)


def mask_mod(blocks: Blocks, context: Context, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of `masks.py` as FlexAttention asks it: whether slot `query` of A*K sees key `key`, T context tokens and then A*K slots."""
    num_context, block_size = len(context.position_T), blocks.block_size

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot, own = query // block_size, query % block_size, key - num_context
        in_own = (own // block_size == block) & sees_block(slot, own % block_size, window)
        if num_context == 0:
            return in_own
        token = key.clamp(max=num_context - 1)
        places = (blocks.position_A[block], slot, blocks.document_A[block], context.position_T[token], context.document_T[token])
        return torch.where(own < 0, sees_context(*places, window), in_own)

    return sees


_COMPILED: dict[Callable, Callable] = {}


def _compiled(function: Callable) -> Callable:
    """`function` through torch.compile, once per process."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]
