"""Collective calls of work that may fail on one rank only, or that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from engines.comm.world import World
from engines.errors import ImageError, Mpi4dlError, ReleasedError

__all__ = ["all_gather_or_raise", "make_released_error", "run_on_all", "run_on_first"]

Made = TypeVar("Made")


def run_on_all(world: World, work: Callable[[], Made], kind: type[Mpi4dlError] = ImageError) -> Made:
    """Return what `work` makes on this rank; collective. If it fails on one rank, every rank raises its error.

    The error has type `kind`; OSError is converted. On the ranks that did not fail, the error's cause is a
    ReleasedError, so that the error reported is attributed to the rank where it happened.
    """
    #   rank 0: work fails       "no such file" --.
    #   rank 1: work succeeds    "" --------------+--> all_gather: both raise kind("no such file")
    #
    # Without this exchange, rank 1 would go on to its next collective call, and wait there for rank 0.
    made, failure = None, ""
    try:
        made = work()
    except (kind, OSError) as error:
        failure = str(error) or type(error).__name__
    for text in filter(None, all_gather_or_raise(world, failure, kind(failure) if failure else None)):
        raise kind(text) from (None if failure else make_released_error())
    return made  # type: ignore[return-value]


def run_on_first(world: World, work: Callable[[], Made]) -> Made:
    """Return on every rank what `work` makes on rank 0; collective. If it fails there, every rank raises its error."""
    made: Made | None = None
    failure: Mpi4dlError | None = None
    if world.rank == 0:
        try:
            made = work()
        except Mpi4dlError as error:
            failure = error
    found = all_gather_or_raise(world, failure or made, failure)[0]
    if isinstance(found, Mpi4dlError):
        if failure:  # on rank 0: its own error, with its traceback
            raise failure
        raise copy(found) from make_released_error()  # ranks in threads share the exception object
    return found  # type: ignore[no-any-return]


def all_gather_or_raise(world: World, value: Any, failure: Exception | None) -> list[Any]:
    """Return the values of all ranks; collective. `failure` is the error that this rank is about to raise, if any.

    The other ranks may receive the failure and fail themselves before this rank has all of their values. This rank then
    raises `failure`, not the resulting ReleasedError.
    """
    try:
        return world.all_gather(value)
    except ReleasedError:
        if failure is None:
            raise
        failure.__suppress_context__ = True
        raise failure  # noqa: B904  (it keeps its own cause)


def make_released_error() -> ReleasedError:
    """Return the cause of an error that this rank raises because another rank has failed."""
    return ReleasedError("released: another rank has failed")
