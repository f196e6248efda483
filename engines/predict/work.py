"""A rank's work: how long it takes by itself, and how much longer where all cores are at work."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """The rank computes for so long, if nobody else is at work; `crowded` times as long with all cores at work.

    >>> Work(1.0, 2.0) + Work(3.0, 1.0)
    Work(seconds=4.0, crowded=1.25)
    """

    seconds: float
    crowded: float = 1.0

    def __add__(self, other: Work) -> Work:
        """One behind the other."""
        seconds = self.seconds + other.seconds
        together = self.seconds * self.crowded + other.seconds * other.crowded
        return Work(seconds, together / seconds) if seconds else self

    def times(self, factor: float) -> Work:
        """As much of the same."""
        return Work(self.seconds * factor, self.crowded)

    def at_least(self, seconds: float) -> Work:
        """No shorter."""
        return self if self.seconds >= seconds else Work(seconds, self.crowded)
