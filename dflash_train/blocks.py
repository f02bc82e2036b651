"""Anchors, blocks, labels and weights: what a drafter is asked, and what the right answer is.

Comes in: documents (token ids and loss mask). Goes out: a `Context` (whose tokens the keys and values belong to) and `Blocks` (the
questions). A **pack** is whole documents behind one another: its context arrays are [T], and every token carries the index of its
document and its position in it, so nothing ever depends on where in the pack a document lies.

A block with anchor a holds the token at a in slot 0 and the mask token in slots 1..K-1; slot k predicts the token *at* a+k, there is no
shift. Source: DFlash, arXiv 2602.06036; the decay of the weights is its equation for the loss, slot 0 never counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from dflash_train.errors import UserError

IGNORED_LABEL = -100  # label of a slot that does not count, as torch's cross_entropy spells it
_GAMMA_BY_BLOCK_SIZE = {8: 4.0, 10: 5.0, 16: 7.0}  # the paper's choices


@dataclass
class Context:
    """The tokens a pack offers as context: `document_T` (index of the document) and `position_T` (position in it), both int64 [T]."""

    document_T: Tensor
    position_T: Tensor

    def __getitem__(self, rows: slice) -> "Context":
        """Some of the tokens."""
        return Context(self.document_T[rows], self.position_T[rows])

    def to(self, device: torch.device | str) -> "Context":
        """The same values on `device`."""
        return _to(self, device)


@dataclass
class Blocks:
    """A drafting questions: int64 `position_A` (the anchor's position in its document), `document_A`, `input_ids_AK`, `labels_AK`
    (`IGNORED_LABEL` where nothing counts) and float32 `weights_AK` (0 where nothing counts). `row_A` is the anchor's row in the pack,
    None where a context is no pack."""

    position_A: Tensor
    document_A: Tensor
    input_ids_AK: Tensor
    labels_AK: Tensor
    weights_AK: Tensor
    row_A: Tensor | None = None

    @property
    def block_size(self) -> int:
        """K, the anchor included."""
        return self.input_ids_AK.shape[1]

    @property
    def position_AK(self) -> Tensor:
        """Position of every slot in its document: a+k."""
        return self.position_A[:, None] + torch.arange(self.block_size, device=self.position_A.device)

    @property
    def num_supervised(self) -> int:
        """Slots that count."""
        return int((self.weights_AK > 0).sum())

    def __getitem__(self, chosen: Tensor | slice) -> "Blocks":
        """Some of the blocks, by their indices or as a slice of views."""
        return replace(self, **{name: tensor[chosen] for name, tensor in _present(self).items()})

    def to(self, device: torch.device | str) -> "Blocks":
        """The same values on `device`."""
        return _to(self, device)


_Tensors = TypeVar("_Tensors", Context, Blocks)


def decay_weights(block_size: int, gamma: float | None = None) -> Tensor:
    """Weight of each slot [K], float32: slot 0 has 0, slot k has exp(-(k-1)/gamma).

    `gamma=None` takes the paper's value of the nearest of its block sizes (8: 4, 10: 5, 16: 7; the smaller when two are equally near).
    """
    if gamma is None:
        gamma = _GAMMA_BY_BLOCK_SIZE[min(_GAMMA_BY_BLOCK_SIZE, key=lambda size: abs(size - block_size))]
    return torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)])


def eligible_anchors(loss_mask_T: Tensor) -> Tensor:
    """Positions that are supervised and followed by a supervised token, int64, ascending."""
    loss_mask_T = loss_mask_T.bool()
    return (loss_mask_T[:-1] & loss_mask_T[1:]).nonzero()[:, 0]


def draw_anchors(loss_mask_T: Tensor, num: int, seed: int, epoch: int, sample_id: str) -> Tensor:
    """The at most `num` anchors of a document in an epoch, ascending: a function of the arguments, at a cost that no epoch adds to.

    The eligible positions have one random order per (seed, sample); epoch after epoch takes the next `num` of it, round and round.
    So every position is an anchor once before any is one twice, and none comes twice in an epoch, also where one begins a new round.
    """
    eligible = eligible_anchors(loss_mask_T)
    if len(eligible) <= num:
        return eligible
    order = torch.randperm(len(eligible), generator=sample_generator(seed, sample_id))
    return eligible[order[torch.arange(epoch * num, (epoch + 1) * num) % len(eligible)]].sort().values


def sample_generator(seed: int, sample_id: str) -> torch.Generator:
    """The source of the draws for one sample, the same on any process, in any order of work."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{sample_id}".encode()))


