"""The folder of checkpoints: names, the newest whole one, and errors of reading or writing one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mpi4dl_nb.engines.errors import CheckpointError, DamagedError, UnreadableError, make_absolute
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.images.regular_file import NotRegularError

# Errors of reading or writing a checkpoint: the checkpoint is damaged, or the machine cannot access it now.
#
# A lack of memory, file handles or permissions says nothing about the files: they may be intact.

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
    if match := re.search(r"os error (\d+)", text):
        return None if int(match[1]) in _OF_THE_FILE else int(match[1])
    if _NO_MEMORY.search(text):
        return errno.ENOMEM
    return next((code for code in _MENDS if os.strerror(code) in text), None)


def describe_remedy(number: int | None) -> str:
    """Return a sentence that says what helps against an error of the system.

    >>> describe_remedy(errno.EMFILE)
    'Close what else is open, or allow more open files (ulimit -n), and try again.'
    """
    return _USUAL_MEND if number is None else _MENDS.get(number, _USUAL_MEND)


def make_damaged_error(path: Path, why: str) -> DamagedError:
    """Return the error for a checkpoint that is not as it was written."""
    return DamagedError(f"{path}: this checkpoint is damaged: {why}. Load another one of {path.parent}.", why)


def make_read_error(path: Path, what: str, error: BaseException) -> CheckpointError:
    """Return the error to raise if reading `what` of the checkpoint at `path` has raised `error`."""
    code = find_errno(error)
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    if code is None:
        return make_damaged_error(path, f"{what} cannot be read: {reason}" if what else reason)
    return UnreadableError(
        f"{path}: {what or 'it'} cannot be read now: {os.strerror(code)}. That says nothing of the checkpoint, which "
        f"may be whole. {describe_remedy(code)}"
    )


# A folder of checkpoints: find the newest one, publish a new one atomically, and remove old ones.
#
#     FOLDER/00007-step-350/       a checkpoint; the one with the highest first number is the newest
#     FOLDER/00008-step-400/
#     FOLDER/.partial-00009/       a draft: being written, or left by a killed training and removed by the next save
#     FOLDER/.lock                 while a training saves
#
# A checkpoint is written under its partial name, flushed to disk, and then renamed, which file systems do atomically.


MANIFEST = "checkpoint.json"
"""The file that makes a folder a checkpoint."""

_NAME = re.compile(r"(\d+)-step-(\d+)")
_PARTIAL = ".partial-"
_LOCK = ".lock"


def get_named_step(path: Path) -> int | None:
    """Return the number of steps that a checkpoint's name states; None if it has another name.

    >>> get_named_step(Path("runs/00007-step-350")), get_named_step(Path("best"))
    (350, None)
    """
    match = _NAME.fullmatch(path.name)
    return int(match[2]) if match else None


def get_number(path: Path) -> int:
    """Return the number with which a checkpoint's name begins, by which they are sorted: 100000 comes after 99999."""
    return int(path.name.partition("-")[0])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the oldest first."""
    numbered = sorted((get_number(path), path) for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return [path for _, path in numbered if path.is_dir()]


def find_checkpoints(path: Path) -> list[Path]:
    """Return `[path]` if it is a checkpoint, else the checkpoints in it, the newest first. Raises CheckpointError."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError
        # Only a manifest that is missing for sure makes it a folder of checkpoints; one of any type counts as present.
        with suppress(FileNotFoundError, NotADirectoryError):
            (path / MANIFEST).lstat()
            return [path]
        checkpoints = list_checkpoints(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path}: there is no such folder. Name a checkpoint, or a folder of checkpoints."
        ) from None
    except OSError as error:
        raise make_read_error(path, "the list of its checkpoints", error) from error
    if not checkpoints and _NAME.fullmatch(path.name):
        return [path]  # a checkpoint by its name, but without its manifest
    if not checkpoints:
        raise CheckpointError(f"{path}: there is no checkpoint in this folder.")
    return checkpoints[::-1]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if necessary and hold an exclusive lock on it.

    Without the lock, another training's draft could be taken for a leftover and removed. The system releases the lock
    when the process ends, however it ends. Raises CheckpointError, OSError.
    """
    # Anyone who may read a file can lock it, and so block whoever saves: the lock is on a file that its owner alone may
    # open, not on the folder.
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    handle = _take_lock(path)
    # The file goes before the lock: who has opened it meanwhile sees that it is no longer the one in the folder.
    while not _is_same_file(handle, path):
        os.close(handle)
        handle = _take_lock(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _take_lock(path: Path) -> int:
    """Return an open handle of the lock file at `path`, which is locked. Raises CheckpointError, OSError."""
    folder = path.parent
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        if not path.exists():
            raise
        raise CheckpointError(
            f"{path} is of another user, who is saving into this folder, or was stopped while doing so. Give each "
            "training a folder of its own."
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # file systems without locks go unlocked
            return handle
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        raise CheckpointError(
            f"{folder}: another training is saving into this folder. Give each training a folder of its own."
        ) from error
    return handle


def _is_same_file(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def create_draft(folder: Path) -> Path:
    """Create an empty folder for the next checkpoint, after removing the drafts of killed trainings."""
    # Safe only under `lock_folder`: no other process is writing any of these.
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)
    next_number = max(map(get_number, list_checkpoints(folder)), default=0) + 1
    draft = folder / f"{_PARTIAL}{next_number:05}"
    draft.mkdir()
    return draft


def get_free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is on, or will be on."""
    # `folder` may not exist yet: its nearest existing parent is on the same disk, unless one is mounted in between.
    there = next(path for path in (make_absolute(folder), *make_absolute(folder).parents) if path.exists())
    return shutil.disk_usage(there).free


def make_space_error(folder: Path, needed_bytes: int, free: int, reason: str = "") -> CheckpointError:
    """Return the error for a checkpoint that does not fit on the disk."""
    return CheckpointError(
        f"{folder}: a checkpoint needs {format_bytes(needed_bytes)}, but there are {format_bytes(free)} free"
        f"{reason and f' ({reason})'}. The checkpoints that are there are as they were, and the training can go on. "
        "Free some space, keep fewer, or save elsewhere."
    )


def publish_draft(written: Path, step: int) -> Path:
    """Rename a draft, whose files are on disk already, to its final name and return that.

    The caller flushes the folder, which makes the rename itself durable.
    """
    # Order matters: the draft's directory entries must be on disk before the rename, so that a crash never leaves a
    # published checkpoint with missing files.
    #
    #   crash after    files   1st flush   rename          2nd flush
    #   next start     draft   draft       draft or whole  whole
    flush_to_disk(written)
    whole = written.with_name(f"{written.name.removeprefix(_PARTIAL)}-step-{step}")
    written.rename(whole)
    return whole


def flush_to_disk(path: Path) -> None:
    """Block until a file, or a folder's directory entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(paths: Sequence[Path], keep: int) -> None:
    """Remove all but the last `keep` of these checkpoints, which are sorted, as far as possible.

    Each one is renamed to a draft first, so that a partly removed checkpoint counts as a leftover.
    """
    for path in paths[:-keep]:
        gone = path.with_name(f"{_PARTIAL}old-{path.name}")
        with suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone)
