"""Errors of reading or writing a checkpoint: the checkpoint is damaged, or the machine cannot access it now.

A lack of memory, file handles or permissions says nothing about the files: they may be intact.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from engines.errors import CheckpointError, DamagedError, UnreadableError
from engines.regular_file import NotRegularError

__all__ = ["describe_remedy", "find_errno", "make_damaged_error", "make_read_error"]

_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG, errno.ENAMETOOLONG)

_HANDLES = "Close what else is open, or allow more open files (ulimit -n), and try again."
_PERMISSION = "Have it made readable for this user (chmod u+rX), or work as the user that wrote it."
_MENDS = {
    errno.ENOMEM: "End other programs, or take a machine with more memory, and try again.",
    errno.EMFILE: _HANDLES,
    errno.ENFILE: _HANDLES,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EIO: "The disk, or the way to it, has failed: look into the system's log, and try again.",
}
_USUAL_MEND = "Try again when the system can reach it."
_NO_MEMORY = re.compile(r"allocate memory|not enough memory|out of memory", re.IGNORECASE)


def find_errno(error: BaseException) -> int | None:
    """Return the errno of the operating-system error behind `error`; None if the error concerns the file's contents.

    Libraries report some errors of the system only as text.

    >>> find_errno(RuntimeError("unable to open file: Too many open files (24)")) == errno.EMFILE
    True
    >>> find_errno(MemoryError()) == errno.ENOMEM, find_errno(ValueError("Permission denied"))
    (True, None)
    """
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, NotRegularError | LookupError | TypeError | ValueError | ArithmeticError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return None if error.errno in _OF_THE_FILE else error.errno
    text = str(error)
    if said := re.search(r"os error (\d+)", text):
        return None if int(said[1]) in _OF_THE_FILE else int(said[1])
    if _NO_MEMORY.search(text):
        return errno.ENOMEM
    return next((number for number in _MENDS if os.strerror(number) in text), None)


def describe_remedy(number: int) -> str:
    """Return a sentence that says what helps against an error of the system.

    >>> describe_remedy(errno.EMFILE)
    'Close what else is open, or allow more open files (ulimit -n), and try again.'
    """
    return _MENDS.get(number, _USUAL_MEND)


def make_damaged_error(path: Path, why: str) -> DamagedError:
    """Return the error for a checkpoint that is not as it was written."""
    return DamagedError(f"{path}: this checkpoint is damaged: {why}. Load another one of {path.parent}.", why)


def make_read_error(path: Path, what: str, error: BaseException) -> CheckpointError:
    """Return the error to raise if reading `what` of the checkpoint at `path` has raised `error`."""
    number = find_errno(error)
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    if number is None:
        return make_damaged_error(path, f"{what} cannot be read: {said}" if what else said)
    return UnreadableError(
        f"{path}: {what or 'it'} cannot be read now: {os.strerror(number)}. That says nothing of the checkpoint, which "
        f"may be whole. {describe_remedy(number)}"
    )
