"""A world whose messages take the time of a slower link: what ranks on one machine see as if they were on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engines.comm.waiting import waited
from engines.comm.world import Message, Pending, World

__all__ = ["LinkedWorld"]


class LinkedWorld:
    """Ranks behind links of `bytes_per_s` each, as behind network cards: bytes arrive while the processor computes.

    A rank's messages arrive one after another. Each begins to pass when it is here and this rank looks, which is
    later than on a real link: what hides behind computing there hides at least as well.
    """

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self.world, self.bytes_per_s = world, bytes_per_s
        self.rank, self.size = world.rank, world.size
        self.free_s = 0.0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        return self._passing(self.world.exchange(sends, receives), receives)

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Messages to be started again and again."""
        start = self.world.prepare(sends, receives)
        return lambda: self._passing(start(), receives)

    def _passing(self, pending: Pending, receives: Sequence[Message]) -> Pending:
        return _Passing(pending, self, sum(message.tensor.nbytes for message in receives))

    def __getattr__(self, name: str) -> object:
        """What is no message passes by: values, rests, failures."""
        return getattr(self.world, name)


class _Passing:
    """Messages that are complete when their bytes have passed the link."""

    def __init__(self, pending: Pending, world: LinkedWorld, count_bytes: int) -> None:
        self.pending, self.world, self.count_bytes = pending, world, count_bytes
        self.end_s: float | None = None

    def _begin(self) -> float:
        """The messages are here: from now on, or when the link is free, they pass."""
        if self.end_s is None:
            start_s = max(time.perf_counter(), self.world.free_s)
            self.end_s = self.world.free_s = start_s + self.count_bytes / self.world.bytes_per_s
        return self.end_s

    def wait(self) -> None:
        """Sleeps meanwhile."""
        self.pending.wait()
        with waited():
            time.sleep(max(0.0, self._begin() - time.perf_counter()))

    def done(self) -> bool:
        return (self.end_s is not None or self.pending.done()) and time.perf_counter() >= self._begin()
