"""The objective: a weighted loss of the block slots against the frozen head, without ever holding all logits.

In: the drafter's normed hidden states of the blocks, the target's output head, labels, weights and, for a loss against the target's own
distribution, its teacher states. Out: the unnormalised weighted sum, whose gradient the caller divides once per optimizer step by the
sum of weights over all packs and processes, and detached figures per slot for the log.

The head is frozen, so the gradient of a chunk's hidden states is complete as soon as its logits are known: it is computed in the
forward and the logits are dropped. The head costs two products instead of the three of a checkpointed loss (three instead of four with
a teacher), and memory is one chunk. Functions that end in _ change the matrices they are given.
Source: DFlash, arXiv 2602.06036 (position-weighted cross-entropy); D-PACE, arXiv 2605.18810 (weights that follow the drafter); the
gradient in the forward is the idea of Liger Kernel's fused linear cross-entropy, arXiv 2410.10989.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_train.target import TeacherHead

SLAB_BYTES = 1 << 20  # on a CPU: of a matrix in the softmax's dtype, so that a few of them lie in a core's cache


def head_chunk_bytes(setting: int | None, on_gpu: bool) -> int:
    """`train.head_chunk_bytes`, or what null means: enough rows to keep a device busy while it reads the head once per chunk."""
    return setting or (1 << 30 if on_gpu else 1 << 26)


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
    bounds what is held at once of the logits and of what is computed from them, in whole blocks and at least one.
    Head and teacher get no gradient. The objective decides whether there has to be a teacher.
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
        memory = _ChunkMemory(head_VD, used_AK, chunk_bytes, has_teacher=teacher is not None)
        # custom functions run under the caller's autocast, which would overrule the dtypes chosen here
        with torch.autocast(hidden_AKD.device.type, enabled=False):
            for chunk in memory.chunks():
                at = weights_AK[chunk].nonzero(as_tuple=True)
                hidden_CD, labels_C = hidden_AKD[chunk][at], labels_AK[chunk][at]
                if teacher is None:
                    slabs = _against_data(memory, hidden_CD, labels_C)
                else:
                    slabs = _against_teacher(memory, hidden_CD, labels_C, teacher.head, teacher.states(chunk, at), objective.tv_share)
                slots = _Slots.of(slabs, used_AK)
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
    """Matrices [C, V] in the head's dtype that one chunk after another works in, C being its counting slots; the first holds the drafter's
    logits and then their gradient. Softmax and loss go through them slab by slab, in `scratch` [rows, V] of a wider dtype.

    Fresh memory per chunk would cost the kernel's zeroed pages each time, and on a CPU a slab stays in the cache, where a chunk would
    travel to memory and back for every operation on it.
    """

    def __init__(self, head_VD: Tensor, weights_AK: Tensor, chunk_bytes: int, has_teacher: bool) -> None:
        (self.num_blocks, block_size), vocab, wide = weights_AK.shape, len(head_VD), weights_AK.dtype
        num_matrices, num_scratch = (2, 3) if has_teacher else (1, 1)
        in_slabs = head_VD.device.type == "cpu"
        bytes_per_logit = num_matrices * head_VD.itemsize + (0 if in_slabs else num_scratch * wide.itemsize)
        self.blocks_per_chunk = max(1, chunk_bytes // (bytes_per_logit * block_size * vocab))
        num_rows = min(self.blocks_per_chunk, self.num_blocks) * block_size
        self.rows_per_slab = max(1, SLAB_BYTES // (vocab * wide.itemsize) if in_slabs else num_rows)
        self.head_VD = head_VD
        self.matrices = [head_VD.new_empty(num_rows, vocab) for _ in range(num_matrices)]
        self.scratch = [head_VD.new_empty(min(self.rows_per_slab, num_rows), vocab, dtype=wide) for _ in range(num_scratch)]

    def chunks(self) -> Iterator[slice]:
        """Whole blocks, in order."""
        for first in range(0, self.num_blocks, self.blocks_per_chunk):
            yield slice(first, first + self.blocks_per_chunk)

    def product(self, rows_CD: Tensor, matrix: int) -> Tensor:
        """Rows times head, [C, V] in a matrix."""
        return torch.mm(rows_CD.to(self.head_VD.dtype), self.head_VD.T, out=self.matrices[matrix][: len(rows_CD)])

    def slabs(self, labels_C: Tensor) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """The labels of a few rows after another, these rows of the matrices, and scratch for them."""
        for first in range(0, len(labels_C), self.rows_per_slab):
            labels_S = labels_C[first : first + self.rows_per_slab]
            rows = slice(first, first + len(labels_S))
            yield labels_S, [matrix[rows] for matrix in self.matrices], [scratch[: len(labels_S)] for scratch in self.scratch]


@dataclass(frozen=True)
class _Slots:
    """A chunk's figures; the gradient of its logits is `factor_C` times the first matrix."""

    loss_C: Tensor
    cross_entropy_C: Tensor
    right_C: Tensor
    factor_C: Tensor

    @classmethod
    def of(cls, slabs: list[tuple[Tensor, ...]], like_C: Tensor) -> "_Slots":
        """Joins the figures of a chunk's slabs."""
        empty = like_C.new_empty(0)
        return cls(*map(torch.cat, zip(*slabs, strict=True))) if slabs else cls(empty, empty, empty.bool(), empty)


