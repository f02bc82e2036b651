"""The chunked loss against the plain computation, and against numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_train import loss
from dflash_train.config import Config, DrafterConfig, FeaturesConfig, Loss, PositionWeights, TrainConfig
from dflash_train.errors import UserError
from dflash_train.loss import CROSS_ENTROPY, LossResult, Objective, Teacher, dpace_weights, tv_share_at, weighted_loss
from dflash_train.target import LogitScaling, TeacherHead

A, K, V, D = 7, 5, 23, 6
ONE_BLOCK, EVERYTHING = 1, 1 << 30


@pytest.fixture(autouse=True)
def three_rows_per_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "SLAB_BYTES", 3 * V * 4)


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


def make_teacher(dtype: torch.dtype) -> Teacher:
    """States of 11 tokens behind a norm with weights; logits with bias, scale and cap."""
    generator = torch.Generator().manual_seed(1)
    norm = torch.nn.RMSNorm(D, eps=1e-6, dtype=dtype).requires_grad_(False)
    norm.weight.copy_(torch.rand(D, dtype=dtype, generator=generator) + 0.5)
    bias_V = torch.randn(V, dtype=dtype, generator=generator)
    row_AK = torch.randint(11, (A, K), generator=generator)
    row_AK[:, 0] = -100  # never looked at
    state_TD = torch.randn(11, D, dtype=dtype, generator=generator)
    return Teacher(state_TD, row_AK, TeacherHead(norm, bias_V, LogitScaling(factor=0.7, cap=2.0)))


def plain_weights(cross_entropy_AK: Tensor, weights_AK: Tensor, alpha: float | None) -> Tensor:
    """The sums and products of the paper, one by one."""
    if alpha is None:
        return weights_AK
    out_AK = torch.zeros_like(cross_entropy_AK)
    for a, k in (weights_AK != 0).nonzero().tolist():
        for j in range(k, K):
            if weights_AK[a, j] != 0:
                counting = [i for i in range(1, j + 1) if weights_AK[a, i] != 0]
                out_AK[a, k] += torch.stack([(1 - alpha) * torch.exp(-cross_entropy_AK[a, i]) + alpha for i in counting]).prod()
    return out_AK


def plain(
    hidden_AKD: Tensor,
    head_VD: Tensor,
    labels_AK: Tensor,
    weights_AK: Tensor,
    objective: Objective = CROSS_ENTROPY,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum and weights."""
    log_q_AKV = (hidden_AKD @ head_VD.T).to(torch.promote_types(head_VD.dtype, torch.float32)).log_softmax(-1)
    loss_AK = cross_entropy_AK = F.nll_loss(log_q_AKV.flatten(0, 1), labels_AK.flatten(), reduction="none").view(A, K)
    if teacher is not None:
        head = teacher.head
        product_AKV = head.norm(teacher.state_TD[teacher.row_AK.clamp(min=0)]) @ head_VD.T
        logits_AKV = torch.tanh((product_AKV + head.bias_V) * head.scaling.factor / head.scaling.cap) * head.scaling.cap
        log_p_AKV = logits_AKV.log_softmax(-1)
        kl_AK = (log_p_AKV.exp() * (log_p_AKV - log_q_AKV)).sum(-1)
        tv_AK = 0.5 * (log_p_AKV.exp() - log_q_AKV.exp()).abs().sum(-1)
        loss_AK = (1 - objective.tv_share) * kl_AK + objective.tv_share * tv_AK
    weights_AK = plain_weights(cross_entropy_AK.detach(), weights_AK, objective.dpace_alpha)
    return (loss_AK * weights_AK)[weights_AK != 0].sum(), weights_AK


def chunked(*arguments: Tensor, chunk_bytes: int, **objective: Objective | Teacher) -> tuple[LossResult, Tensor]:
    result = weighted_loss(*arguments, chunk_bytes, **objective)
    (gradient,) = torch.autograd.grad(3 * result.loss_sum, arguments[0])
    return result, gradient / 3


