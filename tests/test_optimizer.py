"""The learning rate at points worked out by hand, what AdamW does to norms, and Muon beside it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_train.config import OptimizerKind, Schedule, TrainConfig
from dflash_train.errors import UserError
from dflash_train.optimizer import DrafterOptimizer, lr_at, make_optimizer

C27 = json.loads((Path(__file__).parent / "data" / "cases" / "C27.json").read_text())


def test_cosine_with_warmup_at_points_worked_out_by_hand() -> None:
    # 100 steps, 4 of warm-up: 1/4, 2/4, 3/4, 4/4; half the peak half-way between step 4 and step 100
    rates = {step: lr_at(step, 100, 2.0, 0.04, Schedule.cosine) for step in range(100)}
    assert [rates[step] for step in (0, 1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[52] == pytest.approx(1.0)
    assert rates[28] == pytest.approx(1 + 0.5**0.5)
    assert 0 < rates[99] < 0.002


def test_constant_after_the_warmup() -> None:
    assert [lr_at(step, 10, 3.0, 0.2, Schedule.constant) for step in (0, 1, 2, 9)] == [1.5, 3.0, 3.0, 3.0]


def test_wsd_stays_and_then_falls_linearly_to_nothing_at_the_end() -> None:
    # 20 steps: 2 of warm-up, the last 4 fall: 4/4, 3/4, 2/4, 1/4, and 0 at step 20
    rates = [lr_at(step, 20, 4.0, 0.1, Schedule.wsd, decay_share=0.2) for step in range(21)]
    assert rates == [2.0, 4.0] + [4.0] * 14 + [4.0, 3.0, 2.0, 1.0, 0.0]
    assert lr_at(0, 1, 3.0, 0.04, Schedule.wsd) == 3.0
    assert [lr_at(step, 4, 8.0, 0.0, Schedule.wsd, decay_share=1.0) for step in range(4)] == [8.0, 6.0, 4.0, 2.0]


def test_without_warmup_and_with_a_single_step() -> None:
    assert lr_at(0, 10, 3.0, 0.0, Schedule.cosine) == 3.0
    assert lr_at(0, 1, 3.0, 0.04, Schedule.cosine) == 3.0


def test_decay_spares_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.data.fill_(1.0)
    optimizer = make_optimizer(model, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_lr(0.1)
    optimizer.step()
    assert model[0].weight.tolist() == [[pytest.approx(0.95)] * 2] * 2  # 1 - 0.1 * 0.5
    assert model[1].weight.tolist() == [1.0, 1.0]


def test_c27_a_norm_weight_moves_at_a_small_learning_rate() -> None:
    norm = nn.RMSNorm(1)
    optimizer = make_optimizer(norm, weight_decay=0.0)
    for _ in range(100):
        norm.weight.grad = torch.ones_like(norm.weight)
        optimizer.set_lr(6e-4)
        optimizer.step()
    assert norm.weight.item() == pytest.approx(C27["seen"]["fp32_param"], abs=1e-4)


def test_c27_bf16_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16: master weights are fp32"):
        make_optimizer(nn.RMSNorm(1).bfloat16(), weight_decay=0.0)


def stepped(optimizer: DrafterOptimizer, lr: float, num_steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.set_lr(lr)
        optimizer.step()


def test_muon_moves_matrices_as_far_as_adamw_and_leaves_vectors_to_it() -> None:
    moved = {}
    for kind in OptimizerKind:
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.LayerNorm(64))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        stepped(make_optimizer(model, weight_decay=0.0, kind=kind), lr=1e-2)
        moved[kind] = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    assert torch.equal(moved["muon"]["1.weight"], moved["adamw"]["1.weight"])
    singular_values = torch.linalg.svdvals(moved["muon"]["0.weight"])
    assert singular_values.max() < 2 * singular_values.min()  # orthogonalised
    # AdamW's first step is lr per weight; Muon's aims at 0.2 lr, which is AdamW's size later in a training
    assert moved["muon"]["0.weight"].square().mean().sqrt() == pytest.approx(0.2 * 1e-2, rel=0.3)


def test_muon_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.data.fill_(1.0)
    optimizer = make_optimizer(model, weight_decay=0.5, kind=OptimizerKind.muon)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_lr(0.1)
    optimizer.step()
    assert model[0].weight.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert model[1].weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", OptimizerKind)
def test_a_state_goes_on_in_another_optimizer(kind: OptimizerKind) -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)) for _ in range(2)]
    first, second = (make_optimizer(model, 0.01, kind) for model in models)
    assert first.tensors() == {}
    stepped(first, 1e-3, num_steps=2)
    models[1].load_state_dict(models[0].state_dict())
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()})
    assert ("0.weight/momentum_buffer" in first.tensors()) == (kind is OptimizerKind.muon)
    assert "1.weight/exp_avg" in first.tensors()
    for optimizer in (first, second):
        stepped(optimizer, 1e-3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_torch_without_muon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"train\.optimizer=muon needs torch 2\.9 or later, installed is .*; allowed here: adamw"):
        make_optimizer(nn.Linear(2, 2), weight_decay=0.0, kind=OptimizerKind.muon)


def test_a_decay_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.decay_share=0\.3 has no effect with train\.schedule=cosine, only with wsd"):
        TrainConfig(decay_share=0.3)
    with pytest.raises(UserError, match=r"train\.decay_share=0\.95 must .* leave room for train\.warmup_share=0\.1: at most 0\.9"):
        TrainConfig(schedule=Schedule.wsd, decay_share=0.95, warmup_share=0.1)
    assert TrainConfig(schedule=Schedule.wsd, decay_share=0.1, warmup_share=0.9).resolved_decay_share == 0.1
    assert TrainConfig(schedule=Schedule.wsd).resolved_decay_share == 0.2
    with pytest.raises(UserError, match=r"train\.ema=1\.0 must lie between 0 and 1"):
        TrainConfig(ema=1.0)
