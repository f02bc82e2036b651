"""The one rule of who sees whom, element by element; every attention back end is tested against it.

A query is slot j of the block with anchor a, at position p = a + j. On a full layer it sees the context before the anchor and the whole
block; a sliding layer adds causality inside the block and a window of w keys that counts the query itself.

- context key t: same document, t < a, and on a sliding layer p - t < w;
- block key of slot i: same block, and on a sliding layer i <= j and j - i < w.

This is what vLLM 0.33, SGLang 0.5.23 and z-lab's dflash 0.1.0 compute for a drafter whose config sets no causality of its own. The
window moves with the query (p - t), not with the anchor.
"""

import torch
from torch import Tensor

from dflash_train.blocks import Blocks, Context


def sees_context(anchor: Tensor, slot: Tensor, document: Tensor, key_position: Tensor, key_document: Tensor, window: int | None) -> Tensor:
    """Whether slot `slot` of the block at `anchor` of `document` sees the context token `key_position` of `key_document`.

    Integer tensors of any shapes that broadcast; bool of their common shape. `window=None` is a full layer.
    """
    visible = (document == key_document) & (key_position < anchor)
    return visible if window is None else visible & (anchor + slot - key_position < window)


def sees_block(slot: Tensor, key_slot: Tensor, window: int | None) -> Tensor:
    """Whether slot `slot` sees slot `key_slot` of its own block; shapes broadcast. `window=None` is a full layer."""
    if window is None:
        return torch.ones_like(slot == key_slot)
    return (key_slot <= slot) & (slot - key_slot < window)


def context_visible_AKT(blocks: Blocks, context: Context, window: int | None) -> Tensor:
    """`sees_context` of all slots and context tokens: bool [A, K, T], or [A, 1, T] on a full layer, where a block's slots agree."""
    slots = torch.arange(1 if window is None else blocks.block_size, device=blocks.position_A.device)
    return sees_context(
        anchor=blocks.position_A[:, None, None],
        slot=slots[:, None],
        document=blocks.document_A[:, None, None],
        key_position=context.position_T,
        key_document=context.document_T,
        window=window,
    )


def block_visible_KK(block_size: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """`sees_block` of all pairs of slots: bool [K, K], row = query."""
    slots = torch.arange(block_size, device=device)
    return sees_block(slots[:, None], slots, window)
