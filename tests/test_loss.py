"""The chunked loss against the plain computation, and against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_train import loss
from dflash_train.loss import LossResult, weighted_cross_entropy

A, K, V, D = 7, 5, 23, 6
ONE_BLOCK, EVERYTHING = 1, 1 << 30


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_AKD = torch.randn(A, K, D, dtype=dtype, generator=generator).requires_grad_()
    head_VD = torch.randn(V, D, dtype=dtype, generator=generator)
    labels_AK = torch.randint(V, (A, K), generator=generator)
    weights_AK = torch.rand(A, K, generator=generator) * (torch.rand(A, K, generator=generator) > 0.3)
    weights_AK[:, 0] = 0
    weights_AK[2] = 0
    labels_AK[weights_AK == 0] = -100
    return hidden_AKD, head_VD, labels_AK, weights_AK


def plain(hidden_AKD: Tensor, head_VD: Tensor, labels_AK: Tensor, weights_AK: Tensor) -> Tensor:
    logits_AKV = hidden_AKD @ head_VD.T
    losses = F.cross_entropy(
        logits_AKV.flatten(0, 1).to(torch.promote_types(head_VD.dtype, torch.float32)), labels_AK.flatten(), reduction="none"
    )
    return (losses * weights_AK.flatten()).sum()


def chunked(*arguments: Tensor, chunk_bytes: int) -> tuple[LossResult, Tensor]:
    result = weighted_cross_entropy(*arguments, chunk_bytes)
    (gradient,) = torch.autograd.grad(3 * result.loss_sum, arguments[0])
    return result, gradient / 3


@pytest.mark.parametrize("chunk_bytes", [ONE_BLOCK, 3 * K * V * 8, EVERYTHING])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_plain_computation(dtype: torch.dtype, tolerance: float, chunk_bytes: int) -> None:
    arguments = problem(dtype)
    expected = plain(*arguments)
    (expected_gradient,) = torch.autograd.grad(expected, arguments[0])
    result, gradient = chunked(*arguments, chunk_bytes=chunk_bytes)
    assert result.loss_sum.dtype == dtype
    assert abs(result.loss_sum.item() / expected.item() - 1) < tolerance
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < tolerance
    assert result.weight_sum == arguments[3].sum()


def test_numbers_worked_out_by_hand() -> None:
    # logits of the only counting slot are (0, ln 3): the probability of label 1 is 3/4, the gradient of the logits (1/4, -1/4)
    hidden_AKD = torch.tensor([[[9.0, 9.0], [0.0, math.log(3)]]], requires_grad=True)
    result, gradient = chunked(hidden_AKD, torch.eye(2), torch.tensor([[-100, 1]]), torch.tensor([[0.0, 0.5]]), chunk_bytes=ONE_BLOCK)
    assert result.loss_sum.item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)
    torch.testing.assert_close(result.cross_entropy_AK, torch.tensor([[0.0, math.log(4 / 3)]]))
    torch.testing.assert_close(gradient, torch.tensor([[[0.0, 0.0], [0.125, -0.125]]]))
    assert result.right_AK.tolist() == [[False, True]]


def test_right_is_the_argmax_of_counting_slots() -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    best_AK = (hidden_AKD @ head_VD.T).argmax(-1)
    labels_AK = torch.where(torch.arange(K) % 2 == 0, best_AK, labels_AK.clamp(min=0))
    result = weighted_cross_entropy(hidden_AKD, head_VD, labels_AK, weights_AK, ONE_BLOCK)
    assert torch.equal(result.right_AK, (best_AK == labels_AK) & (weights_AK > 0))
    assert result.right_AK.any()


def test_slots_of_weight_zero_are_never_looked_at() -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    broken = hidden_AKD.detach().clone()
    broken[weights_AK == 0] = float("nan")
    result, gradient = chunked(broken.requires_grad_(), head_VD, labels_AK, weights_AK, chunk_bytes=ONE_BLOCK)
    assert result.loss_sum.item() == weighted_cross_entropy(hidden_AKD, head_VD, labels_AK, weights_AK, ONE_BLOCK).loss_sum.item()
    assert gradient.isfinite().all() and (gradient[weights_AK == 0] == 0).all()


def test_confident_and_hopeless_slots_stay_finite() -> None:
    hidden_AKD = torch.tensor([[[0.0], [400.0], [-400.0]]], requires_grad=True)  # logits (400, -400), then (-400, 400); label 0
    arguments = hidden_AKD, torch.tensor([[1.0], [-1.0]]), torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0.0, 1.0, 1.0]])
    result, gradient = chunked(*arguments, chunk_bytes=EVERYTHING)
    assert result.cross_entropy_AK.tolist() == [[0.0, 0.0, 800.0]]
    assert gradient.flatten().tolist() == [0.0, 0.0, -2.0]


@pytest.mark.parametrize("weights", [torch.ones(0, K), torch.zeros(A, K)], ids=["no blocks", "no weight"])
def test_nothing_that_counts_is_zero_with_a_zero_gradient(weights: Tensor) -> None:
    hidden_AKD = torch.randn(*weights.shape, D, requires_grad=True)
    result, gradient = chunked(hidden_AKD, torch.randn(V, D), torch.full(weights.shape, -100), weights, chunk_bytes=ONE_BLOCK)
    assert result.loss_sum.item() == 0 and result.weight_sum.item() == 0
    assert gradient.shape == hidden_AKD.shape and not gradient.any()


def test_bf16_head_under_autocast_has_an_fp32_softmax() -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    head_VD = head_VD.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, gradient = chunked(hidden_AKD, head_VD, labels_AK, weights_AK, chunk_bytes=ONE_BLOCK)
    logits_AKV = (hidden_AKD.bfloat16() @ head_VD.T).float()
    expected_AK = F.cross_entropy(logits_AKV.flatten(0, 1), labels_AK.flatten(), reduction="none").view(A, K)
    torch.testing.assert_close(result.cross_entropy_AK, torch.where(weights_AK > 0, expected_AK, 0.0), rtol=1e-5, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad((expected_AK * weights_AK).sum(), hidden_AKD)
    assert gradient.dtype == torch.float32
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-2


def test_fp32_head_keeps_fp32_products_under_autocast() -> None:
    arguments = problem(torch.float32)
    outside, gradient_outside = chunked(*arguments, chunk_bytes=EVERYTHING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, gradient_inside = chunked(*arguments, chunk_bytes=EVERYTHING)
    assert torch.equal(outside.loss_sum, inside.loss_sum) and torch.equal(gradient_outside, gradient_inside)


def test_logits_held_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = loss._cross_entropy_
    monkeypatch.setattr(loss, "_cross_entropy_", lambda logits, labels: rows.append(len(logits)) or original(logits, labels))
    hidden_AKD, head_VD, labels_AK, _ = problem(torch.float32)
    weights_AK = torch.ones(A, K)
    weighted_cross_entropy(hidden_AKD, head_VD, labels_AK.clamp(min=0), weights_AK, chunk_bytes=2 * K * V * 4 + 1)
    assert rows == [2 * K, 2 * K, 2 * K, K]  # whole blocks, two at a time


def test_without_a_gradient_only_the_first_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_hidden_gradient_", None)
    arguments = problem(torch.float32)
    with torch.no_grad():
        assert weighted_cross_entropy(*arguments, ONE_BLOCK).loss_sum > 0
