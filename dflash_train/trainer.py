"""One optimizer step and one held-out evaluation, on any number of processes.

A step adds the gradients of the unnormalised weighted sums of all packs of all processes, and divides them once by the sum of weights
over all of them: the loss of a step is a mean over its weights, whichever pack or process a block is in. DDP averages over processes,
which is undone here; `Accelerator.backward` is not used, because it divides as well.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from dflash_train.acceptance import anchor_counts, anchor_tau, replay, summarize
from dflash_train.blocks import Blocks
from dflash_train.drafter import DFlashDraftModel
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.launch import StopRequest
from dflash_train.loss import CROSS_ENTROPY, LossResult, Objective, Teacher, weighted_loss
from dflash_train.optimizer import DrafterOptimizer
from dflash_train.packing import Step, packs_of_rank
from dflash_train.target import TargetEnds, TeacherHead
from dflash_train.training_data import TrainingPack

_Pack = TypeVar("_Pack")


@dataclass(frozen=True)
class StepFigures:
    """What a step did, over all processes. `loss` and `grad_norm` (before clipping) are None when it was skipped."""

    loss: float | None
    grad_norm: float | None
    num_tokens: int
    num_blocks: int
    # of the step's blocks that lie wholly inside the supervision: mean right prefix + 1, share whose right prefix reaches slot 1 to K-1
    train_anchor_tau: float | None
    train_acceptance_by_position: list[float | None]
    is_finite: bool = True  # False: the step was skipped because of its loss or gradient
    stop_asked: bool = False  # a process was asked to stop after this step


@dataclass(frozen=True)
class Trainer:
    """A drafter and its optimizer on this process; `model` is `drafter` as Accelerate wraps it.

    With `ema`, the held-out evaluation measures the moving average. An objective with a teacher needs `teacher_head`. Any process's
    `stop` is heard by all of them.
    """

    accelerator: Accelerator
    drafter: DFlashDraftModel
    model: nn.Module
    optimizer: DrafterOptimizer
    ends: TargetEnds
    max_grad_norm: float
    head_chunk_bytes: int
    ema: Ema | None = None
    teacher_head: TeacherHead | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    def take_step(
        self,
        number: int,
        step: Step,
        packs: Iterator[TrainingPack],
        lr: float,
        objective: Objective = CROSS_ENTROPY,
    ) -> StepFigures:
        """Takes this process's packs of `step` and updates the weights once.

        A step in which no slot counts leaves weights, optimizer and average alone. So does one whose loss or gradient is not finite, with
        a warning.
        """
        self.optimizer.zero_grad()
        num_packs = len(packs_of_rank(step.packs, self.accelerator.process_index, self.accelerator.num_processes))
        try:
            totals, stop_asked = accumulate(self.accelerator, self.model, packs, num_packs, partial(self._loss, objective), self.stop)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"step {number}: out of memory on {self.accelerator.device}: run again with a smaller train.tokens_per_pack, "
                "train.anchors_per_document or train.head_chunk_bytes"
            ) from error
        weight_sum, loss_sum, num_tokens, num_blocks, num_whole, *reached = totals.tolist()
        counts = {"num_tokens": int(num_tokens), "num_blocks": int(num_blocks)}
        counts["train_anchor_tau"] = 1 + sum(reached) / num_whole if num_whole else None
        counts["train_acceptance_by_position"] = [num / num_whole if num_whole else None for num in reached]
        counts["stop_asked"] = stop_asked
        if weight_sum == 0:
            return StepFigures(loss=None, grad_norm=None, **counts)
        divide_gradients(self.accelerator, self.model, weight_sum)
        grad_norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        loss = loss_sum / weight_sum
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            if self.accelerator.is_main_process:
                what = f"step {number} is skipped: loss={loss}, gradient norm={grad_norm}; samples of the step: {_sample_ids(step)}"
                print(f"warning: {what}", file=sys.stderr, flush=True)
            return StepFigures(loss=None, grad_norm=None, is_finite=False, **counts)
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(number - 1)
        return StepFigures(loss=loss, grad_norm=grad_norm, **counts)

    def evaluate(self, dataset: FeatureDataset, refs: Sequence[SampleRef], tokens_per_pack: int, seed: int) -> dict[str, Any]:
        """Acceptance of the drafter on the samples `refs`, each walked by one process; `acceptance.summarize` and `anchor_tau`.

        The figures are made of all walks and counts together, so they do not depend on the number of processes.
        """
        share = refs[self.accelerator.process_index :: self.accelerator.num_processes]
        shape = {"block_size": self.drafter.block_size, "mask_token_id": self.drafter.mask_token_id, "tokens_per_pack": tokens_per_pack}
        read = partial(dataset.read, device=self.accelerator.device)
        with self.ema.swapped() if self.ema else nullcontext(), self.accelerator.autocast():
            walks = replay(self.drafter, self.ends, map(read, share), **shape)
            counts = anchor_counts(self.drafter, self.ends, map(read, share), **shape, seed=seed)
        order = {ref.sample_id: i for i, ref in enumerate(refs)}
        walks = sorted(gather_object(walks), key=lambda walk: order[walk.sample_id])
        return summarize(walks, self.drafter.block_size, seed) | {"anchor_tau": anchor_tau(gather_object([counts]))}

    def _loss(self, objective: Objective, pack: TrainingPack) -> tuple[Tensor, Tensor]:
        embeddings_AKD = F.embedding(pack.blocks.input_ids_AK, self.ends.embedding_VD).to(self.drafter.dtype)
        hidden_AKD = self.model(pack.features_TLD, pack.context, embeddings_AKD, pack.blocks)
        labels_AK, weights_AK = pack.blocks.labels_AK, pack.blocks.weights_AK
        teacher = None if objective.tv_share is None else self._teacher(pack)
        result = weighted_loss(hidden_AKD, self.ends.head_VD, labels_AK, weights_AK, self.head_chunk_bytes, objective, teacher)
        return result.loss_sum, _pack_totals(result, pack.blocks, num_tokens=len(pack.features_TLD))

    def _teacher(self, pack: TrainingPack) -> Teacher:
        """Of slot k, which predicts the token at a+k, it is the state at a+k-1 that speaks."""
        slots = torch.arange(pack.blocks.block_size, device=pack.blocks.row_A.device)
        return Teacher(pack.teacher_state_TD, pack.blocks.row_A[:, None] + slots - 1, self.teacher_head)


def accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    packs: Iterator[_Pack],
    num_packs: int,
    loss: Callable[[_Pack], tuple[Tensor, Tensor]],
    stop: StopRequest,
) -> tuple[Tensor, bool]:
    """Adds the gradients of `num_packs` packs, and the totals that `loss` returns beside its sum, over all processes.

    Also tells whether `stop` came to any of them. Gradients are exchanged in the last backward only, so every process has to pass the
    same `num_packs`.
    """
    totals = []
    for i in range(num_packs):
        with accelerator.no_sync(model) if i < num_packs - 1 else nullcontext():
            loss_sum, pack_totals = loss(next(packs))
            loss_sum.backward()
        totals.append(pack_totals)
    own = torch.stack(totals).sum(0)
    summed = accelerator.reduce(torch.cat([own, own.new_tensor([float(stop.came)])]), "sum")
    return summed[:-1], bool(summed[-1])


def divide_gradients(accelerator: Accelerator, model: nn.Module, weight_sum: float) -> None:
    """Turns the gradients, which DDP averaged over processes, into those of the sum divided by `weight_sum`."""
    torch._foreach_mul_([p.grad for p in model.parameters()], accelerator.num_processes / weight_sum)


def _pack_totals(result: LossResult, blocks: Blocks, num_tokens: int) -> Tensor:
    """[5 + K-1] float64: weights, weighted loss, tokens, blocks, blocks wholly inside the supervision, those right up to each slot."""
    whole_A = (blocks.weights_AK[:, 1:] > 0).all(-1)
    reached_K = (result.right_AK[:, 1:].cumprod(-1) * whole_A[:, None]).sum(0)
    counts = whole_A.new_tensor([num_tokens, len(whole_A)], dtype=torch.float64)
    figures = [result.weight_sum, result.loss_sum.detach(), *counts, whole_A.sum(), *reached_K]
    return torch.stack([figure.double() for figure in figures])


def _sample_ids(step: Step, num_shown: int = 8) -> str:
    ids = [ref.sample_id for pack in step.packs for ref in pack]
    more = f" and {len(ids) - num_shown} more" if len(ids) > num_shown else ""
    return ", ".join(ids[:num_shown]) + more
