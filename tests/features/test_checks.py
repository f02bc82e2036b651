"""Content checks on small tensors: what is refused, with which words, and what looks odd but is right."""

import pytest
import torch

from dflash_train.capture import Recomputed, RecomputedTeacher
from dflash_train.features.checks import ContentChecks, ContentError, SamplePlaces, Tolerance, far_norms, require_sample
from dflash_train.features.codec import Bf16Codec, Fp8Codec

LAYERS = (1, 5, 9)
PLACES = SamplePlaces(["a", "b", "c"], torch.tensor([0, 3, 7, 12]))


def features(num_rows: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, 3, 16, generator=torch.Generator().manual_seed(seed))


def check(features_TLD, teacher_state_TD=None, first: int = 3) -> ContentChecks:
    """Rows 3 to 11 of the shard: sample b in rows 0 to 3 of these, sample c in rows 4 to 8."""
    checks = ContentChecks(LAYERS, PLACES)
    checks.check(first, features_TLD, teacher_state_TD)
    return checks


def test_places():
    assert PLACES.lengths == [3, 4, 5] and PLACES.span(1) == (3, 7) and PLACES.spans(3, 12) == [(3, 7), (7, 12)]
    assert [PLACES.sample_at(row) for row in (0, 2, 3, 6, 7, 11)] == [0, 0, 1, 1, 2, 2]
    assert PLACES.of_row(8) == "sample c, row 1 of 5"


def test_median_norms_are_over_all_forwards():
    checks = ContentChecks((1,), PLACES)
    checks.check(0, torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]], [[6.0, 8.0]]]), None)
    checks.check(3, torch.tensor([[[0.0, 2.0]], [[0.0, 2.0]], [[0.0, 2.0]], [[0.0, 7.0]]]), None)
    assert checks.median_norms() == [2.0]  # of 5 1 10 2 2 2 7


