"""Work that may fail on one rank only, or that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from engines.comm.world import World
from engines.errors import ImageError, Mpi4dlError, ReleasedError

__all__ = ["all_gather_or_raise", "make_released_error", "run_on_all", "run_on_first"]

Made = TypeVar("Made")


def run_on_all(world: World, work: Callable[[], Made], kind: type[Mpi4dlError] = ImageError) -> Made:
    """What `work` makes on this rank; collective. Where it fails on one rank, every rank raises its error of that kind.

    What the system says of files (OSError) becomes one. Of the others the cause is that they were released, so that
    the rank that is named is the one where it happened.
    """
    made, failure = None, ""
    try:
        made = work()
    except (kind, OSError) as error:
        failure = str(error) or type(error).__name__
    for text in filter(None, all_gather_or_raise(world, failure, kind(failure) if failure else None)):
        raise kind(text) from (None if failure else make_released_error())
    return made  # type: ignore[return-value]


def run_on_first(world: World, work: Callable[[], Made]) -> Made:
    """What `work` makes on rank 0, on every rank; collective. Where it fails there, every rank raises its error."""
    made: Made | None = None
    failure: Mpi4dlError | None = None
    if world.rank == 0:
        try:
            made = work()
        except Mpi4dlError as error:
            failure = error
    found = all_gather_or_raise(world, failure or made, failure)[0]
    if isinstance(found, Mpi4dlError):
        if failure:
            raise failure
        raise copy(found) from make_released_error()  # ranks in threads are given the same one
    return found  # type: ignore[no-any-return]


def all_gather_or_raise(world: World, value: Any, failure: Exception | None) -> list[Any]:
    """The values of all ranks; collective. `failure` is what this rank is going to raise, once all know of it.

    The others may know, and have failed of it, before this rank has all of their values. Then it raises that, and not
    that it was released.
    """
    try:
        return world.all_gather(value)
    except ReleasedError:
        if failure is None:
            raise
        failure.__suppress_context__ = True
        raise failure  # noqa: B904  (it keeps the cause that it has)


def make_released_error() -> ReleasedError:
    """The cause of an error that this rank raises because another rank has failed."""
    return ReleasedError("released: another rank has failed")
