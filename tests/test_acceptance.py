"""Acceptance figures by hand, the walk over stored answers, and replay against blocks drafted one at a time."""

import pytest
import torch
from tiny_drafters import make_drafter, make_ends, make_samples
from tiny_models import MASK_TOKEN_ID

from dflash_train import acceptance, drafting
from dflash_train.acceptance import (
    StoredAnswer,
    Walk,
    anchor_counts,
    anchor_tau,
    replay,
    right_prefix,
    stored_answers,
    summarize,
    tau,
    walk_answers,
)
from dflash_train.features.reader import Sample


def test_summary_of_two_prompts_by_hand():
    walks = [Walk("a", prefixes=[3, 0, 1], gains=[4, 1, 1]), Walk("b", prefixes=[0], gains=[1])]
    summary = summarize(walks, block_size=4, seed=0)
    assert summary["tau"] == 7 / 4
    assert summary["tau_mean_over_prompts"] == (2 + 1) / 2
    assert summary["num_verifications"] == 4
    assert summary["accepted_histogram"] == [2, 1, 0, 1]
    assert summary["acceptance_by_position"] == [2 / 4, 1 / 4, 1 / 4]
    assert summary["conditional_acceptance_by_position"] == [2 / 4, 1 / 2, 1 / 1]


def test_figures_without_data_are_null():
    empty = summarize([Walk("one token long")], block_size=3, seed=0)
    assert empty["tau"] is None and empty["tau_ci95"] is None and empty["tau_mean_over_prompts"] is None
    assert empty["num_answers"] == 1 and empty["num_verifications"] == 0
    assert empty["acceptance_by_position"] == [None, None]
    never = summarize([Walk("a", [0, 0], [1, 1])], block_size=4, seed=0)
    assert never["acceptance_by_position"] == [0, 0, 0]
    assert never["conditional_acceptance_by_position"] == [0, None, None]


def test_spans_of_one_sample_are_one_prompt():
    walks = [Walk("a", [1], [2]), Walk("a", [3], [4]), Walk("b", [0], [1])]
    summary = summarize(walks, block_size=4, seed=0)
    assert summary["num_prompts"] == 2 and summary["num_answers"] == 3
    assert summary["tau_mean_over_prompts"] == (3 + 1) / 2


def test_interval_resamples_prompts_not_verifications():
    same = [Walk(str(i), [0, 2], [1, 3]) for i in range(10)]
    assert summarize(same, 4, seed=0)["tau_ci95"] == [2.0, 2.0]  # every prompt is alike, though its verifications differ
    half = [Walk(str(i), [2 * (i % 2)] * 50, [1 + 2 * (i % 2)] * 50) for i in range(100)]
    low, high = summarize(half, 4, seed=0)["tau_ci95"]
    assert low == pytest.approx(2 - 1.96 * 0.1, abs=0.03) and high == pytest.approx(2 + 1.96 * 0.1, abs=0.03)
    assert summarize(half, 4, seed=0)["tau_ci95"] == [low, high]


def test_right_prefix_counts_past_the_end_as_wrong():
    assert right_prefix([5, 6, 7], [5, 6, 7, 8]) == 3
    assert right_prefix([5, 9, 7], [5, 6, 7]) == 1
    assert right_prefix([5, 6, 7], [5, 6]) == 2
    assert right_prefix([5, 6, 7], []) == 0


def test_walk_jumps_behind_the_prefix_and_the_targets_own_token():
    answer = StoredAnswer(document=0, start=0, token_ids=[10, 11, 12, 13, 14, 15, 16], walk=Walk("a"))
    asked = []

    def draft(walking):
        asked.append(walking[0].anchor)
        return [{0: [11, 12, 99], 3: [99, 15, 16], 4: [15, 16, 17]}[walking[0].anchor]]

    walk_answers([answer], draft)
    assert asked == [0, 3, 4]
    assert answer.walk == Walk("a", prefixes=[2, 0, 2], gains=[3, 1, 2])  # the last block: two right, then the end
    assert tau([answer.walk]) == 6 / 3


def test_answers_of_different_length_share_the_rounds():
    answers = [StoredAnswer(i, 0, list(range(length)), Walk(str(i))) for i, length in enumerate([1, 4, 9])]
    rounds = []

    def perfect(walking):
        rounds.append([a.document for a in walking])
        return [[a.anchor + 1, a.anchor + 2, a.anchor + 3] for a in walking]

    walk_answers(answers, perfect)
    assert rounds == [[1, 2], [2]]
    assert [a.walk.gains for a in answers] == [[], [3], [4, 4]]


