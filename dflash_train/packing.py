"""Which samples meet in which optimizer step: a pure function of the samples, the settings, the seed and the epoch.

In: the references of the training samples in shard order. Out: an epoch as steps -> packs -> samples. A **pack** is what one forward
and backward sees, whole documents behind one another; a **step** is a fixed list of packs, whatever the number of processes: process r
of W takes packs r, r+W, ... Nothing here reads a feature or holds random state, so any process can compute any epoch at any time.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
import xxhash

from dflash_train.features.reader import SampleRef

Pack = list[SampleRef]


def usable(refs: Sequence[SampleRef]) -> list[SampleRef]:
    """The samples that can hold a block: an anchor and a token after it, both supervised."""
    return [ref for ref in refs if ref.num_supervised >= 2]


def plan_steps(
    refs: Sequence[SampleRef], seed: int, epoch: int, tokens_per_step: int, tokens_per_pack: int, shuffle_shards: int
) -> list[list[Pack]]:
    """The steps of one epoch; every sample of `refs` is in exactly one pack.

    A pack holds at most `tokens_per_pack` context tokens, or one longer document. A step ends where its tokens come nearest to
    `tokens_per_step`; the last one takes what is left, so it may be small.
    """
    packs = _packs(_shuffled(refs, random.Random(f"{seed}/{epoch}"), shuffle_shards), tokens_per_pack)
    steps: list[list[Pack]] = []
    tokens_in_step = tokens_per_step
    for pack in packs:
        num_tokens = sum(ref.num_tokens for ref in pack)
        if tokens_in_step + num_tokens / 2 > tokens_per_step:
            steps.append([])
            tokens_in_step = 0
        steps[-1].append(pack)
        tokens_in_step += num_tokens
    return steps


@dataclass(frozen=True)
class Step:
    """One optimizer step of a run."""

    epoch: int
    packs: list[Pack]


@dataclass(frozen=True)
class RunPlan:
    """Every step of a run, epoch after epoch without end. The fields are the arguments of `plan_steps`."""

    refs: Sequence[SampleRef]
    seed: int
    tokens_per_step: int
    tokens_per_pack: int
    shuffle_shards: int

    def epoch(self, epoch: int) -> list[list[Pack]]:
        """The steps of one epoch."""
        return plan_steps(self.refs, self.seed, epoch, self.tokens_per_step, self.tokens_per_pack, self.shuffle_shards)

    def steps(self, first: int, stop: int) -> Iterator[Step]:
        """Steps `first` to `stop` - 1 of the run."""
        return islice((Step(epoch, packs) for epoch in count() for packs in self.epoch(epoch)), first, stop)

    def num_steps(self, epochs: float) -> int:
        """Optimizer steps in `epochs` passes over the samples; at least one."""
        whole = int(epochs)
        num_whole = sum(len(self.epoch(epoch)) for epoch in range(whole))
        part = epochs - whole
        return max(1, num_whole + round(part * len(self.epoch(whole)) if part else 0))


def packs_of_rank(packs: Sequence[Pack], rank: int, world_size: int) -> list[Pack]:
    """Packs rank, rank + world_size, ...; a rank that is short of one gets an empty one, so that all run equally many backwards."""
    rounds = -(-len(packs) // world_size)
    return [packs[i] if i < len(packs) else [] for i in range(rank, rounds * world_size, world_size)]


def sample_generator(seed: int, epoch: int, sample_id: str) -> torch.Generator:
    """The source of every draw for one sample in one epoch, the same on any process, in any order of work."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{sample_id}".encode()))


def _shuffled(refs: Sequence[SampleRef], generator: random.Random, shuffle_shards: int) -> Iterator[SampleRef]:
    """Shards in random order; the samples of `shuffle_shards` neighbouring ones in random order, so that reading stays local."""
    by_shard: dict[str, list[SampleRef]] = {}
    for ref in refs:
        by_shard.setdefault(ref.shard, []).append(ref)
    shards = list(by_shard)
    generator.shuffle(shards)
    for first in range(0, len(shards), shuffle_shards):
        window = [ref for shard in shards[first : first + shuffle_shards] for ref in by_shard[shard]]
        generator.shuffle(window)
        yield from window


def _packs(refs: Iterator[SampleRef], tokens_per_pack: int) -> Iterator[Pack]:
    pack: Pack = []
    num_tokens = 0
    for ref in refs:
        if pack and num_tokens + ref.num_tokens > tokens_per_pack:
            yield pack
            pack, num_tokens = [], 0
        pack.append(ref)
        num_tokens += ref.num_tokens
    if pack:
        yield pack
