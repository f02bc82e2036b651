"""The objective: weighted cross-entropy of the block slots against the frozen head, without ever holding all logits.

In: the drafter's normed hidden states of the blocks, the target's output head, labels and weights. Out: the unnormalised weighted
sum, whose gradient the caller divides once per optimizer step by the sum of weights over all packs and processes, and detached
figures per slot for the log.

The head is frozen, so the gradient of a chunk's hidden states is complete as soon as its logits are known: it is computed in the
forward and the logits are dropped. The head costs two products instead of the three of a checkpointed loss, and memory is one chunk.
Source: DFlash, arXiv 2602.06036 (position-weighted cross-entropy); the gradient in the forward is the idea of Liger Kernel's fused
linear cross-entropy, arXiv 2410.10989.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class LossResult:
    """`loss_sum` carries the gradient; everything else is detached. Slots of weight 0 read 0 and False."""

    loss_sum: Tensor  # sum over slots of weight times cross-entropy, unnormalised
    weight_sum: Tensor
    cross_entropy_AK: Tensor
    right_AK: Tensor  # bool: the label is the most likely token


def weighted_cross_entropy(hidden_AKD: Tensor, head_VD: Tensor, labels_AK: Tensor, weights_AK: Tensor, chunk_bytes: int) -> LossResult:
    """Sum of weights times cross-entropy over the slots whose weight is not 0; works with no blocks at all.

    Products run in the head's dtype, under autocast too, and the softmax in fp32, or in float64 when the head is. `chunk_bytes`
    bounds the logits held at once, in whole blocks and at least one. The head gets no gradient.
    """
    with_gradient = torch.is_grad_enabled() and hidden_AKD.requires_grad
    loss_sum, cross_entropy_AK, right_AK = _FrozenHeadCrossEntropy.apply(
        hidden_AKD, head_VD, labels_AK, weights_AK, chunk_bytes, with_gradient
    )
    return LossResult(loss_sum, weights_AK.sum(), cross_entropy_AK, right_AK)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AKD: Tensor, head_VD: Tensor, labels_AK: Tensor, weights_AK: Tensor, chunk_bytes: int, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(head_VD.dtype, torch.float32)
        hidden_SD, labels_S, weights_S = hidden_AKD.flatten(0, 1), labels_AK.flatten(), weights_AK.flatten().to(dtype)
        cross_entropy_S = torch.zeros_like(weights_S)
        right_S = torch.zeros_like(weights_S, dtype=torch.bool)
        grad_SD = torch.zeros_like(hidden_SD) if with_gradient else None
        blocks_per_chunk = max(1, chunk_bytes // (weights_AK.shape[1] * len(head_VD) * dtype.itemsize))
        # a fresh allocation per chunk would cost the kernel's zeroed pages each time: a tenth of the products
        buffer_CV = head_VD.new_empty(min(blocks_per_chunk, len(weights_AK)) * weights_AK.shape[1], len(head_VD))
        # custom functions run under the caller's autocast, which would overrule the dtypes chosen here
        with torch.autocast(hidden_AKD.device.type, enabled=False):
            for slots_C in _counting_slots(weights_AK, blocks_per_chunk):
                hidden_CD = hidden_SD[slots_C].to(head_VD.dtype)
                logits_CV = torch.mm(hidden_CD, head_VD.T, out=buffer_CV[: len(slots_C)]).to(dtype)
                cross_entropy_S[slots_C], right_S[slots_C], total_C = _cross_entropy_(logits_CV, labels_S[slots_C])
                if grad_SD is not None:
                    grad_CD = _hidden_gradient_(logits_CV, total_C, head_VD, labels_S[slots_C], weights_S[slots_C])
                    grad_SD[slots_C] = grad_CD.to(grad_SD.dtype)
        if grad_SD is not None:
            ctx.save_for_backward(grad_SD.view_as(hidden_AKD))
        outputs = (weights_S * cross_entropy_S).sum(), cross_entropy_S.view_as(labels_AK), right_S.view_as(labels_AK)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_AKD,) = ctx.saved_tensors
        return (grad_AKD * grad_loss).to(grad_AKD.dtype), None, None, None, None, None


def _counting_slots(weights_AK: Tensor, blocks_per_chunk: int) -> Iterator[Tensor]:
    """Flat indices of the slots of non-zero weight, whole blocks at a time."""
    block_size = weights_AK.shape[1]
    for i, weights_of_chunk in enumerate(weights_AK.split(blocks_per_chunk)):
        yield weights_of_chunk.flatten().nonzero().squeeze(1) + i * blocks_per_chunk * block_size


def _cross_entropy_(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, whether the label is the argmax, and the softmax's denominator; turns the logits into its numerators in place."""
    peak_C = logits_CV.amax(-1)
    label_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    total_C = logits_CV.sub_(peak_C[:, None]).exp_().sum(-1)
    return peak_C - label_C + total_C.log(), label_C == peak_C, total_C


def _hidden_gradient_(numerators_CV: Tensor, total_C: Tensor, head_VD: Tensor, labels_C: Tensor, weights_C: Tensor) -> Tensor:
    """Gradient of the weighted sum: weight * (softmax - one-hot) @ head, with the row-wise factors applied on the small side."""
    numerators_CV.scatter_add_(1, labels_C[:, None], -total_C[:, None])
    grad_CD = (numerators_CV.to(head_VD.dtype) @ head_VD).to(weights_C.dtype)
    return grad_CD.mul_((weights_C / total_C)[:, None])
