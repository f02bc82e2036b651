"""Shard plans: worked by hand, their promises on random lengths, and the padding of chat-like ones."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.config import FeaturesConfig
from dflash_train.features.plan import make_plan

ROOT = Path(__file__).parents[2]
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)


def test_one_shard_by_hand():
    """Budget 80, so a forward counts as 2 more positions. Filled to the brim, 30 and 10 would share one, and 9, 4, 4, 3: 96 positions."""
    plan = make_plan([4, 10, 3, 9, 30, 4], seed=0, shard_tokens=100, tokens_per_forward=80)
    (shard,) = plan.shards
    assert shard.name == "shard-00000.safetensors"
    lengths = [[plan.lengths[sample] for sample in batch] for batch in shard.batches]
    assert lengths == [[30], [10, 9], [4, 4, 3]]  # the 3 stays: alone it saves 1 position and costs 2
    assert plan.num_tokens == plan.shard_tokens(shard) == 60
    assert plan.padding_share == 1 - 60 / (30 + 2 * 10 + 3 * 4)
    assert shard.samples[shard.check_sample] in (3, 2)  # 9 and 3 are padded; both are below the mean, 10


def test_the_budget_cuts_equal_samples_and_a_longer_one_runs_alone():
    plan = make_plan([7] * 5 + [50], seed=0, shard_tokens=1000, tokens_per_forward=21)
    assert sorted(map(len, plan.shards[0].batches)) == [1, 2, 3]
    assert plan.shards[0].batches[0] == (5,) and plan.padding_share == 0


@given(LENGTHS, st.integers(0, 3), st.integers(16, 64))
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


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(16, 400))
@settings(max_examples=100, deadline=None)
def test_no_other_cut_is_cheaper(lengths, tokens_per_forward):
    """All 2 ** (samples - 1) cuts, one by one."""
    (shard,) = make_plan(lengths, 0, 10_000, tokens_per_forward).shards
    longest_first = sorted(lengths, reverse=True)
    per_forward = -(-tokens_per_forward // 40)

    def cost(cuts):
        batches = [longest_first[first:end] for first, end in pairwise(cuts)]
        fits = all(len(batch) == 1 or len(batch) * batch[0] <= tokens_per_forward for batch in batches)
        return sum(len(batch) * batch[0] + per_forward for batch in batches) if fits else 10**9

    num = len(lengths)
    inner = [[place for place in range(1, num) if bits >> place & 1] for bits in range(0, 2**num, 2)]
    planned = [0, *np.cumsum([len(batch) for batch in shard.batches]).tolist()]
    assert cost(planned) == min(cost([0, *cuts, num]) for cuts in inner)


def test_same_everywhere():
    """A plan is part of a dataset's identity: these numbers may not change between versions of Python or of any package."""
    lengths = [random.Random(n).randrange(5, 50) for n in range(40)]
    plan = make_plan(lengths, seed=7, shard_tokens=512, tokens_per_forward=128)
    assert plan == make_plan(lengths, seed=7, shard_tokens=512, tokens_per_forward=128)
    assert [shard.samples[:3] for shard in plan.shards] == [(20, 19, 5), (37, 27, 38), (29, 34, 17)]
    assert [list(map(len, shard.batches)) for shard in plan.shards] == [
        [2, 1, 2, 2, 1, 1, 2, 1],
        [1, 2, 1, 2, 2, 2, 2, 2],
        [1, 2, 2, 2, 2, 2, 3],
    ]
    assert [shard.check_sample for shard in plan.shards] == [10, 9, 13]
    assert make_plan(lengths, seed=8, shard_tokens=512, tokens_per_forward=128) != plan


def test_fewer_tokens_per_forward_move_no_sample():
    lengths = [random.Random(n).randrange(5, 50) for n in range(40)]
    small, large = (make_plan(lengths, 0, 1024, tokens) for tokens in (50, 64))
    assert small != large
    assert [shard.samples for shard in small.shards] == [shard.samples for shard in large.shards]


@given(LENGTHS, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_check_samples_are_padded_and_short_where_any_is(lengths, seed):
    plan = make_plan(lengths, seed, 4000, 500)
    for shard in plan.shards:
        mean = plan.shard_tokens(shard) / len(shard.samples)
        longest = {sample: lengths[batch[0]] for batch in shard.batches for sample in batch}
        padded = [sample for sample in shard.samples if lengths[sample] < longest[sample]]
        chosen = shard.samples[shard.check_sample]
        assert not padded or chosen in padded
        assert lengths[chosen] <= mean or not any(lengths[sample] <= mean for sample in padded or shard.samples)


def test_check_samples_follow_the_seed_and_differ_between_shards():
    lengths = [random.Random(n).randrange(5, 50) for n in range(2000)]
    plans = [make_plan(lengths, seed, 5000, 300) for seed in (0, 1)]
    places = [[shard.check_sample for shard in plan.shards] for plan in plans]
    assert places[0] != places[1] and all(len(set(found)) > len(found) / 2 for found in places)


def test_shards_are_even_and_mixed():
    lengths = sorted(random.Random(0).choices(range(50, 500), k=2000))  # sorted data must not give sorted shards
    plan = make_plan(lengths, 0, 100_000, 5_000)
    sizes = [plan.shard_tokens(shard) for shard in plan.shards]
    means = [plan.shard_tokens(shard) / len(shard.samples) for shard in plan.shards]
    assert max(sizes) - min(sizes) < 2 * 500
    assert max(means) / min(means) < 1.25


def _chats(median, sigma, max_tokens, tokens):
    """Lengths of chats with `tokens` tokens together: lognormal, those over `max_tokens` cut there."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, size=tokens // 8)
    lengths = np.clip(drawn, 8, max_tokens).astype(int)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))].tolist()


CHATS = {
    f"median {median}, sigma {sigma}, at most {max_tokens}": _chats(median, sigma, max_tokens, 800_000)
    for median in (100, 200, 500, 1500)
    for sigma in (0.6, 0.9, 1.2)
    for max_tokens in (4096, 8192)
} | {
    "short and long": _chats(150, 0.7, 4096, 400_000) + _chats(2500, 0.5, 4096, 400_000),
    "half of the tokens in cut samples": _chats(900, 0.9, 4096, 400_000) + [4096] * 100,
    "all of one length": [300] * 2500,
}


def _assert_pads_little(lengths, shard_tokens, tokens_per_forward):
    plan = make_plan(lengths, 0, shard_tokens, tokens_per_forward)
    assert plan.padding_share < 0.05
    num_forwards = sum(len(shard.batches) for shard in plan.shards)
    assert num_forwards < 3 * plan.num_tokens / tokens_per_forward  # and not by running every sample alone


@pytest.mark.parametrize("chats", CHATS)
def test_padding_of_chats_stays_under_five_percent(chats):
    _assert_pads_little(CHATS[chats], FeaturesConfig.shard_tokens, FeaturesConfig.tokens_per_forward)


@pytest.mark.parametrize("tokens_per_forward", [4096, 65536])
def test_padding_stays_under_five_percent_with_the_smallest_shards_allowed(tokens_per_forward):
    _assert_pads_little(_chats(200, 1.2, 4096, 48 * tokens_per_forward), 16 * tokens_per_forward, tokens_per_forward)


def test_the_quickstart_pads_next_to_nothing():
    rows = map(json.loads, (ROOT / "recipes" / "quickstart_data" / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    plan = make_plan([len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows], 0, 32768, 2048)
    assert plan.padding_share < 0.01