@pytest.mark.parametrize("chunk_bytes", [ONE_BLOCK, 3 * K * V * 8, 7 * K * V * 8, EVERYTHING])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("dpace_alpha", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("tv_share", [None, 0.0, 0.4, 1.0])
def test_equals_the_plain_computation(
    tv_share: float | None, dpace_alpha: float | None, dtype: torch.dtype, tolerance: float, chunk_bytes: int
) -> None:
    arguments, objective = problem(dtype), Objective(tv_share, dpace_alpha)
    teacher = None if tv_share is None else make_teacher(dtype)
    expected, weights_AK = plain(*arguments, objective, teacher)
    (expected_gradient,) = torch.autograd.grad(expected, arguments[0])
    result, gradient = chunked(*arguments, chunk_bytes=chunk_bytes, objective=objective, teacher=teacher)
    assert result.loss_sum.dtype == result.weight_sum.dtype == dtype
    assert abs(result.loss_sum.item() / expected.item() - 1) < tolerance
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < tolerance
    assert result.weight_sum.item() == pytest.approx(weights_AK.to(dtype).sum().item(), rel=tolerance)
    cross_entropy = chunked(*arguments, chunk_bytes=EVERYTHING)[0]
    torch.testing.assert_close(result.cross_entropy_AK, cross_entropy.cross_entropy_AK)
    assert torch.equal(result.right_AK, cross_entropy.right_AK)


def test_dpace_worked_out_by_hand() -> None:
    # q = 1/2, 1/4, 1 in slots 1 to 3 and alpha 1/2: s = 3/4, 5/8, 1; C = 3/4, 15/32, 15/32
    cross_entropy_AK = torch.tensor([[0.0, math.log(2), math.log(4), 0.0]] * 2)
    counts_AK = torch.tensor([[False, True, True, True], [False, True, True, False]])
    expected = torch.tensor([[0.0, 54 / 32, 30 / 32, 15 / 32], [0.0, 39 / 32, 15 / 32, 0.0]])
    torch.testing.assert_close(dpace_weights(cross_entropy_AK, counts_AK, 0.5), expected)


def test_total_variation_rises_to_1_at_the_last_step() -> None:
    assert [tv_share_at(step, 9, 0.5) for step in range(9)] == [0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1]
    assert [tv_share_at(step, 5, 0.0) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert tv_share_at(0, 1, 0.5) == 0


def test_kl_and_total_variation_worked_out_by_hand() -> None:
    # the drafter gives (1/2, 1/2), the teacher (3/4, 1/4); KL = ln 2 - H(p), its gradient q - p; of the total variation 1/4 the
    # gradient by q is (-1/2, 1/2), so by the logits (-1/4, 1/4)
    head = TeacherHead(torch.nn.Identity(), None, LogitScaling(1.0, None))
    teacher = Teacher(torch.tensor([[math.log(3), 0.0]]), torch.tensor([[-100, 0]]), head)
    arguments = torch.zeros(1, 2, 2, requires_grad=True), torch.eye(2), torch.tensor([[-100, 1]]), torch.tensor([[0.0, 2.0]])
    kl = math.log(2) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    for share, loss_, slope in [(0.0, kl, 0.25), (1.0, 0.25, 0.25), (0.5, (kl + 0.25) / 2, 0.25)]:
        result, gradient = chunked(*arguments, chunk_bytes=ONE_BLOCK, objective=Objective(tv_share=share), teacher=teacher)
        assert result.loss_sum.item() == pytest.approx(2 * loss_, rel=1e-6) and result.weight_sum == 2
        torch.testing.assert_close(gradient, torch.tensor([[[0.0, 0.0], [-2 * slope, 2 * slope]]]))
        torch.testing.assert_close(result.cross_entropy_AK, torch.tensor([[0.0, math.log(2)]]))


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
    result = weighted_loss(hidden_AKD, head_VD, labels_AK, weights_AK, ONE_BLOCK)
    assert torch.equal(result.right_AK, (best_AK == labels_AK) & (weights_AK > 0))
    assert result.right_AK.any()


def test_slots_of_weight_zero_are_never_looked_at() -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    broken = hidden_AKD.detach().clone()
    broken[weights_AK == 0] = float("nan")
    result, gradient = chunked(broken.requires_grad_(), head_VD, labels_AK, weights_AK, chunk_bytes=ONE_BLOCK)
    assert result.loss_sum.item() == weighted_loss(hidden_AKD, head_VD, labels_AK, weights_AK, ONE_BLOCK).loss_sum.item()
    assert gradient.isfinite().all() and (gradient[weights_AK == 0] == 0).all()


def test_confident_and_hopeless_slots_stay_finite() -> None:
    hidden_AKD = torch.tensor([[[0.0], [400.0], [-400.0]]], requires_grad=True)  # logits (400, -400), then (-400, 400); label 0
    arguments = hidden_AKD, torch.tensor([[1.0], [-1.0]]), torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0.0, 1.0, 1.0]])
    result, gradient = chunked(*arguments, chunk_bytes=EVERYTHING)
    assert result.cross_entropy_AK.tolist() == [[0.0, 0.0, 800.0]]
    assert gradient.flatten().tolist() == [0.0, 0.0, -2.0]


