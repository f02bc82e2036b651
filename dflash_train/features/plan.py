"""Decides, before anything runs, which samples make which shard, which of them share a forward pass and which one is computed twice.

Comes in: the samples' lengths in tokens and three settings. Goes out: a `Plan`, a function of these alone, so that any process of any
launch finds the same one. Samples are dealt to shards at random: shard after shard is a shuffled reading order. Inside a shard they run
longest first, and its forwards are the cheapest cut of that order: no forward is over the budget, and few short rows wait for a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import xxhash

# A forward counts as this part of the budget on top of its positions: launching it, and filling the device less. Forwards filled to the
# brim pad up to 13 % of a chat-like dataset; those that this part leads to are about half as large and pad less than 5 %.
_FORWARD_COST_DIVISOR = 40


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its file name, and its samples (indices into the prepared samples) forward by forward, longest first.

    `check_sample` is the place in `samples` of the one that is recomputed alone and compared. Where it can be chosen, it is one that
    shares its forward with a longer one, since only padded rows can show a leak of padding, and no longer than the shard's mean, since it
    costs a forward of its own.
    """

    name: str
    batches: tuple[tuple[int, ...], ...]
    check_sample: int

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
    order = sorted(range(len(lengths)), key=lambda sample: _draw(f"{seed}:{sample}"))
    groups = _cut_evenly(order, lengths, shard_tokens)
    shards = (_plan_shard(f"shard-{n:05}.safetensors", group, lengths, seed, tokens_per_forward) for n, group in enumerate(groups))
    return Plan(tuple(lengths), tuple(shards))


def _draw(name: str) -> int:
    """A random number that is the same wherever it is drawn."""
    return xxhash.xxh3_64_intdigest(name.encode())


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


def _plan_shard(name: str, group: Sequence[int], lengths: Sequence[int], seed: int, tokens_per_forward: int) -> ShardPlan:
    samples = sorted(group, key=lambda sample: -lengths[sample])
    sorted_lengths = [lengths[sample] for sample in samples]
    cuts = _cut_cheapest(sorted_lengths, tokens_per_forward)
    batches = tuple(tuple(samples[first:end]) for first, end in pairwise(cuts))
    return ShardPlan(name, batches, _choose_check_sample(sorted_lengths, cuts, _draw(f"check:{seed}:{name}")))


def _cut_cheapest(lengths: Sequence[int], tokens_per_forward: int) -> list[int]:
    """Where to cut samples of `lengths`, longest first, into forwards: first sample of each, and the number of samples at the end.

    The sum over forwards of rows times longest row, plus a constant for each, is least; found from the last sample backwards, where
    the cheapest way to go on from each later sample is known. Integers only: no rounding decides, so every machine finds the same cuts.
    """
    forward_cost = -(-tokens_per_forward // _FORWARD_COST_DIVISOR)
    rows = np.arange(1, len(lengths) + 1)
    cost_from = np.zeros(len(lengths) + 1, dtype=np.int64)
    next_cut = [0] * len(lengths)
    for first in range(len(lengths) - 1, -1, -1):
        longest = lengths[first]
        most_rows = max(1, min(len(lengths) - first, tokens_per_forward // longest))
        costs = rows[:most_rows] * longest + cost_from[first + 1 : first + 1 + most_rows]
        best = int(costs.argmin())
        cost_from[first] = costs[best] + forward_cost
        next_cut[first] = first + 1 + best
    cuts = [0]
    while cuts[-1] < len(lengths):
        cuts.append(next_cut[cuts[-1]])
    return cuts


def _choose_check_sample(lengths: Sequence[int], cuts: Sequence[int], draw: int) -> int:
    candidates: Sequence[int] = range(len(lengths))
    padded = [place for first, end in pairwise(cuts) for place in range(first, end) if lengths[place] < lengths[first]]
    candidates = padded or candidates
    mean = sum(lengths) / len(lengths)
    short = [place for place in candidates if lengths[place] <= mean]
    candidates = short or candidates
    return candidates[draw % len(candidates)]
