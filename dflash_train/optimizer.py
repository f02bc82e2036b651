"""What moves the drafter's fp32 weights, and the learning rate of every optimizer step as a pure function.

Matrices take AdamW or Muon (`train.optimizer`), norms and other vectors always AdamW without decay. Muon is `torch.optim.Muon` (Jordan et
al. 2024) with the scale of arXiv 2502.16982, under which its updates are as large as AdamW's, so that one learning rate serves both. It
orthogonalises in bf16: from one number of processes to another, losses agree less closely than AdamW's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_train.config import OptimizerKind, Schedule
from dflash_train.errors import UserError


@dataclass(frozen=True)
class DrafterOptimizer:
    """One or two optimizers that share out `parameters`, behind one step. The learning rate is set before each step (`set_lr`)."""

    parameters: dict[str, nn.Parameter]
    parts: list[torch.optim.Optimizer]

    def zero_grad(self) -> None:
        """Forgets the gradients of every parameter."""
        for part in self.parts:
            part.zero_grad()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step, for every parameter."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        """Moves every parameter once."""
        for part in self.parts:
            part.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state as `NAME/KEY`, e.g. `fc.weight/exp_avg`; empty before the first step."""
        states = [(name, part.state[p]) for part in self.parts for name, p in self.parameters.items() if p in part.state]
        return {f"{name}/{key}": value for name, state in states for key, value in state.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over a state that `tensors` gave; hyper-parameters stay as they are."""
        parts = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for name, tensor in tensors.items():
            parameter_name, key = name.rsplit("/", 1)
            parameter = self.parameters[parameter_name]
            parts[parameter].state[parameter][key] = tensor.to(parameter.device)


def make_optimizer(model: nn.Module, weight_decay: float, kind: OptimizerKind = OptimizerKind.adamw) -> DrafterOptimizer:
    """The optimizer of `model`, whose decay spares norms and every other vector.

    Raises ValueError for a parameter that is not fp32: bf16 weights near 1 do not move at the learning rates used here. Raises UserError
    when torch has no Muon.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: master weights are fp32")
    matrices = {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}
    parts = []
    if kind is OptimizerKind.muon:
        parts, matrices = [_muon(matrices)], {"params": []}
    groups = [group for group in (matrices, vectors) if group["params"]]
    return DrafterOptimizer(parameters, parts + [torch.optim.AdamW(groups, fused=True)] * bool(groups))


def _muon(matrices: dict) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"train.optimizer=muon needs torch 2.9 or later, installed is {torch.__version__}; allowed here: adamw")
    return torch.optim.Muon([matrices], adjust_lr_fn="match_rms_adamw")


def lr_at(step: int, total_steps: int, peak: float, warmup_share: float, schedule: Schedule, decay_share: float = 0.2) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`.

    It rises linearly to `peak` at the last of the warm-up steps (`warmup_share` of all, rounded). Then it stays (constant), falls along
    half a cosine (cosine), or stays and falls linearly over the last steps (wsd: `decay_share` of all, rounded). What falls would reach 0
    at step `total_steps`.
    """
    warmup_steps = round(warmup_share * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    match schedule:
        case Schedule.constant:
            return peak
        case Schedule.cosine:
            done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case Schedule.wsd:
            return peak * min(1.0, (total_steps - step) / max(1, round(decay_share * total_steps)))