@pytest.mark.parametrize("weights", [torch.ones(0, K), torch.zeros(A, K)], ids=["no blocks", "no weight"])
@pytest.mark.parametrize("objective", [Objective(), Objective(0.5), Objective(dpace_alpha=0.5), Objective(0.5, 0.5)])
def test_nothing_that_counts_is_zero_with_a_zero_gradient(weights: Tensor, objective: Objective) -> None:
    hidden_AKD = torch.randn(*weights.shape, D, requires_grad=True)
    teacher = None
    if objective.tv_share is not None:  # a pack without a document has no teacher states at all
        teacher = replace(make_teacher(torch.float32), state_TD=torch.empty(0, D), row_AK=torch.zeros(weights.shape, dtype=torch.long))
    labels = torch.full(weights.shape, -100)
    result, gradient = chunked(hidden_AKD, torch.randn(V, D), labels, weights, chunk_bytes=ONE_BLOCK, objective=objective, teacher=teacher)
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


def test_bf16_head_and_teacher_under_autocast_have_fp32_distances() -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    objective, teacher = Objective(tv_share=0.4, dpace_alpha=0.5), make_teacher(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared = {"objective": objective, "teacher": teacher}
        result, gradient = chunked(hidden_AKD, head_VD.bfloat16(), labels_AK, weights_AK, chunk_bytes=ONE_BLOCK, **shared)
    wide = replace(teacher, state_TD=teacher.state_TD.float(), head=replace(teacher.head, norm=teacher.head.norm.float()))
    expected, _ = plain(hidden_AKD, head_VD.bfloat16().float(), labels_AK, weights_AK, objective, wide)
    (expected_gradient,) = torch.autograd.grad(expected, hidden_AKD)
    assert result.loss_sum.dtype == gradient.dtype == torch.float32
    assert result.loss_sum.item() == pytest.approx(expected.item(), rel=1e-2)
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 2e-2


def test_fp32_head_keeps_fp32_products_under_autocast() -> None:
    arguments = problem(torch.float32)
    outside, gradient_outside = chunked(*arguments, chunk_bytes=EVERYTHING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, gradient_inside = chunked(*arguments, chunk_bytes=EVERYTHING)
    assert torch.equal(outside.loss_sum, inside.loss_sum) and torch.equal(gradient_outside, gradient_inside)


@pytest.mark.parametrize("objective", [Objective(), Objective(0.5, 0.5)], ids=["cross-entropy", "teacher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_held_at_once_are_bounded(dtype: torch.dtype, objective: Objective) -> None:
    """Of everything that torch makes, nothing is larger than the logits of the chunk's blocks; slabs are smaller."""
    hidden_AKD, head_VD, labels_AK, _ = problem(torch.float32)
    teacher = None if objective.tv_share is None else make_teacher(dtype)
    matrices = 1 if teacher is None else 2
    with _Sizes() as seen:
        arguments = hidden_AKD, head_VD.to(dtype), labels_AK.clamp(min=0), torch.ones(A, K).index_fill(1, torch.tensor(0), 0)
        chunked(*arguments, chunk_bytes=2 * matrices * K * V * dtype.itemsize + 1, objective=objective, teacher=teacher)
    assert seen.largest == 2 * K * V  # whole blocks, two at a time
    assert {2 * (K - 1), K - 1} < seen.num_rows and max(seen.num_rows) == 2 * K


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("objective", [Objective(), Objective(0.5, 0.5)], ids=["cross-entropy", "teacher"])
def test_on_a_gpu_it_is_what_it_is_on_the_cpu(objective: Objective, dtype: torch.dtype) -> None:
    hidden_AKD, head_VD, labels_AK, weights_AK = problem(torch.float32)
    teacher = None if objective.tv_share is None else make_teacher(dtype)
    arguments = hidden_AKD, head_VD.to(dtype), labels_AK, weights_AK
    here, gradient_here = chunked(*arguments, chunk_bytes=3 * K * V * 8, objective=objective, teacher=teacher)
    arguments = tuple(argument.detach().cuda() for argument in arguments)
    if teacher is not None:
        head = replace(teacher.head, norm=teacher.head.norm.cuda(), bias_V=teacher.head.bias_V.cuda())
        teacher = Teacher(teacher.state_TD.cuda(), teacher.row_AK.cuda(), head)
    arguments[0].requires_grad_()
    there, gradient_there = chunked(*arguments, chunk_bytes=3 * K * V * 8, objective=objective, teacher=teacher)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert there.loss_sum.item() == pytest.approx(here.loss_sum.item(), rel=tolerance)
    assert (gradient_there.cpu() - gradient_here).norm() / gradient_here.norm() < tolerance


def test_without_a_gradient_only_the_first_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_hidden_gradient", None)
    arguments = problem(torch.float32)
    with torch.no_grad():
        assert weighted_loss(*arguments, ONE_BLOCK).loss_sum > 0


def test_settings_without_effect_are_refused() -> None:
    for setting, message in [
        ({"tv_start": 0.5, "loss": Loss.kl}, r"^train\.tv_start=0\.5 has no effect with train\.loss=kl, only with kl_tv$"),
        ({"dpace_alpha": 0.0}, r"^train\.dpace_alpha=0\.0 has no effect with train\.position_weights=decay, only with dpace$"),
        ({"decay_gamma": 7.0, "position_weights": PositionWeights.dpace}, r"^train\.decay_gamma=7\.0 has no effect with .*=dpace, only"),
        ({"dpace_alpha": 1.1, "position_weights": PositionWeights.dpace}, r"^train\.dpace_alpha=1\.1 must be at least 0 and at most 1"),
        ({"tv_start": 1.0, "loss": Loss.kl_tv}, r"^train\.tv_start=1\.0 must be at least 0 and below 1"),
    ]:
        with pytest.raises(UserError, match=message):
            TrainConfig(**setting)
    assert TrainConfig().resolved_dpace_alpha is None
    assert TrainConfig(position_weights=PositionWeights.dpace).resolved_dpace_alpha == 0.5
    assert TrainConfig(position_weights=PositionWeights.dpace, dpace_alpha=0.0).resolved_dpace_alpha == 0.0


@pytest.mark.parametrize("chosen", [Loss.kl, Loss.tv, Loss.kl_tv])
def test_a_loss_against_the_target_needs_its_states(chosen: Loss) -> None:
    layers, drafter, settings = {"layer_ids": [1, 3]}, DrafterConfig(mask_token_id=300), TrainConfig(loss=chosen)
    with pytest.raises(UserError, match=rf"^train\.loss={chosen} needs .* features\.teacher_state=true"):
        Config(features=FeaturesConfig(**layers), drafter=drafter, train=settings)
    Config(features=FeaturesConfig(**layers, teacher_state=True), drafter=drafter, train=settings)


class _Sizes(TorchDispatchMode):
    """Rows of the matrices [*, V], and elements of the largest tensor, that came out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: set[int] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else []:
            self.largest = max(self.largest, tensor.numel())
            self.num_rows |= {len(tensor)} if tensor.shape[1:] == (V,) else set()
        return out