def test_every_supervised_span_is_an_answer():
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    spans = stored_answers(Sample("a", torch.arange(7), mask, torch.zeros(7, 2, 4), None))
    assert [(s.start, s.token_ids, s.tokens_left) for s in spans] == [(1, [1, 2, 3], 2), (6, [6], 0)]


@pytest.fixture(scope="module")
def case():
    drafter = make_drafter(["sliding_attention", "full_attention"], sliding_window=6, block_size=4, initializer_range=0.3)
    return drafter, make_ends(), make_samples([23, 40, 9, 31])


def one_at_a_time(drafter, ends, sample):
    """The walk of a server: nothing batched, the context cut at the anchor."""
    answer = stored_answers(sample)[0]
    while answer.tokens_left > 0:
        position = answer.start + answer.anchor
        short = Sample(sample.sample_id, sample.input_ids_T[: position + 1], sample.loss_mask_T, sample.features_TLD[: position + 1], None)
        answer.verify(acceptance._Pack(drafter, ends, [short], 4, MASK_TOKEN_ID).draft([0], [position])[0])
    return answer.walk


@pytest.mark.parametrize("tokens_per_pack", [1, 64, 1000])
def test_replay_equals_a_walk_without_batching(case, tokens_per_pack):
    drafter, ends, samples = case
    walks = replay(drafter, ends, samples, 4, MASK_TOKEN_ID, tokens_per_pack)
    assert [walk.sample_id for walk in walks] == [sample.sample_id for sample in samples]
    assert walks == [one_at_a_time(drafter, ends, sample) for sample in samples]
    assert [sum(walk.gains) for walk in walks] == [int(sample.loss_mask_T.sum()) - 1 for sample in samples]


def test_drafting_in_chunks_changes_nothing(case, monkeypatch):
    drafter, ends, samples = case
    whole = replay(drafter, ends, samples, 4, MASK_TOKEN_ID, 1000)
    monkeypatch.setattr(acceptance, "SCORES_BYTES", 1)
    assert replay(drafter, ends, samples, 4, MASK_TOKEN_ID, 1000) == whole


def test_head_argmax_in_chunks():
    hidden, head = torch.randn(3, 5, 8), torch.randn(20, 8)
    assert torch.equal(drafting.head_argmax(hidden, head, chunk_bytes=2 * 20 * 4), (hidden @ head.T).argmax(-1))


def test_anchor_tau_of_all_whole_blocks(case):
    drafter, ends, samples = case
    prefixes = []
    for sample in samples:
        pack = acceptance._Pack(drafter, ends, [sample], 4, MASK_TOKEN_ID)
        inside = [a for a in range(len(sample.input_ids_T) - 3) if sample.loss_mask_T[a : a + 4].all()]
        for a, drafted in zip(inside, pack.draft([0] * len(inside), inside), strict=True):
            prefixes.append(right_prefix(drafted, sample.input_ids_T[a + 1 : a + 4].tolist()))
    settings = dict(block_size=4, mask_token_id=MASK_TOKEN_ID, tokens_per_pack=64)
    whole = anchor_counts(drafter, ends, samples, **settings, seed=0, share_of_blocks=1.0)
    assert whole == (len(prefixes), sum(prefixes))
    assert anchor_tau([whole]) == pytest.approx(1 + sum(prefixes) / len(prefixes))
    assert anchor_counts(drafter, ends, [], **settings, seed=0) == (0, 0)
    assert anchor_tau([(0, 0)]) is None


def test_anchor_tau_does_not_depend_on_who_drafts_which_sample(case):
    drafter, ends, samples = case
    settings = dict(block_size=4, mask_token_id=MASK_TOKEN_ID, tokens_per_pack=64)
    together = anchor_counts(drafter, ends, samples, **settings, seed=1)
    for num_processes in (2, 3):
        shares = [anchor_counts(drafter, ends, samples[rank::num_processes], **settings, seed=1) for rank in range(num_processes)]
        assert anchor_tau(shares) == anchor_tau([together])
    assert len({anchor_counts(drafter, ends, samples, **settings, seed=seed) for seed in range(8)}) > 1
