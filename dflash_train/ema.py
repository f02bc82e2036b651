"""A moving average of the weights: smoother than the weights of any one step, and often the better drafter.

Comes in: the drafter after each step that moved it. Goes out: fp32 tensors under the drafter's own names. Every process keeps the same
average, because every process takes the same steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The average of `model`'s parameters with `decay` per optimizer step; `tensors` holds it by name."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after optimizer step `step` (0-based).

        Early steps decay faster, by (1 + step) / (10 + step), so that a short run is not an average with its first weights.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), [p.data for p in self.parameters.values()], 1 - decay)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from `tensors`, which an `Ema` of the same model held."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, the model computes with the average: the two change places, nothing is copied. No step may be taken within."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data, self.tensors[name] = self.tensors[name], parameter.data
