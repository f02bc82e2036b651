"""AdamW on the drafter's fp32 weights, and the learning rate of every optimizer step as a pure function."""

import math

import torch
from torch import nn

from dflash_train.config import Schedule


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW whose decay spares norms and every other vector. The learning rate is set before each step (`set_lr`).

    Raises ValueError for a parameter that is not fp32: bf16 weights near 1 do not move at the learning rates used here.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: master weights are fp32")
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True)


def lr_at(step: int, total_steps: int, peak: float, warmup_share: float, schedule: Schedule) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`.

    It rises linearly to `peak` at the last of the warm-up steps (`warmup_share` of all, rounded), then stays or falls along half a
    cosine that would reach 0 at step `total_steps`.
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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
