"""Ranks in one process of which one runs at a time: who has to wait for another gives the baton away."""

from __future__ import annotations

import heapq
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from engines.comm.loopback import LoopbackWorld, Mail
from engines.errors import ReleasedError

__all__ = ["Relay"]


class _Baton:
    """One thread has it; of those that wait for it, the one that has come furthest gets it.

    So a tile whose halo has come goes on with it, before another one begins what it will have to wait with.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._held = False

    @contextmanager
    def held(self, progress: Callable[[], int]) -> Iterator[None]:
        """Have it, as soon as nobody else has."""
        self._take(progress())
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def given_away(self, progress: Callable[[], int]) -> Iterator[None]:
        """Others may have it meanwhile."""
        self._give()
        try:
            yield
        finally:
            self._take(progress())

    def _take(self, progress: int) -> None:
        with self._free:
            mine = (-progress, next(self._numbers))
            heapq.heappush(self._waiting, mine)
            self._free.wait_for(lambda: not self._held and self._waiting[0] == mine)
            heapq.heappop(self._waiting)
            self._held = True

    def _give(self) -> None:
        with self._free:
            self._held = False
            self._free.notify_all()


class _BatonMail(Mail):
    """Letters; whoever waits for one rests, and lets others run."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.baton = _Baton()
        self.rests: dict[int, Callable[[], object]] = {}
        self.progress: dict[int, Callable[[], int]] = {}

    def fetch(self, place: Any) -> Any:
        if not self.has(place):
            (_, target, _), _ = place
            self.rests[target]()
            with self.baton.given_away(self.progress[target]):
                self.await_letter(place)
        return super().fetch(place)


class Relay:
    """So many ranks in one process; `worlds` are theirs."""

    def __init__(self, size: int) -> None:
        self._mail = _BatonMail(size)
        self.worlds = [LoopbackWorld(rank, size, self._mail) for rank in range(size)]

    def enter(self, rank: int, before_rest: Callable[[], object], progress: Callable[[], int]) -> None:
        """What a rank does before it gives the baton away, and how far it has come."""
        self._mail.rests[rank], self._mail.progress[rank] = before_rest, progress

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """The work of each rank, one at a time, to the end; what they return, or the first failure."""
        with ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(self._one, rank, work) for rank, work in enumerate(works)]
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            self._mail.clear()
            for error in errors:  # tensors whose memory is elsewhere must not be looked at
                traceback.clear_frames(error.__traceback__)
            raise next((error for error in errors if not isinstance(error, ReleasedError)), errors[0])
        return [future.result() for future in futures]

    def _one(self, rank: int, work: Callable[[], Any]) -> Any:
        with self._mail.baton.held(self._mail.progress[rank]):
            try:
                return work()
            except BaseException:
                self._mail.fail()
                raise
