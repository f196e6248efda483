"""What a rank does in a step of its program: it works, sends, waits for a message, or takes part in a sum."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Action", "ComputeWork", "CopyMessage", "JoinAllReduce", "PostSend", "WaitAllReduce", "WaitMessage"]


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """The rank computes for so long, if nobody else is at work.

    With all cores at work it is `crowded` times as long.

    >>> ComputeWork(1.0, 2.0) + ComputeWork(3.0, 1.0)
    Work(seconds=4.0, crowded=1.25)
    """

    seconds: float
    crowded: float = 1.0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        """One behind the other."""
        seconds = self.seconds + other.seconds
        together = self.seconds * self.crowded + other.seconds * other.crowded
        return ComputeWork(seconds, together / seconds) if seconds else self

    def scale(self, factor: float) -> ComputeWork:
        """As much of the same."""
        return ComputeWork(self.seconds * factor, self.crowded)

    def with_minimum(self, seconds: float) -> ComputeWork:
        """No shorter."""
        return self if self.seconds >= seconds else ComputeWork(seconds, self.crowded)


@dataclass(frozen=True, slots=True)
class PostSend:
    """A message leaves; nobody here waits for it. `route` is (source, target, tag, how many went there before)."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class WaitMessage:
    """Wait for a message."""

    route: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class CopyMessage:
    """Copy a message that has come, where no link has brought it."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class JoinAllReduce:
    """Take part in a sum of so many bytes, which begins when the last of `group` has come.

    `behind`: it goes on behind the work of its ranks, so that what they wait for has the links first.
    """

    name: Hashable
    group: tuple[int, ...]
    bytes: int
    behind: bool = False


@dataclass(frozen=True, slots=True)
class WaitAllReduce:
    """Wait until a sum is complete that this rank has taken part in."""

    name: Hashable
    group: tuple[int, ...]


Action = ComputeWork | PostSend | WaitMessage | CopyMessage | JoinAllReduce | WaitAllReduce
