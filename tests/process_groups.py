"""Process groups of several sizes from one script: forked after the imports, which cost more seconds than the work on tiny models.

The script may have imported anything but computed nothing: threads of torch do not survive a fork. The store lives in a process of its
own, as torchrun keeps it: where rank 0 has it, the others can hang when rank 0 ends first.
"""

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore


def run_group(size: int, work: Callable[[], None]) -> None:
    """Runs `work` in `size` new processes that find each other as torchrun's do; one alone knows of no launcher.

    Raises SystemExit when one of them failed.
    """
    store, port = _start_store()
    ranks = [_fork(lambda rank=rank: (os.environ.update(_environment(rank, size, port)), work())) for rank in range(size)]
    failed = [os.waitpid(rank, 0)[1] for rank in ranks]
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    if any(failed):
        raise SystemExit(f"wait statuses of {size} processes: {failed}")


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    if size == 1:
        return {}
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in (who | where).items()}


def _start_store() -> tuple[int, int]:
    """A process with a store, and the store's port."""
    reader, writer = os.pipe()

    def serve() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        os.write(writer, str(store.port).encode())
        signal.pause()

    process = _fork(serve)
    return process, int(os.read(reader, 16))


def _fork(work: Callable[[], object]) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            atexit._run_exitfuncs()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:  # taking the modules down would cost more seconds than the work
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return process
