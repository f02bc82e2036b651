"""Whole files only, whatever happens while they are written."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from dflash_train.atomic import TEMPORARY_PREFIX, atomic_path, write_json, write_text
from dflash_train.errors import UserError


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_appears_whole_with_the_umasks_mode(tmp_path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    with atomic_path(tmp_path / "a") as temporary:
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
        assert left(tmp_path) == {temporary.name} and temporary.name.startswith(TEMPORARY_PREFIX)
    assert left(tmp_path) == {"a"} and (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert left(tmp_path) == {"a"} and (tmp_path / "a").read_text() == "old"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write .*a: No space left on device"), atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not left(tmp_path)


def test_a_full_disk_under_safetensors_is_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write .*a: "), atomic_path(tmp_path / "a"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    assert not left(tmp_path)


def test_what_a_killed_writer_left_does_not_stop_the_next(tmp_path: Path) -> None:
    half = tmp_path / f"{TEMPORARY_PREFIX}0a1b2c3d-a"
    half.mkdir()
    (half / "half").touch()
    with atomic_path(tmp_path / "a") as temporary:
        temporary.mkdir()
        (temporary / "whole").touch()
    assert left(tmp_path) == {"a"} and left(tmp_path / "a") == {"whole"}


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError), atomic_path(tmp_path / "a") as temporary:
        temporary.mkdir()
    assert left(tmp_path) == {"a"}


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"tau": float("nan")})
    assert not left(tmp_path)


def test_a_writer_that_was_succeeded_fails_and_renames_nothing(tmp_path):
    """A process that outlived its killed launcher, and the next launch, write the same file at the same time."""
    path = tmp_path / "file"
    with pytest.raises(UserError, match="cannot write .*file: No such file"), atomic_path(path) as outlived:
        outlived.write_text("half of")
        with atomic_path(path) as successor:
            successor.write_text("all of it")
        assert successor != outlived
    assert path.read_text() == "all of it" and [entry.name for entry in tmp_path.iterdir()] == ["file"]
