"""Starts Accelerate the one way that is right with and without GPUs, and refuses launches that would be several independent jobs."""

import os
from datetime import timedelta

from dflash_train.errors import UserError


def make_accelerator(mixed_precision: str = "no"):
    """An `Accelerator` on this process's GPU, or on the CPU with gloo when there is none.

    Raises UserError when a launcher started several processes that do not know of each other (Accelerate 1.15 on CPU without
    `cpu=True`, or a launcher that sets `WORLD_SIZE` for something else): they would all write the same files.
    """
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed_precision, kwargs_handlers=[patience])
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if expected != accelerator.num_processes:
        raise UserError(
            f"WORLD_SIZE={expected} but Accelerate runs {accelerator.num_processes} process(es): the launch would start independent jobs "
            "that write the same files; without a GPU use `accelerate launch --multi_gpu --num_processes N` or `torchrun`"
        )
    return accelerator


def refuse_several_processes(stage: str) -> None:
    """Raises UserError when a stage that runs on one process was started on several."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UserError(f"stage={stage} runs on one process, but WORLD_SIZE={world}: start it with `python -m dflash_train stage={stage}`")