def build_blocks(
    documents: Sequence[tuple[Tensor, Tensor]], anchors: Sequence[Tensor], block_size: int, mask_token_id: int, gamma: float | None = None
) -> tuple[Context, Blocks]:
    """The pack of `documents` (ids [T] and loss mask [T] each) and one block per anchor (`anchors[i]` are positions in document i).

    A slot counts while the supervision from a+1 up to it is unbroken and inside the document. Works with no anchors and with no
    documents. Raises UserError when a document contains the mask token.
    """
    lengths = torch.tensor([len(ids) for ids, _ in documents], dtype=torch.long)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    ids_T = _cat([ids for ids, _ in documents])
    document_T = torch.arange(len(documents)).repeat_interleave(lengths)
    context = Context(document_T, torch.arange(len(ids_T)) - starts[document_T])
    _refuse_mask_token(ids_T, context, mask_token_id)

    position_A = _cat(anchors)
    document_A = torch.arange(len(documents)).repeat_interleave(torch.tensor([len(a) for a in anchors], dtype=torch.long))
    row_A = starts[document_A] + position_A
    blocks = single_blocks(ids_T[row_A], position_A, document_A, block_size, mask_token_id)
    in_pack_AK = blocks.position_AK + starts[document_A, None]
    inside_AK = in_pack_AK < ends[document_A, None]
    in_pack_AK = torch.where(inside_AK, in_pack_AK, 0)
    supervised_AK = _cat([mask for _, mask in documents]).bool()[in_pack_AK] & inside_AK
    supervised_AK[:, 0] = True  # the anchor is given, so it cannot break the supervision
    weights_AK = decay_weights(block_size, gamma) * supervised_AK.cumprod(dim=1)
    labels_AK = torch.where(weights_AK > 0, ids_T[in_pack_AK], IGNORED_LABEL)
    return context, replace(blocks, labels_AK=labels_AK, weights_AK=weights_AK, row_A=row_A)


def single_blocks(anchor_ids_A: Tensor, position_A: Tensor, document_A: Tensor, block_size: int, mask_token_id: int) -> Blocks:
    """Blocks as a server asks them: the token `anchor_ids_A` stands at `position_A` of document `document_A`; no labels."""
    slots = (len(anchor_ids_A), block_size)
    input_ids_AK = torch.full(slots, mask_token_id, device=anchor_ids_A.device)
    input_ids_AK[:, 0] = anchor_ids_A
    return Blocks(
        position_A=position_A.long(),
        document_A=document_A.long(),
        input_ids_AK=input_ids_AK,
        labels_AK=torch.full_like(input_ids_AK, IGNORED_LABEL),
        weights_AK=torch.zeros(slots, device=anchor_ids_A.device),
    )


def _refuse_mask_token(ids_T: Tensor, context: Context, mask_token_id: int) -> None:
    found = (ids_T == mask_token_id).nonzero()
    if len(found):
        where = f"document {int(context.document_T[found[0]])} of the pack, token {int(context.position_T[found[0]])}"
        raise UserError(f"drafter.mask_token_id={mask_token_id} occurs in the data ({where}): choose an id that no text uses")


def _to(tensors: _Tensors, device: torch.device | str) -> _Tensors:
    return replace(tensors, **{name: tensor.to(device, non_blocking=True) for name, tensor in _present(tensors).items()})


def _present(tensors: Context | Blocks) -> dict[str, Tensor]:
    return {f.name: value for f in fields(tensors) if (value := getattr(tensors, f.name)) is not None}


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *parts])
