"""Speculative decoding against plain decoding, replay and z-lab's own loop; a drafter trained on one answer decodes it at full blocks."""

import random
from itertools import accumulate

import pytest
import torch
from tiny_drafters import fit, make_drafter
from tiny_models import EOS_ID, MASK_TOKEN_ID, make_qwen3, make_qwen35_wrapper

from dflash_train import decoding
from dflash_train.acceptance import replay
from dflash_train.capture import Capture
from dflash_train.config import Dtype, TargetConfig
from dflash_train.decoding import Agreement, PlainAnswer, compare, plain, refuse_without_rollback, speculative
from dflash_train.errors import UserError
from dflash_train.features.reader import Sample
from dflash_train.layers import LayerIds
from dflash_train.target import load_ends, load_target

K = 4
CPU = torch.device("cpu")
PROMPT = [ord(c) for c in "two and two"]
LAYOUTS = {
    "full": ["full_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
    "mixed": ["sliding_attention", "full_attention"],
}


class Case:
    """A loaded target with its ends and capture."""

    def __init__(self, path):
        settings = TargetConfig(path=str(path), dtype=Dtype.float32)
        self.target, self.ends = load_target(settings, CPU), load_ends(settings, CPU, torch.float32)
        self.layer_ids = LayerIds((1, 3), self.target.text_config.num_hidden_layers)
        self.capture = Capture(self.target, self.layer_ids)

    def drafter(self, layout):
        window = 6 if "sliding_attention" in LAYOUTS[layout] else None
        return make_drafter(LAYOUTS[layout], window, K, self.target.text_config)

    def plain(self, limit, eos=(EOS_ID,), prompt=PROMPT):
        return plain(self.target, prompt, limit, eos)

    def speculative(self, drafter, limit, eos=(EOS_ID,), prompt=PROMPT):
        return speculative(self.target, self.capture, drafter, self.ends, prompt, limit, eos, K, MASK_TOKEN_ID, "sample")

    def sample(self, answer_ids):
        input_ids_T = torch.tensor(PROMPT + answer_ids)
        captured = self.capture.run(input_ids_T[None], torch.ones_like(input_ids_T)[None])
        return Sample("sample", input_ids_T, torch.arange(len(input_ids_T)) >= len(PROMPT), captured.features_BTLD[0], None)

    def train(self, drafter, sample, steps):
        return fit(drafter, self.ends, [sample], steps)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(make_qwen3(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def sliding_case(tmp_path_factory):
    types = ["full_attention", "sliding_attention"] * 3
    return Case(make_qwen3(tmp_path_factory.mktemp("sliding"), layer_types=types, sliding_window=8, use_sliding_window=True))


@pytest.fixture
def noisy_oracle(monkeypatch):
    """Replaces the drafting by right tokens with seeded mistakes, so that every length of prefix occurs."""

    def install(case, answer_ids, prompt=PROMPT):
        generator = random.Random(0)

        def draft(drafter, ends, context, anchor_id, position, block_size, mask_token_id):
            assert len(context.meta.position_T) == position, "the context holds every token before the anchor and no other"
            right = (answer_ids + [0] * block_size)[position - len(prompt) + 1 :][: block_size - 1]
            return [token if generator.random() < 0.8 else 319 for token in right]

        monkeypatch.setattr(decoding, "_draft", draft)

    return install


def test_plain_equals_transformers_generate(case):
    answer = case.plain(30, eos=())
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
    expected = case.target.model.generate(torch.tensor([PROMPT]), **settings)
    assert answer.token_ids == expected[0, len(PROMPT) :].tolist()
    assert len(answer.gaps) == 30 and min(answer.gaps) > 0 and answer.seconds > 0


@pytest.mark.parametrize("name", ["case", "sliding_case"])
def test_lossless_whatever_is_accepted(name, noisy_oracle, request):
    case = request.getfixturevalue(name)
    expected = case.plain(60, eos=()).token_ids
    assert len(set(expected)) > 5
    noisy_oracle(case, expected)
    answer = case.speculative(case.drafter("full"), 60, eos=())
    assert answer.token_ids == expected
    assert set(answer.walk.prefixes) == {0, 1, 2, 3}
    assert sum(answer.walk.gains) == 59


def test_the_drafter_sees_the_features_of_an_uncached_forward(case, noisy_oracle, monkeypatch):
    expected = case.plain(40, eos=()).token_ids
    noisy_oracle(case, expected)
    drafter, seen, positions = case.drafter("full"), [], []
    extend = drafter.extend

    def spy(context, features_TLD, meta):
        seen.append(features_TLD)
        positions.extend(meta.position_T.tolist())
        return extend(context, features_TLD, meta)

    monkeypatch.setattr(drafter, "extend", spy)
    case.speculative(drafter, 40, eos=())
    assert positions == list(range(len(positions))) and len(positions) > len(PROMPT) + 30
    whole = case.sample(expected).features_TLD[: len(positions)]
    torch.testing.assert_close(torch.cat(seen)[: len(whole)], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
def test_the_limit_cuts_inside_a_block(case, noisy_oracle, limit):
    expected = case.plain(60, eos=()).token_ids
    noisy_oracle(case, expected)
    answer = case.speculative(case.drafter("full"), limit, eos=())
    assert answer.token_ids == expected[:limit]
    assert sum(answer.walk.gains) == limit - 1


def test_end_of_sequence_cuts_inside_a_block(case, noisy_oracle):
    expected = case.plain(60, eos=()).token_ids
    noisy_oracle(case, expected)
    for eos in sorted(set(expected))[:4]:
        answer = case.speculative(case.drafter("full"), 60, eos=(eos,))
        assert answer.token_ids == expected[: expected.index(eos) + 1] == case.plain(60, eos=(eos,)).token_ids
        assert sum(answer.walk.gains) == expected.index(eos)
        assert all(gain in (prefix, prefix + 1) for prefix, gain in zip(answer.walk.prefixes, answer.walk.gains, strict=True))


def test_compare_tells_near_ties_from_mistakes():
    answer = PlainAnswer([5, 6, 7], gaps=[1.0, 4e-4, 2.0], seconds=1.0)
    assert compare(answer, [5, 6, 7]) == Agreement.equal
    assert compare(answer, [5, 9, 9]) == Agreement.near_tie
    assert compare(answer, [5, 6, 9]) == Agreement.different
    assert compare(answer, [9, 6, 7]) == Agreement.different
    assert compare(answer, [5]) == Agreement.near_tie  # stopped where two tokens tied
    assert compare(answer, [5, 6, 7, 8]) == Agreement.different


def test_a_target_with_recurrent_state_is_refused(tmp_path, case, sliding_case):
    hybrid = Case(make_qwen35_wrapper(tmp_path))
    with pytest.raises(UserError, match="evaluate.mode=replay") as error:
        refuse_without_rollback(hybrid.target)
    assert "\n" not in str(error.value)
    refuse_without_rollback(case.target)
    refuse_without_rollback(sliding_case.target)
    assert len(hybrid.plain(10).token_ids) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overfit_gate(case, layout):
    answer_ids = case.plain(33, eos=()).token_ids
    drafter = case.train(case.drafter(layout), case.sample(answer_ids), steps=400)
    answer = case.speculative(drafter, 33, eos=())
    assert answer.token_ids == answer_ids
    assert answer.walk.prefixes == [K - 1] * 8 and answer.walk.gains == [K] * 8
    assert replay(drafter, case.ends, [case.sample(answer_ids)], K, MASK_TOKEN_ID, 1000) == [answer.walk]


def test_overfit_gate_of_a_hybrid_target_by_replay(tmp_path):
    hybrid = Case(make_qwen35_wrapper(tmp_path))
    sample = hybrid.sample(hybrid.plain(33, eos=()).token_ids)
    drafter = hybrid.train(hybrid.drafter("mixed"), sample, steps=400)
    (walk,) = replay(drafter, hybrid.ends, [sample], K, MASK_TOKEN_ID, 1000)
    assert walk.gains == [K] * 8


@pytest.fixture(scope="module")
def half_trained(case):
    """A mixed drafter that is right now and then."""
    return case.train(case.drafter("mixed"), case.sample(case.plain(49, eos=()).token_ids), steps=25)


def test_replay_walks_as_decoding_does(case, half_trained):
    answer = case.speculative(half_trained, 61, eos=())
    assert len(set(answer.walk.prefixes)) > 2
    assert replay(half_trained, case.ends, [case.sample(answer.token_ids)], K, MASK_TOKEN_ID, 1000) == [answer.walk]


def test_zlabs_loop_writes_the_same_text_in_the_same_steps(case, half_trained, monkeypatch):
    zlab = pytest.importorskip("dflash.model")
    monkeypatch.setattr(zlab, "_cuda_time", lambda: 0.0)  # its statistics take the time of a GPU
    theirs = zlab.DFlashDraftModel(half_trained.config).eval()
    theirs.load_state_dict(half_trained.state_dict())
    limit = 60
    result = zlab.dflash_generate(theirs, case.target.model, torch.tensor([PROMPT]), limit, stop_token_ids=None, return_stats=True)
    ours = case.speculative(half_trained, limit, eos=())
    assert result.output_ids[0, len(PROMPT) :].tolist() == ours.token_ids
    whole = sum(done + K < limit for done in accumulate(ours.walk.gains))  # their last blocks shrink to what is left
    assert whole > 10
    assert result.acceptance_lengths[:whole] == ours.walk.gains[:whole]
