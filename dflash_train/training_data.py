"""Packs as tensors, read and drawn ahead of the training step.

In: a feature dataset and the plan of the run. Out: the packs of one process in order, each with its blocks, on the device that trains.
Reading and drawing happen in threads: a read does not hold Python's lock, so nothing has to be forked or copied between processes. Every
draw is a function of (seed, epoch, sample), so it does not matter which thread draws when.
"""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.blocks import Blocks, Context, build_blocks, draw_anchors
from dflash_train.features.reader import EncodedFeatures, FeatureDataset
from dflash_train.packing import Pack, Step, packs_of_rank


@dataclass
class TrainingPack:
    """What one forward and backward sees; it may hold no document at all."""

    features_TLD: Tensor
    context: Context
    blocks: Blocks
    teacher_state_TD: Tensor | None = None


@dataclass(frozen=True)
class EncodedPack:
    """A pack on the CPU, its features as they are stored."""

    features: EncodedFeatures
    context: Context
    blocks: Blocks
    teacher_state_TD: Tensor | None

    def to(self, device: torch.device | str) -> TrainingPack:
        """The pack on `device`, where its features are decoded to bf16."""
        state_TD = self.teacher_state_TD
        if state_TD is not None:
            state_TD = state_TD.to(device, non_blocking=True)
        return TrainingPack(self.features.to(device).decode(), self.context.to(device), self.blocks.to(device), state_TD)


@dataclass(frozen=True)
class PackReader:
    """Turns (epoch, pack) into tensors; `device` is where they are going to be needed."""

    dataset: FeatureDataset
    device: torch.device
    seed: int
    anchors_per_document: int
    block_size: int
    mask_token_id: int
    gamma: float | None
    teacher_state: bool = False  # whether packs carry teacher states

    def read(self, epoch: int, refs: Pack) -> EncodedPack:
        """Reads the samples and draws their blocks. Raises UserError for an unreadable sample or one that contains the mask token."""
        samples = self.dataset.read_encoded(refs, self.device.type == "cuda", self.teacher_state)
        lengths = [ref.num_tokens for ref in refs]
        documents = list(zip(samples.input_ids_T.split(lengths), samples.loss_mask_T.split(lengths), strict=True))
        anchors = [
            draw_anchors(loss_mask_T, self.anchors_per_document, self.seed, epoch, ref.sample_id)
            for ref, (_, loss_mask_T) in zip(refs, documents, strict=True)
        ]
        context, blocks = build_blocks(documents, anchors, self.block_size, self.mask_token_id, self.gamma)
        return EncodedPack(samples.features, context, blocks, samples.teacher_state_TD)


def load_packs(
    reader: PackReader, steps: Iterable[Step], rank: int, world_size: int, num_workers: int
) -> Generator[TrainingPack, None, None]:
    """The packs of process `rank` in the order of `steps`; `num_workers` threads read as many packs ahead (0: read when asked for).

    Raises UserError where `PackReader.read` does. Closing it ends the threads.
    """
    keys = ((step.epoch, pack) for step in steps for pack in packs_of_rank(step.packs, rank, world_size))
    if num_workers == 0:
        for key in keys:
            yield reader.read(*key).to(reader.device)
        return
    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="pack-reader")
    pending: deque[Future[EncodedPack]] = deque()
    try:
        for key in keys:
            pending.append(executor.submit(reader.read, *key))
            if len(pending) > num_workers:
                yield pending.popleft().result().to(reader.device)
        while pending:
            yield pending.popleft().result().to(reader.device)
    finally:
        executor.shutdown(cancel_futures=True)
