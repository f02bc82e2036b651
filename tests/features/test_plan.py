"""Shard plans: worked by hand, and their promises on random lengths."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.features.plan import make_plan


def test_one_shard_by_hand():
    plan = make_plan([3, 10, 4, 9, 30, 2], seed=0, shard_tokens=100, tokens_per_forward=20)
    (shard,) = plan.shards
    assert shard.name == "shard-00000.safetensors"
    assert shard.batches == ((4,), (1, 3), (2, 0, 5))  # 30 runs alone, 2 x 10, 3 x 4
    assert plan.num_tokens == plan.shard_tokens(shard) == 58
    assert plan.padding_share == 1 - 58 / (30 + 2 * 10 + 3 * 4)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(0, 3), st.integers(16, 64))
@settings(max_examples=50, deadline=None)
def test_every_sample_once_and_budgets_kept(lengths, seed, tokens_per_forward):
    shard_tokens = 16 * tokens_per_forward
    plan = make_plan(lengths, seed, shard_tokens, tokens_per_forward)
    assert sorted(sample for shard in plan.shards for sample in shard.samples) == list(range(len(lengths)))
    assert [shard.name for shard in plan.shards] == [f"shard-{i:05}.safetensors" for i in range(len(plan.shards))]
    for shard in plan.shards:
        assert shard.batches and plan.shard_tokens(shard) < shard_tokens + max(lengths)
        for batch in shard.batches:
            longest = max(lengths[sample] for sample in batch)
            assert len(batch) == 1 or longest * len(batch) <= tokens_per_forward


def test_same_everywhere():
    """A plan is part of a dataset's identity: these numbers may not change between versions of Python or of any package."""
    lengths = [random.Random(n).randrange(5, 50) for n in range(40)]
    plan = make_plan(lengths, seed=7, shard_tokens=512, tokens_per_forward=32)
    assert plan == make_plan(lengths, seed=7, shard_tokens=512, tokens_per_forward=32)
    assert [shard.samples[:3] for shard in plan.shards] == [(20, 19, 5), (37, 27, 38), (29, 34, 17)]
    assert make_plan(lengths, seed=8, shard_tokens=512, tokens_per_forward=32) != plan


def test_fewer_tokens_per_forward_move_no_sample():
    lengths = [random.Random(n).randrange(5, 50) for n in range(40)]
    small, large = (make_plan(lengths, 0, 1024, tokens) for tokens in (50, 64))
    assert small != large
    assert [shard.samples for shard in small.shards] == [shard.samples for shard in large.shards]


def test_shards_are_even_and_mixed():
    lengths = sorted(random.Random(0).choices(range(50, 500), k=2000))  # sorted data must not give sorted shards
    plan = make_plan(lengths, 0, 100_000, 5_000)
    sizes = [plan.shard_tokens(shard) for shard in plan.shards]
    means = [plan.shard_tokens(shard) / len(shard.samples) for shard in plan.shards]
    assert max(sizes) - min(sizes) < 2 * 500
    assert max(means) / min(means) < 1.25
    assert plan.padding_share < 0.05
