"""One optimizer step and one held-out evaluation, on any number of processes.

A step adds the gradients of the unnormalised weighted sums of all packs of all processes, and divides them once by the sum of weights
over all of them: the loss of a step is a mean over its weights, whichever pack or process a block is in. DDP averages over processes,
which is undone here; `Accelerator.backward` is not used, because it divides as well.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from dflash_train.acceptance import anchor_tau, replay, summarize
from dflash_train.blocks import Blocks
from dflash_train.drafter import DFlashDraftModel
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.loss import LossResult, weighted_cross_entropy
from dflash_train.optimizer import set_lr
from dflash_train.packing import Step, packs_of_rank
from dflash_train.target import TargetEnds
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


@dataclass(frozen=True)
class Trainer:
    """A drafter and its optimizer on this process; `model` is `drafter` as Accelerate wraps it."""

    accelerator: Accelerator
    drafter: DFlashDraftModel
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ends: TargetEnds
    max_grad_norm: float
    head_chunk_bytes: int

    def take_step(self, number: int, step: Step, packs: Iterator[TrainingPack], lr: float) -> StepFigures:
        """Takes this process's packs of `step` and updates the weights once.

        A step in which no slot counts leaves weights and optimizer alone. Raises UserError when loss or gradient are not finite.
        """
        self.optimizer.zero_grad()
        num_packs = len(packs_of_rank(step.packs, self.accelerator.process_index, self.accelerator.num_processes))
        try:
            totals = accumulate(self.accelerator, self.model, packs, num_packs, self._loss)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"step {number}: out of memory on {self.accelerator.device}: run again with a smaller train.tokens_per_pack, "
                "train.anchors_per_document or train.head_chunk_bytes"
            ) from error
        weight_sum, loss_sum, num_tokens, num_blocks, num_whole, *reached = totals.tolist()
        counts = {"num_tokens": int(num_tokens), "num_blocks": int(num_blocks)}
        counts["train_anchor_tau"] = 1 + sum(reached) / num_whole if num_whole else None
        counts["train_acceptance_by_position"] = [num / num_whole if num_whole else None for num in reached]
        if weight_sum == 0:
            return StepFigures(loss=None, grad_norm=None, **counts)
        divide_gradients(self.accelerator, self.model, weight_sum)
        grad_norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        loss = loss_sum / weight_sum
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UserError(f"step {number}: loss={loss}, gradient norm={grad_norm}; samples of the step: {_sample_ids(step)}")
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        return StepFigures(loss=loss, grad_norm=grad_norm, **counts)

    def evaluate(self, dataset: FeatureDataset, refs: Sequence[SampleRef], tokens_per_pack: int, seed: int) -> dict[str, Any]:
        """Acceptance of the drafter on the samples `refs`, each walked by one process; `acceptance.summarize` and `anchor_tau`.

        `anchor_tau` is the mean of the processes' own figures.
        """
        share = refs[self.accelerator.process_index :: self.accelerator.num_processes]
        shape = {"block_size": self.drafter.block_size, "mask_token_id": self.drafter.mask_token_id, "tokens_per_pack": tokens_per_pack}
        read = partial(dataset.read, device=self.accelerator.device)
        with self.accelerator.autocast():
            walks = replay(self.drafter, self.ends, map(read, share), **shape)
            estimate = anchor_tau(self.drafter, self.ends, map(read, share), **shape, seed=seed)
        order = {ref.sample_id: i for i, ref in enumerate(refs)}
        walks = sorted(gather_object(walks), key=lambda walk: order[walk.sample_id])
        estimates = [value for value in gather_object([estimate]) if value is not None]
        figures = summarize(walks, self.drafter.block_size, seed)
        return figures | {"anchor_tau": sum(estimates) / len(estimates) if estimates else None}

    def _loss(self, pack: TrainingPack) -> tuple[Tensor, Tensor]:
        embeddings_AKD = F.embedding(pack.blocks.input_ids_AK, self.ends.embedding_VD).to(self.drafter.dtype)
        hidden_AKD = self.model(pack.features_TLD, pack.context, embeddings_AKD, pack.blocks)
        result = weighted_cross_entropy(hidden_AKD, self.ends.head_VD, pack.blocks.labels_AK, pack.blocks.weights_AK, self.head_chunk_bytes)
        return result.loss_sum, _pack_totals(result, pack.blocks, num_tokens=len(pack.features_TLD))


def accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    packs: Iterator[_Pack],
    num_packs: int,
    loss: Callable[[_Pack], tuple[Tensor, Tensor]],
) -> Tensor:
    """Adds the gradients of `num_packs` packs, and the totals that `loss` returns beside its sum, over all processes.

    Gradients are exchanged in the last backward only, so every process has to pass the same `num_packs`.
    """
    totals = []
    for i in range(num_packs):
        with accelerator.no_sync(model) if i < num_packs - 1 else nullcontext():
            loss_sum, pack_totals = loss(next(packs))
            loss_sum.backward()
        totals.append(pack_totals)
    return accelerator.reduce(torch.stack(totals).sum(0), "sum")


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
