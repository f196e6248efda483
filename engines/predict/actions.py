"""The actions of a rank in a simulated step: compute, send, wait for a message, or join an all-reduce."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Action", "ComputeWork", "CopyMessage", "JoinAllReduce", "PostSend", "WaitAllReduce", "WaitMessage"]


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """Computation that takes `seconds` if no other rank is busy.

    With all cores busy it takes `crowded` times as long.

    >>> ComputeWork(1.0, 2.0) + ComputeWork(3.0, 1.0)
    ComputeWork(seconds=4.0, crowded=1.25)
    """

    seconds: float
    crowded: float = 1.0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        """Return the work of both in sequence."""
        seconds = self.seconds + other.seconds
        together = self.seconds * self.crowded + other.seconds * other.crowded
        return ComputeWork(seconds, together / seconds) if seconds else self

    def scale(self, factor: float) -> ComputeWork:
        """Return the work multiplied by `factor`."""
        return ComputeWork(self.seconds * factor, self.crowded)

    def with_minimum(self, seconds: float) -> ComputeWork:
        """Return the work, extended to at least `seconds`."""
        return self if self.seconds >= seconds else ComputeWork(seconds, self.crowded)


@dataclass(frozen=True, slots=True)
class PostSend:
    """Post a non-blocking send. `route` is (source, target, tag, number of earlier messages on these three)."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class WaitMessage:
    """Wait for a message."""

    route: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class CopyMessage:
    """Copy a received message, where no link has carried it."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class JoinAllReduce:
    """Join an all-reduce of `bytes`, which starts when the last rank of `group` has joined.

    `behind`: it runs in the background of its ranks' work, and messages that ranks wait for have priority on the links.
    """

    name: Hashable
    group: tuple[int, ...]
    bytes: int
    behind: bool = False


@dataclass(frozen=True, slots=True)
class WaitAllReduce:
    """Wait until an all-reduce that this rank has joined is complete."""

    name: Hashable
    group: tuple[int, ...]


Action = ComputeWork | PostSend | WaitMessage | CopyMessage | JoinAllReduce | WaitAllReduce
