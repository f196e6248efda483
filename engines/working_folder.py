"""The folder that this process works in, where relative paths begin: it may have been deleted meanwhile."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

__all__ = ["describe_working_folder", "is_deleted", "make_absolute"]


def is_deleted() -> bool:
    """Whether it is gone."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def describe_working_folder() -> str:
    """Where a relative path was looked for, in words."""
    return "a folder that was deleted: os.chdir to another one" if is_deleted() else str(Path.cwd())


def make_absolute(path: str | PathLike[str]) -> Path:
    """The path from the root; as it is where it begins in a folder that was deleted, so that it leads nowhere.

    >>> make_absolute("/a/b").as_posix(), make_absolute("b") == Path.cwd() / "b"
    ('/a/b', True)
    """
    return Path(path) if is_deleted() else Path(path).absolute()