@pytest.mark.parametrize(("row", "place"), [(0, "sample b, row 0 of 4"), (5, "sample c, row 1 of 5"), (8, "sample c, row 4 of 5")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(row, place, value):
    wrong = features()
    wrong[row, 1, 7] = value
    with pytest.raises(ContentError, match=f"{place}: the feature of layer 5 is {value}: the target overflows"):
        check(wrong)
    teacher = features()[:, 0]
    teacher[row, 7] = value
    with pytest.raises(ContentError, match=f"{place}: the teacher state is {value}"):
        check(features(), teacher)


def test_large_values_whose_norm_overflows_are_finite():
    large = features()
    large[2, 1] = 3e38
    check(large)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_plane_of_zeros(dtype):
    wrong = features().to(dtype)
    wrong[4:, 2] = 0
    with pytest.raises(ContentError, match="sample c, row 0 of 5: the feature of layer 9 is zero in all rows: nothing was captured"):
        check(wrong)
    with pytest.raises(ContentError, match="sample b, row 0 of 4: the teacher state is zero in all rows"):
        check(features(), torch.zeros(9, 16))


def test_single_rows_of_zeros_may_be():
    odd = features()
    odd[4:8, 2] = 0
    check(odd)


def test_two_equal_layers():
    wrong = features()
    wrong[4:, 2] = wrong[4:, 0]
    with pytest.raises(ContentError, match="sample c, row 0 of 5: the features of layers 1 and 9 are equal in all 5 rows: one of them"):
        check(wrong)


def test_rows_may_be_equal_where_layers_add_nothing():
    """A first token with a huge value, in 16 bits, may pass several layers unchanged."""
    odd = features()
    odd[4:8, 2] = odd[4:8, 0]
    odd[8, 2, 1:] = odd[8, 0, 1:]
    check(odd)


def test_one_layer_alone():
    ContentChecks((1,), PLACES).check(3, features()[:, :1], None)


def test_far_norms():
    assert far_norms([9.9, 0.11, 5.0], [1.0, 1.0, 5.0], LAYERS) == []
    assert far_norms([10.1, 0.09, 5.0], [1.0, 1.0, 5.0], LAYERS) == [
        "the median norm of the features of layer 1 is 10.1, elsewhere 1",
        "the median norm of the features of layer 5 is 0.09, elsewhere 1",
    ]


def stored(exact_TLD, codec, **more):
    return codec.encode(exact_TLD) | more


@pytest.mark.parametrize("codec", [Bf16Codec(), Fp8Codec()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference(codec, dtype):
    exact = features(200)
    noise = 1e-6 if dtype == torch.float32 else 0.02
    computed = exact * (1 + noise * features(200, seed=1))
    require_sample("s", LAYERS, codec, stored(computed, codec), Recomputed(dtype, exact, None))


@pytest.mark.parametrize("codec", [Bf16Codec(), Fp8Codec()])
def test_one_wrong_row_shows_in_fp32(codec):
    exact = features(200)
    wrong = exact.clone()
    wrong[17, 1] = exact[18, 1]
    with pytest.raises(
        ContentError, match="sample s, row 17 of 200: the feature of layer 5 is not what the target gives for this sample alone"
    ):
        require_sample("s", LAYERS, codec, stored(wrong, codec), Recomputed(torch.float32, exact, None))


@pytest.mark.parametrize("codec", [Bf16Codec(), Fp8Codec()])
def test_in_16_bits_single_rows_may_differ_but_not_many(codec):
    """Experts chosen by a near-tie change a row; a text that differs in one token of eight is another sample."""
    exact, wrong = features(200), features(200)
    wrong[:4] = 0.1
    require_sample("s", LAYERS, codec, stored(wrong, codec), Recomputed(torch.bfloat16, exact, None))
    wrong[:25] = 0.1
    with pytest.raises(ContentError, match="95 of 100 rows"):
        require_sample("s", LAYERS, codec, stored(wrong, codec), Recomputed(torch.bfloat16, exact, None))


@pytest.mark.parametrize("shift", [0.12, 1.0])
def test_a_layer_that_is_another_one_shows_in_16_bits(shift):
    """Neighbouring layers are alike: here the update of one layer is `shift` of its input's norm."""
    exact = features(200)
    with pytest.raises(ContentError, match="the feature of layer 1 is not"):
        wrong = exact + shift * features(200, seed=1)
        require_sample("s", LAYERS, Fp8Codec(), stored(wrong, Fp8Codec()), Recomputed(torch.bfloat16, exact, None))


def test_values_that_are_nan_are_a_difference():
    exact = features(20)
    with pytest.raises(ContentError, match="layer 9"):
        wrong = exact.clone()
        wrong[3, 2, 1] = float("nan")
        require_sample("s", LAYERS, Bf16Codec(), stored(wrong, Bf16Codec()), Recomputed(torch.bfloat16, exact, None))


def test_teacher_states_and_what_follows_from_them():
    exact, state_TD, head = features(20), features(20)[:, 0].clone(), torch.randn(30, 16, generator=torch.Generator().manual_seed(2))
    teacher = RecomputedTeacher(state_TD, (state_TD @ head.T)[-8:], lambda state: state.float() @ head.T)
    recomputed = Recomputed(torch.float32, exact, teacher)
    rows = stored(exact, Bf16Codec(), teacher_state=state_TD.bfloat16())
    require_sample("s", LAYERS, Bf16Codec(), rows, recomputed)
    with pytest.raises(ContentError, match="sample s, row 19 of 20: the teacher state is not"):
        wrong = state_TD.clone()
        wrong[19] *= 1.1
        require_sample("s", LAYERS, Bf16Codec(), rows | {"teacher_state": wrong.bfloat16()}, recomputed)
    with pytest.raises(
        ContentError, match=r"sample s, row 1\d of 20: the log-probabilities rebuilt from the teacher state .* are not the model's"
    ):
        other = RecomputedTeacher(state_TD, teacher.logits_RV, lambda state: 1.5 * state.float() @ head.T)
        require_sample("s", LAYERS, Bf16Codec(), rows, Recomputed(torch.float32, exact, other))


def test_tolerances_widen_with_the_codec_and_the_dtype():
    assert Tolerance.of(torch.float32, 2**-7) == Tolerance(0.001 + 2**-9, 0.001 + 2**-7, 0.001 + 2**-7, 0.01)
    assert Tolerance.of(torch.bfloat16, 2**-3) == Tolerance(0.05 + 2**-5, 0.5 + 2**-3, float("inf"), 0.1)
