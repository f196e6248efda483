"""Local work that may fail on one rank only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engines.comm.world import World
from engines.errors import ImageError, Mpi4dlError

__all__ = ["together"]

Made = TypeVar("Made")


def together(world: World, work: Callable[[], Made], kind: type[Mpi4dlError] = ImageError) -> Made:
    """What `work` makes on this rank; collective. Where it fails on one rank, every rank raises its error of that kind.

    What the system says of files (OSError) becomes one.
    """
    made, failure = None, ""
    try:
        made = work()
    except (kind, OSError) as error:
        failure = str(error) or type(error).__name__
    for text in world.gather(failure):
        if text:
            raise kind(text)
    return made  # type: ignore[return-value]
