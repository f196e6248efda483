"""The process's working folder, to which relative paths refer; it may have been deleted."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

__all__ = ["describe_working_folder", "is_deleted", "make_absolute"]


def is_deleted() -> bool:
    """Return whether the working folder was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def describe_working_folder() -> str:
    """Describe the folder to which relative paths refer."""
    return "a folder that was deleted: os.chdir to another one" if is_deleted() else str(Path.cwd())


def make_absolute(path: str | PathLike[str]) -> Path:
    """Return the absolute path; unchanged if the working folder was deleted, so that a relative path leads nowhere.

    >>> make_absolute("/a/b").as_posix(), make_absolute("b") == Path.cwd() / "b"
    ('/a/b', True)
    """
    return Path(path) if is_deleted() else Path(path).absolute()
