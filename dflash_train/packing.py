"""Which samples meet in which optimizer step: a pure function of the samples, the settings, the seed and the epoch.

In: the references of the training samples in shard order. Out: an epoch as steps -> packs -> samples. A **pack** is what one forward
and backward sees, whole documents behind one another; a **step** is a fixed list of packs, whatever the number of processes: process r
of W takes packs r, r+W, ... Nothing here reads a feature or holds random state, so any process can compute any epoch at any time.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice

from dflash_train.features.reader import SampleRef

Pack = list[SampleRef]


def usable(refs: Sequence[SampleRef]) -> list[SampleRef]:
    """The samples that can hold a block: an anchor and a token after it, both supervised."""
    return [ref for ref in refs if ref.num_supervised >= 2]


def plan_steps(
    refs: Sequence[SampleRef], seed: int, epoch: int, tokens_per_step: int, tokens_per_pack: int, shuffle_shards: int
) -> list[list[Pack]]:
    """The steps of one epoch; every sample of `refs` is in exactly one pack.

    A pack holds at most `tokens_per_pack` context tokens, or one longer document, all of the same `shuffle_shards` shards. A step ends
    where its tokens come nearest to `tokens_per_step`; the last one takes what is left, so it may be small.
    """
    steps: list[list[Pack]] = []
    tokens_in_step = tokens_per_step
    for pack in _shuffled_packs(refs, random.Random(f"{seed}/{epoch}"), tokens_per_pack, shuffle_shards):
        num_tokens = _num_tokens(pack)
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


def pack_fill(packs: Sequence[Pack], tokens_per_pack: int) -> float:
    """Context tokens of `packs` per token that they have room for; a longer document than `tokens_per_pack` counts with all its tokens."""
    return sum(map(_num_tokens, packs)) / (len(packs) * tokens_per_pack)


@dataclass
class Coverage:
    """How many eligible positions have been an anchor, from the plan alone: nothing is remembered that a resumed run could not add up.

    `num_eligible` holds the eligible positions of every training sample. Exact, because `draw_anchors` takes every position of a sample
    once before any twice, and every sample comes once per epoch.
    """

    num_eligible: Mapping[SampleRef, int]
    anchors_per_document: int
    num_covered: int = 0

    def add(self, steps: Iterable[Step]) -> None:
        """Counts the positions that are an anchor for the first time in `steps`, which follow on those added before."""
        for step in steps:
            before = step.epoch * self.anchors_per_document
            for ref in chain.from_iterable(step.packs):
                self.num_covered += min(max(self.num_eligible[ref] - before, 0), self.anchors_per_document)

    @property
    def share(self) -> float:
        """Share of the eligible positions of all samples, 0 to 1; 1 when there is none."""
        return self.num_covered / self.num_positions if self.num_positions else 1.0

    @cached_property
    def num_positions(self) -> int:
        """Eligible positions of all samples."""
        return sum(self.num_eligible.values())


def _shuffled_packs(refs: Sequence[SampleRef], generator: random.Random, tokens_per_pack: int, shuffle_shards: int) -> Iterator[Pack]:
    """Shards in random order; the samples of `shuffle_shards` neighbouring ones packed in random order, so that reading stays local."""
    by_shard: dict[str, list[SampleRef]] = {}
    for ref in refs:
        by_shard.setdefault(ref.shard, []).append(ref)
    shards = list(by_shard)
    generator.shuffle(shards)
    for first in range(0, len(shards), shuffle_shards):
        window = [ref for shard in shards[first : first + shuffle_shards] for ref in by_shard[shard]]
        generator.shuffle(window)
        packs = _best_fit(window, tokens_per_pack)
        generator.shuffle(packs)  # those begun last are the emptiest and hold the longest documents
        yield from packs


def _best_fit(refs: Sequence[SampleRef], tokens_per_pack: int) -> list[Pack]:
    """Every sample goes into the fullest pack that has room for it, in the order of `refs`.

    Longest first would fill a little better, and put the same documents together in every epoch of a small dataset.
    """
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # ascending: tokens left, index of the pack
    for ref in refs:
        found = bisect_left(room, (ref.num_tokens, 0))
        if found < len(room):
            tokens_left, index = room.pop(found)
        else:
            tokens_left, index = tokens_per_pack, len(packs)
            packs.append([])
        packs[index].append(ref)
        insort(room, (tokens_left - ref.num_tokens, index))
    return packs


def _num_tokens(pack: Pack) -> int:
    return sum(ref.num_tokens for ref in pack)
