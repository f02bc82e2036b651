"""Steps are a partition of the epoch, decided by seed and epoch alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.features.reader import SampleRef
from dflash_train.packing import RunPlan, packs_of_rank, plan_steps, sample_generator, usable

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
    # packs of three 10s are 30 tokens; three of them are 90, nearer to 100 than four are; 12 packs in all
    steps = plan_steps(make_refs([10] * 36), 0, 0, **BUDGETS)
    assert [[len(pack) for pack in packs] for packs in steps] == [[3, 3, 3]] * 4


def test_a_long_document_is_a_pack_and_if_need_be_a_step_of_its_own() -> None:
    (step,) = plan_steps(make_refs([500]), 0, 0, **BUDGETS)
    assert [ref.num_tokens for pack in step for ref in pack] == [500]


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
    plan = RunPlan(make_refs([10] * 36), seed=0, **BUDGETS)  # 4 steps per epoch
    steps = list(plan.steps(0, 10))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2] * 2
    assert steps[5].packs == plan.epoch(1)[1]
    assert list(plan.steps(7, 10)) == steps[7:]
    assert [plan.num_steps(epochs) for epochs in (0.01, 0.5, 1, 2.25)] == [1, 2, 4, 9]


def test_samples_without_a_supervised_pair_are_unusable() -> None:
    refs = make_refs([3], num_supervised=1) + make_refs([20], num_supervised=0) + make_refs([40], num_supervised=30)
    assert usable(refs) == refs[2:]


def test_draws_depend_on_seed_epoch_and_sample() -> None:
    def draw(*key: int | str) -> list[int]:
        return torch.randint(1 << 30, (4,), generator=sample_generator(*key)).tolist()

    assert draw(0, 0, "a") == draw(0, 0, "a")
    assert len({tuple(draw(*key)) for key in ((0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (11, 1, "a"), (1, 11, "a"))}) == 6
