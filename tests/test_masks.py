"""The visibility rule: against the public case C20, and against the rule spelled out pair by pair."""

import json
from pathlib import Path

import pytest
import torch

from dflash_train.blocks import Context, build_blocks, single_blocks
from dflash_train.masks import block_visible_KK, context_visible_AKT

CASE = json.loads((Path(__file__).parent / "data" / "cases" / "C20.json").read_text())


def test_case_c20_the_visibility_table():
    length, block_size = CASE["seq_len"], CASE["block_size"]
    anchors = torch.tensor(CASE["anchors"])
    context, blocks = build_blocks([(torch.arange(length), torch.ones(length))], [anchors], block_size, 300)
    seen_AKT = context_visible_AKT(blocks, context, None).expand(-1, block_size, -1)
    seen_KK = block_visible_KK(block_size, None)
    for row in CASE["expect"]["visible"]:
        block = CASE["anchors"].index(row["anchor"])
        assert int(blocks.position_AK[block, row["offset"]]) == row["position_id"]
        assert seen_AKT[block, row["offset"]].nonzero()[:, 0].tolist() == row["context_keys"]
        assert seen_KK[row["offset"]].nonzero()[:, 0].tolist() == row["own_block_offsets"]
    assert int(seen_AKT.sum() + len(anchors) * seen_KK.sum()) == CASE["expect"]["total_visible_pairs"]


def test_a_window_counts_the_query_itself_and_moves_with_it():
    # anchor 10, window 4: slot 0 sees 7 8 9 and itself; slot 2 (position 12) sees 9 and slots 0 1 2; slot 3 no context at all
    blocks = single_blocks(torch.tensor([1]), torch.tensor([10]), torch.tensor([0]), 4, 300)
    seen_KT = context_visible_AKT(blocks, Context(torch.zeros(20, dtype=torch.long), torch.arange(20)), 4)[0]
    assert [row.nonzero()[:, 0].tolist() for row in seen_KT] == [[7, 8, 9], [8, 9], [9], []]
    assert block_visible_KK(4, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert block_visible_KK(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 3, 5, 100])
def test_every_pair_of_a_pack_by_the_rule_in_words(window):
    lengths, anchors, block_size = [7, 5], [[0, 2, 6], [3]], 3
    documents = [(torch.arange(n), torch.ones(n)) for n in lengths]
    context, blocks = build_blocks(documents, [torch.tensor(a) for a in anchors], block_size, 300)
    seen_AKT = context_visible_AKT(blocks, context, window).expand(-1, block_size, -1)
    questions = [(d, a) for d, of_document in enumerate(anchors) for a in of_document]
    tokens = [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    for block, (document, anchor) in enumerate(questions):
        for slot in range(block_size):
            for key, (key_document, position) in enumerate(tokens):
                expected = key_document == document and position < anchor
                if window is not None:
                    expected = expected and (anchor + slot) - position < window
                assert bool(seen_AKT[block, slot, key]) is expected
