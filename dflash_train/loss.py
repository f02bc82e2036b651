"""The objective: a weighted loss of the block slots against the frozen head, without ever holding all logits.

In: the drafter's normed hidden states of the blocks, the target's output head, labels, weights and, for a loss against the target's own
distribution, its teacher states. Out: the unnormalised weighted sum, whose gradient the caller divides once per optimizer step by the
sum of weights over all packs and processes, and detached figures per slot for the log.

The head is frozen, so the gradient of a chunk's hidden states is complete as soon as its logits are known: it is computed in the
forward and the logits are dropped. The head costs two products instead of the three of a checkpointed loss (three instead of four with
a teacher), and memory is one chunk. Functions that end in _ change the matrices they are given, nothing else, and never look at a value,
so they can be compiled.
Source: DFlash, arXiv 2602.06036 (position-weighted cross-entropy); D-PACE, arXiv 2605.18810 (weights that follow the drafter); the
gradient in the forward is the idea of Liger Kernel's fused linear cross-entropy, arXiv 2410.10989.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_train.target import TeacherHead


@dataclass(frozen=True)
class Objective:
    """What a slot is held to, and what it weighs."""

    tv_share: float | None = None  # None: cross-entropy of the data token; x: (1-x) KL(teacher || drafter) + x total variation
    dpace_alpha: float | None = None  # None: the weights that are given; alpha: D-PACE's, over the slots whose given weight is not 0


CROSS_ENTROPY = Objective()


@dataclass(frozen=True)
class Teacher:
    """The target's own distribution of every slot: what it makes of row `row_AK` (int64) of the teacher states `state_TD`."""

    state_TD: Tensor
    row_AK: Tensor  # not looked at where a slot does not count
    head: TeacherHead

    def states(self, chunk: slice, at: tuple[Tensor, ...]) -> Tensor:
        """The teacher states [C, D] of the slots `at` of the blocks `chunk`."""
        return self.state_TD[self.row_AK[chunk][at]]


@dataclass
class LossResult:
    """`loss_sum` carries the gradient; everything else is detached. Slots of weight 0 read 0 and False."""

    loss_sum: Tensor  # sum over slots of weight times loss, unnormalised
    weight_sum: Tensor  # of the weights used
    cross_entropy_AK: Tensor  # of the data token, whatever the objective
    right_AK: Tensor  # bool: the label is the most likely token


def tv_share_at(step: int, total_steps: int, start: float) -> float:
    """The share x of total variation at optimizer step `step` (0-based): 0 for the first `start` of all, then linear to 1 at the last."""
    return max(0.0, (step / max(1, total_steps - 1) - start) / (1 - start))


def weighted_loss(
    hidden_AKD: Tensor,
    head_VD: Tensor,
    labels_AK: Tensor,
    weights_AK: Tensor,
    chunk_bytes: int,
    objective: Objective = CROSS_ENTROPY,
    teacher: Teacher | None = None,
) -> LossResult:
    """Sum of weights times loss over the slots whose weight is not 0; works with no blocks at all.

    Products run in the head's dtype, under autocast too, and softmax and loss in fp32, or in float64 when the head is. `chunk_bytes`
    bounds what is held at once, in the softmax's dtype, of the logits (and, with a teacher, of two more matrices like them), in whole
    blocks and at least one. Head and teacher get no gradient. The objective decides whether there has to be a teacher.
    """
    assert (teacher is None) == (objective.tv_share is None)
    with_gradient = torch.is_grad_enabled() and hidden_AKD.requires_grad
    return LossResult(*_FrozenHeadLoss.apply(hidden_AKD, head_VD, labels_AK, weights_AK, chunk_bytes, objective, teacher, with_gradient))


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AKD: Tensor,
        head_VD: Tensor,
        labels_AK: Tensor,
        weights_AK: Tensor,
        chunk_bytes: int,
        objective: Objective,
        teacher: Teacher | None,
        with_gradient: bool,
    ) -> tuple[Tensor, ...]:
        used_AK = weights_AK.to(torch.promote_types(head_VD.dtype, torch.float32), copy=True)
        loss_AK, cross_entropy_AK = torch.zeros_like(used_AK), torch.zeros_like(used_AK)
        right_AK = torch.zeros_like(used_AK, dtype=torch.bool)
        grad_AKD = torch.zeros_like(hidden_AKD) if with_gradient else None
        memory = _ChunkMemory(head_VD, used_AK, chunk_bytes, num_matrices=1 if teacher is None else 3)
        # custom functions run under the caller's autocast, which would overrule the dtypes chosen here
        with torch.autocast(hidden_AKD.device.type, enabled=False):
            for chunk in memory.chunks():
                at = weights_AK[chunk].nonzero(as_tuple=True)
                hidden_CD, labels_C = hidden_AKD[chunk][at], labels_AK[chunk][at]
                if teacher is None:
                    slots = _against_data(memory, hidden_CD, labels_C)
                else:
                    slots = _against_teacher(memory, hidden_CD, labels_C, teacher.head, teacher.states(chunk, at), objective)
                loss_AK[chunk][at], cross_entropy_AK[chunk][at], right_AK[chunk][at] = slots.loss_C, slots.cross_entropy_C, slots.right_C
                if objective.dpace_alpha is not None:
                    used_AK[chunk] = dpace_weights(cross_entropy_AK[chunk], weights_AK[chunk] != 0, objective.dpace_alpha)
                if grad_AKD is not None:
                    grad_AKD[chunk][at] = _hidden_gradient(memory, slots, used_AK[chunk][at]).to(grad_AKD.dtype)
        if grad_AKD is not None:
            ctx.save_for_backward(grad_AKD)
        outputs = (used_AK * loss_AK).sum(), used_AK.sum(), cross_entropy_AK, right_AK
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_AKD,) = ctx.saved_tensors
        return (grad_AKD * grad_loss).to(grad_AKD.dtype), *[None] * 7


