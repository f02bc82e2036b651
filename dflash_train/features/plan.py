"""Decides, before anything runs, which samples make which shard and which of them share a forward pass.

Comes in: the samples' lengths in tokens and three settings. Goes out: a `Plan`, a function of these alone, so that any process of any
launch finds the same one. Samples are dealt to shards at random: shard after shard is a shuffled reading order. Inside a shard they run
longest first, so rows of one forward are about equally long and little of it is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import xxhash


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its file name, and its samples (indices into the prepared samples) forward by forward, longest first."""

    name: str
    batches: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """All sample indices in the order in which they lie in the shard."""
        return tuple(chain.from_iterable(self.batches))


@dataclass(frozen=True)
class Plan:
    """All shards of a dataset. `lengths` holds the tokens of every sample."""

    lengths: tuple[int, ...]
    shards: tuple[ShardPlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that hold no token."""
        computed = sum(len(batch) * self.lengths[batch[0]] for shard in self.shards for batch in shard.batches)
        return 1 - self.num_tokens / computed

    def shard_tokens(self, shard: ShardPlan) -> int:
        """Tokens in `shard`, without padding."""
        return sum(self.lengths[sample] for sample in shard.samples)


def make_plan(lengths: Sequence[int], seed: int, shard_tokens: int, tokens_per_forward: int) -> Plan:
    """Plans shards of nearly equal size, `shard_tokens` tokens each at most up to one sample, and their forwards.

    A forward computes at most `tokens_per_forward` positions, padding included; a longer sample runs alone. Only `tokens_per_forward`
    may change without moving a sample to another place.
    """
    order = sorted(range(len(lengths)), key=lambda sample: xxhash.xxh3_64_intdigest(f"{seed}:{sample}".encode()))
    groups = _cut_evenly(order, lengths, shard_tokens)
    shards = (ShardPlan(f"shard-{n:05}.safetensors", _batches(group, lengths, tokens_per_forward)) for n, group in enumerate(groups))
    return Plan(tuple(lengths), tuple(shards))


def _cut_evenly(order: Sequence[int], lengths: Sequence[int], shard_tokens: int) -> list[list[int]]:
    """Cuts `order` into as few groups as `shard_tokens` asks for. Equal groups, because a small last one would pad more."""
    total = sum(lengths)
    num_groups = -(-total // shard_tokens)
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    tokens_before = 0
    for sample in order:
        groups[tokens_before * num_groups // total].append(sample)
        tokens_before += lengths[sample]
    return [group for group in groups if group]  # a sample longer than a shard leaves the next ones empty


def _batches(group: Sequence[int], lengths: Sequence[int], tokens_per_forward: int) -> tuple[tuple[int, ...], ...]:
    batches: list[list[int]] = []
    for sample in sorted(group, key=lambda sample: -lengths[sample]):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_forward:
            batches.append([])
        batches[-1].append(sample)
    return tuple(map(tuple, batches))
