"""Work that may fail on one rank only, or that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engines.comm.world import World
from engines.errors import ImageError, Mpi4dlError, ReleasedError

__all__ = ["from_first", "together"]

Made = TypeVar("Made")


def together(world: World, work: Callable[[], Made], kind: type[Mpi4dlError] = ImageError) -> Made:
    """What `work` makes on this rank; collective. Where it fails on one rank, every rank raises its error of that kind.

    What the system says of files (OSError) becomes one. Of the others the cause is that they were released, so that
    the rank that is named is the one where it happened.
    """
    made, failure = None, ""
    try:
        made = work()
    except (kind, OSError) as error:
        failure = str(error) or type(error).__name__
    try:
        failures = world.gather(failure)
    except ReleasedError:
        if failure:  # the others have heard of it before this one heard of them, and have left
            raise kind(failure) from None
        raise
    for text in filter(None, failures):
        raise kind(text) from (None if failure else ReleasedError("released: another rank has failed"))
    return made  # type: ignore[return-value]


def from_first(world: World, work: Callable[[], Made]) -> Made:
    """What `work` makes on rank 0, on every rank; collective. Where it fails there, every rank raises its error."""
    made: Made | Mpi4dlError | None = None
    if world.rank == 0:
        try:
            made = work()
        except Mpi4dlError as error:
            made = error
    found = world.gather(made)[0]
    if isinstance(found, Mpi4dlError):
        raise found
    return found
