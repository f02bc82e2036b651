"""Steps are a partition of the epoch, decided by seed and epoch alone."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.blocks import draw_anchors
from dflash_train.features.reader import SampleRef
from dflash_train.packing import Coverage, RunPlan, pack_fill, packs_of_rank, plan_steps, usable

BUDGETS = {"tokens_per_step": 100, "tokens_per_pack": 30, "shuffle_shards": 2}


def make_refs(lengths: list[int], shard_size: int = 5, num_supervised: int = 2) -> list[SampleRef]:
    return [SampleRef(f"s{i}", f"shard-{i // shard_size:05}", 0, length, num_supervised, "train") for i, length in enumerate(lengths)]


def ids(steps: list[list[list[SampleRef]]]) -> list[str]:
    return [ref.sample_id for packs in steps for pack in packs for ref in pack]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 3), st.integers(1, 4))
def test_every_sample_once_in_packs_within_the_budget(lengths: list[int], epoch: int, shuffle_shards: int) -> None:
    steps = plan_steps(make_refs(lengths), 0, epoch, 100, 30, shuffle_shards)
    assert sorted(ids(steps)) == sorted(f"s{i}" for i in range(len(lengths)))
    for pack in (pack for packs in steps for pack in packs):
        assert pack and (len(pack) == 1 or sum(ref.num_tokens for ref in pack) <= 30)
    for packs in steps[:-1]:  # nearest to the budget: half of the largest pack off at most
        assert abs(sum(ref.num_tokens for pack in packs for ref in pack) - 100) <= 25


def test_packs_and_steps_of_equal_samples() -> None:
    # packs of three 10s are 30 tokens; three of them are 90, nearer to 100 than four are; 12 packs in all, 6 of each two shards
    steps = plan_steps(make_refs([10] * 36, shard_size=9), 0, 0, **BUDGETS)
    assert [[len(pack) for pack in packs] for packs in steps] == [[3, 3, 3]] * 4


def test_a_long_document_is_a_pack_and_if_need_be_a_step_of_its_own() -> None:
    (step,) = plan_steps(make_refs([500]), 0, 0, **BUDGETS)
    assert [ref.num_tokens for pack in step for ref in pack] == [500]


def test_best_fit_leaves_no_two_packs_that_would_be_one_and_mixes_anew_in_every_epoch() -> None:
    refs = make_refs([25, 10, 22, 5, 8, 15, 20], shard_size=7)
    epochs = [plan_steps(refs, 0, epoch, 1000, 30, 1)[0] for epoch in range(20)]
    for packs in epochs:
        first, second, *_ = sorted(sum(ref.num_tokens for ref in pack) for pack in packs)
        assert first + second > 30
    assert len({frozenset(frozenset(pack) for pack in packs) for packs in epochs}) > 1


@pytest.mark.parametrize(("median", "spread", "least"), [(200, 0.9, 0.99), (400, 0.9, 0.985), (900, 0.8, 0.975), (1500, 0.7, 0.955)])
def test_packs_of_chat_like_lengths_are_full(median: int, spread: float, least: float) -> None:
    draw = random.Random(0)
    lengths = [min(4096, max(8, int(draw.lognormvariate(math.log(median), spread)))) for _ in range(2000)]
    steps = plan_steps(make_refs(lengths, shard_size=262144 // median), 0, 0, 262144, 4096, 4)
    packs = [pack for packs in steps for pack in packs]
    assert pack_fill(packs, 4096) == pytest.approx(sum(lengths) / len(packs) / 4096)
    assert least < pack_fill(packs, 4096) <= 1


def test_order_depends_on_seed_and_epoch_only() -> None:
    refs = make_refs([10] * 40)
    first = plan_steps(refs, 0, 0, **BUDGETS)
    assert first == plan_steps(refs, 0, 0, **BUDGETS)
    assert ids(first) != ids(plan_steps(refs, 0, 1, **BUDGETS))
    assert ids(first) != ids(plan_steps(refs, 1, 0, **BUDGETS))


def test_reading_stays_within_the_window_of_shards() -> None:
    order = [int(sample_id[1:]) // 5 for sample_id in ids(plan_steps(make_refs([10] * 40), 0, 0, **BUDGETS))]
    windows = [set(order[i : i + 10]) for i in range(0, 40, 10)]
    assert all(len(window) == 2 for window in windows)
    assert any(order[i : i + 5] != [order[i]] * 5 for i in range(0, 40, 5))  # and inside it samples of both are mixed


def test_ranks_share_a_step_and_run_equally_many_packs() -> None:
    packs = [[ref] for ref in make_refs([1, 2, 3, 4, 5])]
    shares = [packs_of_rank(packs, rank, 2) for rank in range(2)]
    assert [[[r.num_tokens for r in pack] for pack in share] for share in shares] == [[[1], [3], [5]], [[2], [4], []]]
    assert packs_of_rank(packs, 0, 1) == packs


def test_a_run_goes_on_in_the_next_epoch_and_can_start_anywhere() -> None:
    plan = RunPlan(make_refs([10] * 36, shard_size=9), seed=0, **BUDGETS)  # 4 steps per epoch
    steps = list(plan.steps(0, 10))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2] * 2
    assert steps[5].packs == plan.epoch(1)[1]
    assert list(plan.steps(7, 10)) == steps[7:]
    assert [plan.num_steps(epochs) for epochs in (0.01, 0.5, 1, 2.25)] == [1, 2, 4, 9]


def test_samples_without_a_supervised_pair_are_unusable() -> None:
    refs = make_refs([3], num_supervised=1) + make_refs([20], num_supervised=0) + make_refs([40], num_supervised=30)
    assert usable(refs) == refs[2:]


def make_coverage(plan: RunPlan, masks: dict[str, torch.Tensor], num_anchors: int) -> Coverage:
    eligible = {ref: len(draw_anchors(masks[ref.sample_id], 1000, 0, 0, "")) for ref in plan.refs}
    return Coverage(eligible, num_anchors)


def test_coverage_counts_the_different_anchors_of_a_run_and_needs_no_memory() -> None:
    lengths = [10, 3, 25, 7, 12, 20, 2, 18]
    plan = RunPlan(make_refs(lengths, shard_size=4), seed=0, tokens_per_step=30, tokens_per_pack=30, shuffle_shards=2)
    masks = {ref.sample_id: torch.ones(ref.num_tokens) for ref in plan.refs}
    coverage, seen = make_coverage(plan, masks, num_anchors=5), set()
    assert coverage.num_positions == sum(lengths) - len(lengths)
    for number, step in enumerate(plan.steps(0, 30), start=1):
        for ref in (ref for pack in step.packs for ref in pack):
            seen |= {(ref, anchor) for anchor in draw_anchors(masks[ref.sample_id], 5, 0, step.epoch, ref.sample_id).tolist()}
        coverage.add([step])
        assert coverage.num_covered == len(seen)
        resumed = make_coverage(plan, masks, num_anchors=5)
        resumed.add(plan.steps(0, number))
        assert resumed.share == coverage.share
    assert coverage.share == 1.0  # 24 positions at most, 5 per epoch


def test_coverage_of_samples_without_eligible_positions() -> None:
    plan = RunPlan(make_refs([10, 10]), seed=0, **BUDGETS)
    coverage = Coverage(dict.fromkeys(plan.refs, 0), 5)
    coverage.add(plan.steps(0, 3))
    assert (coverage.num_covered, coverage.share) == (0, 1.0)
