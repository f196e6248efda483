"""The errors a user can meet. Each says what is wrong, with the numbers, and how to mend it."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ImageError",
    "LossError",
    "Mpi4dlError",
    "PlanError",
    "RankError",
    "ReleasedError",
    "TraceError",
]


class Mpi4dlError(Exception):
    """Whatever this package raises on purpose."""


class PlanError(Mpi4dlError, ValueError):
    """The plan cannot be run: its numbers do not fit each other, the model, the image or the cluster."""


class TraceError(Mpi4dlError):
    """The model cannot be traced, or an operator has no rule for tiles."""


class ImageError(Mpi4dlError, ValueError):
    """An image, or the labels that go with it, are not what the plan was made for."""


class CheckpointError(Mpi4dlError, ValueError):
    """A checkpoint cannot be written, is damaged, or is of another training. What was there before still is."""


class RankError(Mpi4dlError, RuntimeError):
    """Work failed on a rank.

    `rank` is the first rank that failed by itself and `remote_traceback` its traceback as text.
    """

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class ReleasedError(RankError):
    """A rank stopped waiting because another one has failed: that one knows why."""


class LossError(RankError):
    """The loss is not a finite number; no weight was changed."""
