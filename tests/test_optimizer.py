"""The learning rate at points worked out by hand, and what AdamW does to norms."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_train.config import Schedule
from dflash_train.optimizer import lr_at, make_optimizer, set_lr

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


def test_without_warmup_and_with_a_single_step() -> None:
    assert lr_at(0, 10, 3.0, 0.0, Schedule.cosine) == 3.0
    assert lr_at(0, 1, 3.0, 0.04, Schedule.cosine) == 3.0


def test_decay_spares_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.data.fill_(1.0)
    optimizer = make_optimizer(model, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.1)
    optimizer.step()
    assert model[0].weight.tolist() == [[pytest.approx(0.95)] * 2] * 2  # 1 - 0.1 * 0.5
    assert model[1].weight.tolist() == [1.0, 1.0]


def test_c27_a_norm_weight_moves_at_a_small_learning_rate() -> None:
    norm = nn.RMSNorm(1)
    optimizer = make_optimizer(norm, weight_decay=0.0)
    for _ in range(100):
        norm.weight.grad = torch.ones_like(norm.weight)
        set_lr(optimizer, 6e-4)
        optimizer.step()
    assert norm.weight.item() == pytest.approx(C27["seen"]["fp32_param"], abs=1e-4)


def test_c27_bf16_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16: master weights are fp32"):
        make_optimizer(nn.RMSNorm(1).bfloat16(), weight_decay=0.0)
