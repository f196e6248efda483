"""The errors that a user can meet. Each message says what is wrong, with the numbers, and how to correct it."""

from __future__ import annotations

import os
import traceback
from os import PathLike
from pathlib import Path

__all__ = [
    "CheckpointError",
    "DamagedError",
    "ImageError",
    "LossError",
    "Mpi4dlError",
    "PlanError",
    "RankError",
    "ReleasedError",
    "TraceError",
    "UnreadableError",
    "VerifyError",
    "describe_working_folder",
    "is_deleted",
    "make_absolute",
]


class Mpi4dlError(Exception):
    """The base class of all errors that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the text for a notebook (IPython calls this): the user's own lines, the message and its notes.

        `__traceback__` stays complete.
        """
        ours = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in ("engines", "mpi4dl_nb"))
        notebook = [f"{os.sep}{package}{os.sep}" for package in ("IPython", "ipykernel")]
        frames = [
            frame
            for frame in traceback.extract_tb(self.__traceback__)
            if not frame.filename.startswith(ours) and not any(part in frame.filename for part in notebook)
        ]
        name = type(self).__name__
        return ["".join(traceback.format_list(frames)), f"{name}: {self}", *getattr(self, "__notes__", ())]


class PlanError(Mpi4dlError, ValueError):
    """The plan cannot be run: its numbers do not fit each other, the model, the image or the cluster."""


class TraceError(Mpi4dlError):
    """The model cannot be traced, or an operator has no rule for tiles."""


class ImageError(Mpi4dlError, ValueError):
    """An image, or its labels, does not match what the plan was made for."""


class CheckpointError(Mpi4dlError, ValueError):
    """A checkpoint cannot be written, is damaged, or belongs to another training. Earlier files are unchanged."""


class DamagedError(CheckpointError):
    """The contents of a checkpoint differ from what was written, or are no checkpoint; `why` gives the reason."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read at present, for lack of memory, file handles or permission. It may be intact."""


class VerifyError(Mpi4dlError, RuntimeError):
    """The plain model, to which `verify` compares the ranks, cannot be trained in one process."""


class RankError(Mpi4dlError, RuntimeError):
    """Work failed on a rank.

    `rank` is the first rank that failed by itself, and `remote_traceback` its traceback as text.
    """

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class ReleasedError(RankError):
    """A rank stopped waiting because another rank has failed; the cause is that rank's error."""


class LossError(RankError):
    """The loss is not finite; no weight was changed."""

    @classmethod
    def of(cls, loss: float, micro_batch: int, micro_batches: int, cause: str) -> LossError:
        """Make the error for the loss of one of a step's micro-batches, and its cause."""
        which = f" of micro-batch {micro_batch} (of {micro_batches})" if micro_batches > 1 else ""
        return cls(f"The loss{which} is {loss}. {_UNCHANGED} {cause}")

    def with_cause(self, cause: str) -> LossError:
        """Return the same error with another cause, found by more ranks."""
        head, _, _ = str(self).partition(_UNCHANGED)
        found = LossError(f"{head}{_UNCHANGED} {cause}", self.rank, self.remote_traceback)
        # A new exception does not inherit the notes of the old one.
        for note in getattr(self, "__notes__", ()):
            found.add_note(note)
        return found


_UNCHANGED = "No weight was changed."


# The process's working folder, to which relative paths refer; it may have been deleted.


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
