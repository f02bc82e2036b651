"""Whole files only: written under a temporary name in the same folder, synced, then renamed.

A reader never sees half a file under its final name, whatever moment the process is killed at; leftovers of killed writers carry
the `.tmp-` prefix and are removed by the next writer of the same name. No two writers share a temporary name: a process that outlived
its killed launcher may still be writing, and must not rename what its successor has only begun; when its file is gone it fails.
"""

import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dflash_train.errors import UserError

TEMPORARY_PREFIX = ".tmp-"
_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the caller writes a file or a folder there, and on a clean exit it becomes `path`.

    An existing file is replaced; an existing folder is not (FileExistsError). Raises UserError when the disk is full or the
    folder is not writable.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        for leftover in path.parent.glob(f"{TEMPORARY_PREFIX}{'?' * 8}-{glob.escape(path.name)}"):
            _remove(leftover)
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            _finish(written)
        if temporary.is_dir() and path.exists():
            raise FileExistsError(path)
        os.replace(temporary, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps what the disk says
        _remove(temporary)
        if isinstance(error, FileExistsError):
            raise
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    except BaseException:
        _remove(temporary)
        raise


def remove_leftovers(folder: Path) -> None:
    """Removes what killed writers left in `folder`, so that it takes no space. Nobody may be writing there."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        _remove(leftover)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as readable JSON atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish(path: Path) -> None:
    """Gives a file the mode every other program would (safetensors' own is for its owner alone) and brings it to the disk."""
    if path.is_file():
        path.chmod(0o666 & ~_UMASK)
    _sync(path)
