"""Starts Accelerate the one way that is right with and without GPUs, and refuses launches that would be several independent jobs.

Also hears the signals with which a cluster asks a job to end.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_train.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

_T = TypeVar("_T")
_KEPT: list[object] = []
_PATIENCE = timedelta(hours=2)  # how long a process waits for the others, which may have longer shards or answers to finish
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # who launched says how many processes there are


def make_accelerator(mixed_precision: str = "no") -> "Accelerator":
    """An `Accelerator` on this process's GPU, or on the CPU with gloo when there is none.

    Raises UserError when a launcher started several processes that would not know of each other: they would all write the same files.
    Accelerate 1.15 does that on a CPU unless it is told `cpu=True`, and so does `srun` without a launcher.
    """
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    launched = launched_processes()
    if launched > 1 and "MASTER_ADDR" not in os.environ:
        raise _independent_jobs(launched, 1)
    patience = InitProcessGroupKwargs(timeout=_PATIENCE)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed_precision, kwargs_handlers=[patience])
    if launched != accelerator.num_processes:
        raise _independent_jobs(launched, accelerator.num_processes)
    if accelerator.distributed_type not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise UserError(f"Accelerate is configured for {accelerator.distributed_type}: training here is DDP, so launch with --multi_gpu")
    atexit.register(_leave)
    return accelerator


def keep_until_exit(model: _T) -> _T:
    """Holds a model that DDP wraps, and returns it: dropping it right after a collective can deadlock.

    Its destructor joins gloo's thread while it holds Python's lock, for which that thread may wait to free a tensor (torch 2.13).
    """
    _KEPT.append(model)
    return model


def _leave() -> None:
    """Ends the process group: gloo's threads, left running at the interpreter's end, abort the process now and then."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def from_main_process(accelerator: "Accelerator", work: Callable[[], _T]) -> _T:
    """What `work` returns on the main process, on every process; the others wait for it.

    When it raises UserError there, the others end as well, without a word: the mistake is told once, and nobody waits in vain.
    """
    from accelerate.utils import broadcast_object_list

    result: _T | None = None
    mistake: UserError | None = None
    if accelerator.is_main_process:
        try:
            result = work()
        except UserError as error:
            mistake = error
    result, failed = broadcast_object_list([result, mistake is not None])
    if mistake is not None:
        raise mistake
    if failed:
        raise SystemExit(1)
    return result


class StopRequest:
    """Within it, SIGTERM and SIGUSR1 are only noted in `came`; what they did before is restored at its end.

    Python sets handlers in its main thread only: in another one nothing is noted and nothing changes.
    """

    def __init__(self) -> None:
        self.came = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def launched_processes() -> int:
    """How many processes the launcher says it started."""
    return next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)


def refuse_several_processes(stage: str) -> None:
    """Raises UserError when a stage that runs on one process was started on several."""
    launched = launched_processes()
    if launched > 1:
        raise UserError(
            f"stage={stage} runs on one process, {launched} were launched: start it with `python -m dflash_train stage={stage} ...`"
        )


def _independent_jobs(launched: int, joined: int) -> UserError:
    return UserError(
        f"{launched} processes were launched but Accelerate joins {joined}: they would be independent jobs that write the same files; "
        "use `accelerate launch` or `torchrun` (without a GPU: `accelerate launch --multi_gpu --num_processes N`)"
    )
