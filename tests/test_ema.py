"""The average at values worked out by hand, and the swap that leaves no trace."""

import pytest
import torch
from torch import nn

from dflash_train.ema import Ema


def test_early_steps_decay_faster() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    ema = Ema(model, decay=0.5)
    averages = []
    for step in range(10):
        model.weight.data.fill_(10.0 * (step + 1))
        ema.update(step)
        averages.append(ema.tensors["weight"].item())
    # decays 1/10, 2/11 and from step 8 on (9/18) one half
    assert averages[0] == pytest.approx(9.0)
    assert averages[1] == pytest.approx(2 / 11 * 9 + 9 / 11 * 20)
    assert averages[9] == pytest.approx((averages[8] + 100) / 2)


def test_within_the_swap_the_model_is_the_average() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, decay=0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update(1000)
    trained, averaged = model.weight.detach().clone(), ema.tensors["weight"].clone()
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt), ema.swapped():
        assert torch.equal(model.weight, averaged) and torch.equal(ema.tensors["weight"], trained)
        raise KeyboardInterrupt
    assert torch.equal(model.weight, trained) and torch.equal(ema.tensors["weight"], averaged)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_an_average_goes_on_from_its_tensors() -> None:
    model = nn.Linear(2, 2)
    first = Ema(model, decay=0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    first.update(3)
    second = Ema(model, decay=0.9)
    second.load(first.tensors)
    for ema in (first, second):
        ema.update(4)
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
