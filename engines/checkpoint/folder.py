"""A folder of checkpoints: which is the newest, how one comes to be there whole or not at all, which are kept.

    FOLDER/00007-step-350/       a checkpoint; the one with the highest first number is the newest
    FOLDER/00008-step-400/
    FOLDER/.partial-00009/       being written, or left by a training that was killed: no checkpoint, removed next time

A checkpoint is written under its partial name, forced to the disk, and then renamed: one operation of the file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engines.checkpoint.checkpoint_errors import make_read_error
from engines.errors import CheckpointError
from engines.working_folder import make_absolute

__all__ = [
    "MANIFEST",
    "check_space",
    "create_draft",
    "find_checkpoints",
    "get_free_bytes",
    "is_outside_link",
    "list_checkpoints",
    "lock_folder",
    "make_space_error",
    "prune",
    "publish_draft",
]

MANIFEST = "checkpoint.json"
"""The file that makes a folder a checkpoint."""

_NAME = re.compile(r"(\d+)-step-\d+")
_PARTIAL = ".partial-"


def list_checkpoints(folder: Path) -> list[Path]:
    """Those of a folder, the oldest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those that it holds, the newest first. Raises CheckpointError."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError
        if _is_present(path / MANIFEST):
            return [path]
        found = list_checkpoints(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path}: there is no such folder. Name a checkpoint, or a folder of checkpoints."
        ) from None
    except OSError as error:
        raise make_read_error(path, "the list of its checkpoints", error) from error
    if not found and _NAME.fullmatch(path.name):
        return [path]  # one that has lost what says of it that it is one
    if not found:
        raise CheckpointError(f"{path}: there is no checkpoint in this folder.")
    return found[::-1]


def _is_present(path: Path) -> bool:
    """Whether something is there, of whatever kind. Raises OSError where that can't be told."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_outside_link(path: Path) -> bool:
    """Whether a checkpoint of a folder is a link that leads out of it, to what was not given."""
    return path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Made if need be, and ours alone: another training's half-written checkpoint must not be taken for a leftover.

    The system lets go of the lock when the process ends, in whatever way. Raises CheckpointError, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{folder}: another training is saving into this folder. Give each training a folder of its own."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
                raise
        yield
    finally:
        os.close(handle)


def create_draft(folder: Path) -> Path:
    """An empty folder to write the next checkpoint into; what was left by killed trainings is removed."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)
    made = folder / f"{_PARTIAL}{_find_next_number(folder):05}"
    made.mkdir()
    return made


def _find_next_number(folder: Path) -> int:
    return max((int(path.name.partition("-")[0]) for path in list_checkpoints(folder)), default=0) + 1


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises CheckpointError where the disk has less than that."""
    if (free := get_free_bytes(folder)) < needed_bytes:
        raise make_space_error(folder, needed_bytes, free)


def get_free_bytes(folder: Path) -> int:
    """Of the disk that a folder is on, or will be."""
    there = next(path for path in (make_absolute(folder), *make_absolute(folder).parents) if path.exists())
    return shutil.disk_usage(there).free


def make_space_error(folder: Path, needed_bytes: int, free: int, said: str = "") -> CheckpointError:
    """What is said where a checkpoint does not fit."""
    return CheckpointError(
        f"{folder}: a checkpoint needs {needed_bytes:,} bytes, but there are {free:,} free{said and f' ({said})'}. The "
        "checkpoints that are there are as they were, and the training can go on. Free some space, keep fewer, or save "
        "elsewhere."
    )


def publish_draft(written: Path, step: int) -> Path:
    """Rename a draft, whose files are forced to the disk already, to the checkpoint that it is."""
    flush_to_disk(written)
    whole = written.with_name(f"{written.name.removeprefix(_PARTIAL)}-step-{step}")
    written.rename(whole)
    flush_to_disk(written.parent)
    return whole


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep`, as far as they can be. One that is half removed is a leftover, no checkpoint."""
    for path in list_checkpoints(folder)[:-keep]:
        gone = path.with_name(f"{_PARTIAL}old-{path.name}")
        with suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone)