def dpace_weights(cross_entropy_AK: Tensor, counts_AK: Tensor, alpha: float) -> Tensor:
    """Weight of each slot [A, K], 0 where it does not count.

    With the probability q of the data token, s = (1-alpha) q + alpha, and C_j the product of s over the counting slots up to j, slot k
    weighs the sum of C_j over the counting j >= k: what the expected length of the right prefix owes to it.
    """
    confidence_AK = torch.where(counts_AK, (1 - alpha) * (-cross_entropy_AK).exp() + alpha, 1.0)
    reach_AK = confidence_AK.cumprod(-1) * counts_AK
    return reach_AK.flip(-1).cumsum(-1).flip(-1) * counts_AK


class _ChunkMemory:
    """Matrices [C, V] that one chunk after another works in, C being its counting slots.

    Fresh ones per chunk would cost the kernel's zeroed pages each time: a tenth of the products.
    """

    def __init__(self, head_VD: Tensor, weights_AK: Tensor, chunk_bytes: int, num_matrices: int) -> None:
        self.head_VD, self.num_blocks, dtype = head_VD, len(weights_AK), weights_AK.dtype
        bytes_per_block = num_matrices * weights_AK.shape[1] * len(head_VD) * dtype.itemsize
        self.blocks_per_chunk = max(1, chunk_bytes // bytes_per_block)
        shape = min(self.blocks_per_chunk, self.num_blocks) * weights_AK.shape[1], len(head_VD)
        self._wide = [head_VD.new_empty(shape, dtype=dtype) for _ in range(num_matrices)]
        self._narrow = None if dtype == head_VD.dtype else head_VD.new_empty(shape)

    def chunks(self) -> Iterator[slice]:
        """Whole blocks, in order."""
        for first in range(0, self.num_blocks, self.blocks_per_chunk):
            yield slice(first, first + self.blocks_per_chunk)

    def matrices(self, num_rows: int) -> list[Tensor]:
        """The matrices in the dtype of the softmax."""
        return [matrix_CV[:num_rows] for matrix_CV in self._wide]

    def product(self, rows_CD: Tensor, out_CV: Tensor) -> Tensor:
        """Rows times head, in the head's dtype: in `out_CV` where that has it, else in a matrix that the next product takes."""
        if self._narrow is not None:
            out_CV = self._narrow[: len(rows_CD)]
        return torch.mm(rows_CD.to(self.head_VD.dtype), self.head_VD.T, out=out_CV)

    def back(self, gradient_CV: Tensor) -> Tensor:
        """Gradient of the rows from that of their logits, in the head's dtype."""
        if self._narrow is not None:
            gradient_CV = self._narrow[: len(gradient_CV)].copy_(gradient_CV)
        return gradient_CV @ self.head_VD


@dataclass(frozen=True)
class _Slots:
    """A chunk's figures; `gradient` may be called once: it gives the loss's by the logits as a matrix and a factor per row."""

    loss_C: Tensor
    cross_entropy_C: Tensor
    right_C: Tensor
    gradient: Callable[[], tuple[Tensor, Tensor]]


def _against_data(memory: _ChunkMemory, hidden_CD: Tensor, labels_C: Tensor) -> _Slots:
    (numerators_CV,) = memory.matrices(len(labels_C))
    cross_entropy_C, right_C, total_C = _cross_entropy_(numerators_CV, memory.product(hidden_CD, numerators_CV), labels_C)
    return _Slots(cross_entropy_C, cross_entropy_C, right_C, partial(_cross_entropy_gradient_, numerators_CV, total_C, labels_C))


def _against_teacher(
    memory: _ChunkMemory, hidden_CD: Tensor, labels_C: Tensor, head: TeacherHead, state_CD: Tensor, objective: Objective
) -> _Slots:
    ours_CV, teacher_CV, scratch_CV = memory.matrices(len(labels_C))
    cross_entropy_C, right_C = _log_softmax_(ours_CV, scratch_CV, memory.product(hidden_CD, ours_CV), labels_C)
    logits_CV = memory.product(head.normed(state_CD), teacher_CV)
    _log_softmax_(teacher_CV, scratch_CV, head.rescale_(teacher_CV.copy_(logits_CV)), labels_C)
    kl_C, tv_C = _distances_(ours_CV, teacher_CV, scratch_CV)
    share = objective.tv_share
    gradient = partial(_distance_gradient_, scratch_CV, teacher_CV, ours_CV, share)
    return _Slots(kl_C * (1 - share) + tv_C * share, cross_entropy_C, right_C, gradient)


def _hidden_gradient(memory: _ChunkMemory, slots: _Slots, weights_C: Tensor) -> Tensor:
    """Gradient of the weighted sum, with the factors per row applied on the small side."""
    gradient_CV, factor_C = slots.gradient()
    return memory.back(gradient_CV).to(weights_C.dtype).mul_((weights_C * factor_C)[:, None])


def _cross_entropy_(numerators_CV: Tensor, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, whether the label is the argmax, and the softmax's denominator; its numerators go where the logits may lie."""
    peak_C, label_C = _peak_and_label(numerators_CV.dtype, logits_CV, labels_C)
    total_C = torch.sub(logits_CV, peak_C[:, None], out=numerators_CV).exp_().sum(-1)
    return peak_C - label_C + total_C.log(), label_C == peak_C, total_C


def _cross_entropy_gradient_(numerators_CV: Tensor, total_C: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """softmax - one-hot, as a matrix in place of the numerators and a factor per row."""
    return numerators_CV.scatter_add_(1, labels_C[:, None], -total_C[:, None]), total_C.reciprocal()


def _log_softmax_(out_CV: Tensor, scratch_CV: Tensor, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and whether the label is the argmax; the logarithms of the probabilities go where the logits may lie."""
    peak_C, label_C = _peak_and_label(out_CV.dtype, logits_CV, labels_C)
    torch.sub(logits_CV, peak_C[:, None], out=out_CV)
    log_total_C = torch.exp(out_CV, out=scratch_CV).sum(-1).log()
    out_CV.sub_(log_total_C[:, None])
    return peak_C - label_C + log_total_C, label_C == peak_C


def _distances_(ours_CV: Tensor, teacher_CV: Tensor, difference_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || drafter) and total variation; logarithms turn into probabilities, and their difference is left."""
    torch.sub(teacher_CV, ours_CV, out=difference_CV)
    kl_C = difference_CV.mul_(teacher_CV.exp_()).sum(-1)
    torch.sub(ours_CV.exp_(), teacher_CV, out=difference_CV)
    return kl_C, torch.linalg.vector_norm(difference_CV, ord=1, dim=-1) / 2


def _distance_gradient_(difference_CV: Tensor, scratch_CV: Tensor, ours_CV: Tensor, tv_share: float) -> tuple[Tensor, Tensor]:
    """(1-x) (q-p) + x/2 q (sign(q-p) - sum of q sign(q-p)), in place of the difference q-p."""
    if tv_share == 0:
        return difference_CV, torch.ones_like(difference_CV[:, 0])
    signed_CV = torch.sign(difference_CV, out=scratch_CV).mul_(ours_CV)
    total_C = signed_CV.sum(-1)
    signed_CV.addcmul_(ours_CV, total_C[:, None], value=-1)
    return difference_CV.mul_(1 - tv_share).add_(signed_CV, alpha=tv_share / 2), torch.ones_like(total_C)


def _peak_and_label(dtype: torch.dtype, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    return logits_CV.amax(-1).to(dtype), logits_CV.gather(1, labels_C[:, None]).squeeze(1).to(dtype)