def _against_data(memory: _ChunkMemory, hidden_CD: Tensor, labels_C: Tensor) -> list[tuple[Tensor, ...]]:
    memory.product(hidden_CD, 0)
    figures = []
    for labels_S, (logits_SV,), (wide_SV,) in memory.slabs(labels_C):
        cross_entropy_S, right_S, total_S = _cross_entropy_(wide_SV.copy_(logits_SV), labels_S)
        logits_SV.copy_(wide_SV)
        figures.append((cross_entropy_S, cross_entropy_S, right_S, total_S.reciprocal()))
    return figures


def _against_teacher(
    memory: _ChunkMemory, hidden_CD: Tensor, labels_C: Tensor, head: TeacherHead, state_CD: Tensor, tv_share: float
) -> list[tuple[Tensor, ...]]:
    memory.product(hidden_CD, 0)
    memory.product(head.normed(state_CD), 1)
    figures = []
    for labels_S, (logits_SV, teachers_SV), (ours_SV, teacher_SV, scratch_SV) in memory.slabs(labels_C):
        cross_entropy_S, right_S = _log_softmax_(ours_SV.copy_(logits_SV), scratch_SV, labels_S)
        _log_softmax_(head.rescale_(teacher_SV.copy_(teachers_SV)), scratch_SV, labels_S)
        kl_S, tv_S = _distances_(ours_SV, teacher_SV, scratch_SV)
        logits_SV.copy_(_distance_gradient_(scratch_SV, teacher_SV, ours_SV, tv_share))
        figures.append((kl_S * (1 - tv_share) + tv_S * tv_share, cross_entropy_S, right_S, torch.ones_like(kl_S)))
    return figures


def _hidden_gradient(memory: _ChunkMemory, slots: _Slots, weights_C: Tensor) -> Tensor:
    """Gradient of the weighted sum, with the factors per row applied on the small side."""
    grad_CD = memory.matrices[0][: len(weights_C)] @ memory.head_VD
    return grad_CD.to(weights_C.dtype).mul_((weights_C * slots.factor_C)[:, None])


def _cross_entropy_(logits_SV: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, whether the label is the argmax, and the softmax's denominator, times which the logits become their gradient."""
    peak_S, label_S = _peak_and_label(logits_SV, labels_S)
    total_S = logits_SV.sub_(peak_S[:, None]).exp_().sum(-1)
    logits_SV.scatter_add_(1, labels_S[:, None], -total_S[:, None])
    return peak_S - label_S + total_S.log(), label_S == peak_S, total_S


def _log_softmax_(logits_SV: Tensor, scratch_SV: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and whether the label is the argmax; the logits become logarithms of probabilities."""
    peak_S, label_S = _peak_and_label(logits_SV, labels_S)
    logits_SV.sub_(peak_S[:, None])
    log_total_S = torch.exp(logits_SV, out=scratch_SV).sum(-1).log()
    logits_SV.sub_(log_total_S[:, None])
    return peak_S - label_S + log_total_S, label_S == peak_S


def _distances_(ours_SV: Tensor, teacher_SV: Tensor, difference_SV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || drafter) and total variation; logarithms turn into probabilities, and their difference is left."""
    torch.sub(teacher_SV, ours_SV, out=difference_SV)
    kl_S = difference_SV.mul_(teacher_SV.exp_()).sum(-1)
    torch.sub(ours_SV.exp_(), teacher_SV, out=difference_SV)
    return kl_S, torch.linalg.vector_norm(difference_SV, ord=1, dim=-1) / 2


def _distance_gradient_(difference_SV: Tensor, scratch_SV: Tensor, ours_SV: Tensor, tv_share: float) -> Tensor:
    """(1-x) (q-p) + x/2 q (sign(q-p) - sum of q sign(q-p)), in place of the difference q-p."""
    if tv_share == 0:
        return difference_SV
    signed_SV = torch.sign(difference_SV, out=scratch_SV).mul_(ours_SV)
    signed_SV.addcmul_(ours_SV, signed_SV.sum(-1)[:, None], value=-1)
    return difference_SV.mul_(1 - tv_share).add_(signed_SV, alpha=tv_share / 2)


def _peak_and_label(logits_SV: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
    return logits_SV.amax(-1), logits_SV.gather(1, labels_S[:, None]).squeeze(1)
