"""Anchors, labels and weights at numbers a person can work out (and the public case C22)."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.blocks import IGNORED_LABEL, build_blocks, decay_weights, draw_anchors, eligible_anchors, single_blocks
from dflash_train.errors import UserError

CASE = json.loads((Path(__file__).parent / "data" / "cases" / "C22.json").read_text())
MASK = 999


def document(tokens, supervised):
    return torch.tensor(tokens), torch.tensor([bool(s) for s in supervised])


def test_case_c22_labels_inputs_and_positions():
    tokens, expect = CASE["tokens"], CASE["expect"]
    anchors = torch.tensor(CASE["anchors"])
    _, blocks = build_blocks([document(tokens, [1] * 10)], [anchors], CASE["block_size"], MASK)
    assert blocks.input_ids_AK.tolist() == [[MASK if i == "MASK" else i for i in row] for row in expect["block_inputs"]]
    assert blocks.position_AK.tolist() == expect["position_ids"]
    labels = [[IGNORED_LABEL if i is None else i for i in row] for row in expect["labels_per_offset"].values()]
    assert blocks.labels_AK.tolist() == labels


def test_case_c22_decay_and_the_loss_it_normalises():
    expect = CASE["expect"]
    weights_K = decay_weights(16, gamma=7)
    assert weights_K[0] == 0
    assert weights_K[1:].tolist() == pytest.approx(expect["w_k gamma=7 B=16"], abs=1e-6)
    assert float(weights_K.sum()) == pytest.approx(expect["sum_w"], abs=1e-6)
    loss = expect["loss"]
    weights_K = decay_weights(4, gamma=loss["gamma"])[1:]
    cross_entropy_K = torch.tensor(loss["per_offset_ce"])
    assert float((weights_K * cross_entropy_K).sum() / weights_K.sum()) == pytest.approx(loss["decay_normalised"], abs=1e-6)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 4), (9, 4), (13, 5), (14, 7), (32, 7)])
def test_gamma_of_the_nearest_block_size(block_size, gamma):
    assert float(decay_weights(block_size)[2]) == pytest.approx(math.exp(-1 / gamma))


def test_a_slot_counts_while_the_supervision_is_unbroken():
    # supervised 2..5 and 7..8; the answer's end at 5 is followed by one unsupervised token
    _, blocks = build_blocks([document(range(100, 110), [0, 0, 1, 1, 1, 1, 0, 1, 1, 0])], [torch.tensor([2, 4, 7])], 5, MASK)
    counts = (blocks.weights_AK > 0).int().tolist()
    assert counts == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert blocks.num_supervised == 5
    assert blocks.labels_AK[0].tolist() == [IGNORED_LABEL, 103, 104, 105, IGNORED_LABEL]


def test_a_block_at_the_end_does_not_reach_into_the_next_document():
    first, second = document([1, 2, 3], [1, 1, 1]), document([4, 5, 6, 7], [1, 1, 1, 1])
    context, blocks = build_blocks([first, second], [torch.tensor([1]), torch.tensor([0, 2])], 4, MASK)
    assert context.document_T.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert context.position_T.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert blocks.document_A.tolist() == [0, 1, 1] and blocks.row_A.tolist() == [1, 3, 5]
    x = IGNORED_LABEL
    assert blocks.labels_AK.tolist() == [[x, 3, x, x], [x, 5, 6, 7], [x, 7, x, x]]
    assert blocks.input_ids_AK[:, 0].tolist() == [2, 4, 6]


@pytest.mark.parametrize("documents", [[], [document([1, 2, 3], [0, 0, 0])]])
def test_no_anchors(documents):
    context, blocks = build_blocks(documents, [torch.empty(0, dtype=torch.long) for _ in documents], 4, MASK)
    assert len(context.position_T) == 3 * len(documents)
    assert blocks.input_ids_AK.shape == blocks.weights_AK.shape == (0, 4)
    assert blocks.input_ids_AK.dtype == blocks.document_A.dtype == torch.long


def test_the_mask_token_is_refused_in_the_data():
    with pytest.raises(UserError, match=r"mask_token_id=999 occurs in the data \(document 1 of the pack, token 2\)"):
        build_blocks([document([1, 2], [1, 1]), document([1, 2, MASK], [1, 1, 1])], [torch.tensor([0])] * 2, 4, MASK)


def test_eligible_anchors_need_a_supervised_next_token():
    assert eligible_anchors(torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1])).tolist() == [1, 2, 7]
    assert eligible_anchors(torch.tensor([1])).tolist() == eligible_anchors(torch.tensor([])).tolist() == []


def test_anchors_of_an_epoch_are_those_of_the_next_slice_of_one_order():
    # 7 eligible positions, 3 per epoch: the third epoch takes the last one of the first round and two of the second
    mask = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    assert eligible_anchors(mask).tolist() == [1, 2, 3, 6, 7, 8, 9]
    drawn = [draw_anchors(mask, 3, 0, epoch, "a").tolist() for epoch in range(7)]
    assert set(drawn[0]) | set(drawn[1]) < {1, 2, 3, 6, 7, 8, 9} and not set(drawn[0]) & set(drawn[1])
    assert not {1, 2, 3, 6, 7, 8, 9} - {*drawn[0], *drawn[1], *drawn[2]}
    assert Counter(anchor for anchors in drawn for anchor in anchors) == dict.fromkeys([1, 2, 3, 6, 7, 8, 9], 3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 40), st.integers(0, 3))
def test_every_position_is_an_anchor_once_before_any_is_one_twice(supervised, num, seed):
    mask = torch.tensor(supervised, dtype=torch.bool)
    counts = dict.fromkeys(eligible_anchors(mask).tolist(), 0)
    for epoch in range(12):
        anchors = draw_anchors(mask, num, seed, epoch, "a").tolist()
        assert anchors == sorted(set(anchors)) and len(anchors) == min(num, len(counts))
        assert anchors == draw_anchors(mask, num, seed, epoch, "a").tolist()
        for anchor in anchors:
            counts[anchor] += 1
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1


def test_anchors_depend_on_seed_epoch_and_sample_and_no_epoch_is_far_away():
    mask = torch.ones(1000)
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (11, 1, "a"), (1, 11, "a"), (0, 10**9 + 7, "a")]
    assert len({tuple(draw_anchors(mask, 10, *key).tolist()) for key in keys}) == len(keys)


def test_single_blocks_ask_without_answers():
    blocks = single_blocks(torch.tensor([7, 8]), torch.tensor([3, 0]), torch.tensor([0, 4]), 3, MASK)
    assert blocks.input_ids_AK.tolist() == [[7, MASK, MASK], [8, MASK, MASK]]
    assert blocks.position_AK.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert blocks.num_supervised == 0


def test_to_moves_every_tensor():
    context, blocks = build_blocks([document([1, 2, 3], [1, 1, 1])], [torch.tensor([0])], 2, MASK)
    assert {t.device.type for t in vars(context.to("meta")).values()} == {"meta"}
    assert {t.device.type for t in vars(blocks.to("meta")).values()} == {"meta"}
