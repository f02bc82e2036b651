"""Packs as tensors, read and drawn ahead of the training step.

In: a feature dataset and the plan of the run. Out: the packs of one process in order, each with its blocks. Reading and drawing happen
in loader workers; every draw comes from a generator seeded by (seed, epoch, sample), so it does not matter which worker draws when.
"""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dflash_train.blocks import Blocks, Context, build_blocks, draw_anchors
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset
from dflash_train.packing import Pack, Step, packs_of_rank, sample_generator


@dataclass
class TrainingPack:
    """What one forward and backward sees; it may hold no document at all."""

    features_TLD: Tensor
    context: Context
    blocks: Blocks

    def to(self, device: torch.device | str) -> "TrainingPack":
        """The same pack on `device`."""
        return TrainingPack(self.features_TLD.to(device, non_blocking=True), self.context.to(device), self.blocks.to(device))


@dataclass(frozen=True)
class PackReader(Dataset[TrainingPack | UserError]):
    """Turns (epoch, pack) into tensors on the CPU."""

    dataset: FeatureDataset
    seed: int
    anchors_per_document: int
    block_size: int
    mask_token_id: int
    gamma: float | None

    def __getitem__(self, key: tuple[int, Pack]) -> TrainingPack | UserError:
        # returned instead of raised: what a loader worker raises arrives as the text of its traceback
        try:
            return self.read(*key)
        except UserError as error:
            return error

    def read(self, epoch: int, refs: Pack) -> TrainingPack:
        """Reads the samples and draws their blocks. Raises UserError for an unreadable sample or one that contains the mask token."""
        samples = [self.dataset.read(ref) for ref in refs]
        anchors = [
            draw_anchors(sample.loss_mask_T, self.anchors_per_document, sample_generator(self.seed, epoch, sample.sample_id))
            for sample in samples
        ]
        documents = [(sample.input_ids_T, sample.loss_mask_T) for sample in samples]
        context, blocks = build_blocks(documents, anchors, self.block_size, self.mask_token_id, self.gamma)
        contract = self.dataset.contract
        no_features = torch.empty(0, len(contract.layer_ids.ids), contract.hidden_size, dtype=torch.bfloat16)
        return TrainingPack(torch.cat([no_features, *(sample.features_TLD for sample in samples)]), context, blocks)


def load_packs(reader: PackReader, steps: Iterable[Step], rank: int, world_size: int, num_workers: int) -> Iterator[TrainingPack]:
    """The packs of process `rank` in the order of `steps`, read ahead by `num_workers` processes (0: read when asked for).

    Raises UserError where `PackReader.read` does.
    """
    keys = ((step.epoch, pack) for step in steps for pack in packs_of_rank(step.packs, rank, world_size))
    # the loader accepts any iterable of keys as a sampler; only its type annotation asks for a length
    for pack in DataLoader(reader, batch_size=None, sampler=cast(Sized, keys), num_workers=num_workers):
        if isinstance(pack, UserError):
            raise pack
        yield pack
