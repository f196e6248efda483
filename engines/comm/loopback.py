"""All ranks in one process, one thread each: for tests, and for machines without MPI."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from mpi4dl_nb.engines.comm.device import share_process
from mpi4dl_nb.engines.comm.status_board import measure_wait
from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.errors import RankError, ReleasedError

_GATHER = -1
_RECOVERY_S = 10.0


_Route = tuple[int, int, int]
"""Source, target and tag."""

_MessageKey = tuple[_Route, int]
"""Identifies one message: its route, and its number on that route."""


class Mailbox:
    """Messages between ranks. On one route they match receives in the order in which both are posted, as in MPI.

    Messages and receives are numbered per route when they are posted. Which receive is waited for first is therefore
    irrelevant.

        route 0 -> 1, tag 7     sent        letters                   wanted
        rank 0 posts a, b       0, 1        {#0: a, #1: b}
        rank 1 reserves twice               {#0: a, #1: b}            0, 1
        rank 1 fetches #1                   {#0: a}            gets b, though #0 is still unread
    """

    def __init__(self, size: int) -> None:
        self.all_here = threading.Barrier(size, action=self.clear)
        self.arrived = threading.Condition()  # one lock for all routes, as a failure has to wake every rank
        self.letters: dict[_MessageKey, Any] = {}
        self.sent, self.wanted = Counter[_Route](), Counter[_Route]()
        self.failed = False

    def post(self, route: _Route, letter: Any) -> None:
        with self.arrived:
            self.letters[route, self.sent[route]] = letter
            self.sent[route] += 1
            self.arrived.notify_all()

    def reserve(self, route: _Route) -> _MessageKey:
        """Return the key of the next message to be received on a route."""
        with self.arrived:
            self.wanted[route] += 1
            return route, self.wanted[route] - 1

    def fetch(self, place: _MessageKey) -> Any:
        self.wait_for_message(place)
        with self.arrived:
            return self.letters.pop(place)

    def wait_for_message(self, place: _MessageKey) -> None:
        """Return when the message is there; only the caller that reserved it fetches it."""
        with self.arrived:
            if place not in self.letters:
                with measure_wait():
                    self.arrived.wait_for(lambda: place in self.letters or self.failed)
            self._check()

    def has(self, place: _MessageKey) -> bool:
        with self.arrived:
            self._check()
            return place in self.letters

    def _check(self) -> None:
        if self.failed:
            raise ReleasedError("released: another rank has failed")

    def revoke(self) -> None:
        with self.arrived:
            self.failed = True
            self.arrived.notify_all()

    def recover(self, rank: int) -> None:
        """Discard old messages once every rank is here. Raises RankError if not all ranks arrive in time."""
        # The barrier's action clears the mailbox while all ranks are here, so that no message sent after the recovery
        # is lost.
        try:
            self.all_here.wait(timeout=_RECOVERY_S)
        except threading.BrokenBarrierError as error:
            self.all_here.reset()
            raise RankError(f"not all {self.all_here.parties} ranks came to recover within {_RECOVERY_S} s") from error

    def clear(self) -> None:
        with self.arrived:
            self.letters.clear()
            self.sent.clear()
            self.wanted.clear()
            self.failed = False


class _PendingReceive:
    """Messages still to be copied into their tensors."""

    def __init__(self, mail: Mailbox, expected: Sequence[tuple[_MessageKey, Tensor]]) -> None:
        self.mail, self.expected = mail, expected

    def wait(self) -> None:
        for key, tensor in self.expected:
            letter = self.mail.fetch(key)
            # MPI rejects a message that is too long; `copy_` alone would broadcast one that is too short.
            if tensor.shape != letter.shape:
                sizes = f"{tuple(letter.shape)} came where {tuple(tensor.shape)}"
                raise RankError(f"a message of shape {sizes} was expected")
            tensor.copy_(letter)
        self.expected = ()

    def is_completed(self) -> bool:
        # All or none: once every message of the request is here, no fetch can block.
        if not all(self.mail.has(key) for key, _ in self.expected):
            return False
        self.wait()
        return True


class LoopbackWorld(World):
    """One rank's view of the mailbox."""

    def __init__(self, rank: int, size: int, mail: Mailbox) -> None:
        self.rank, self.size = rank, size
        self._mail = mail

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in sends:
            # A copy: the send is complete at once and the sender may overwrite its tensor.
            self._mail.post((self.rank, message.peer, message.tag), message.tensor.clone())
        reserved = [(self._mail.reserve((m.peer, self.rank, m.tag)), m.tensor) for m in receives]
        return _PendingReceive(self._mail, reserved)

    def all_gather(self, value: Any) -> list[Any]:
        # The values themselves, not copies: ranks of one process may share an object.
        for peer in range(self.size):
            self._mail.post((self.rank, peer, _GATHER), value)
        return [self._mail.fetch(self._mail.reserve((peer, self.rank, _GATHER))) for peer in range(self.size)]

    def revoke(self) -> None:
        self._mail.revoke()

    def recover(self) -> None:
        self._mail.recover(self.rank)


def make_loopback_worlds(size: int) -> list[LoopbackWorld]:
    """Return the worlds of `size` ranks that reach each other."""
    mail = Mailbox(size)
    return [LoopbackWorld(rank, size, mail) for rank in range(size)]


def run_ranks(size: int, work: Callable[[LoopbackWorld], Any]) -> list[Any]:
    """Run `work(world)` on `size` ranks concurrently; return results in rank order, or raise the first failure."""
    worlds = make_loopback_worlds(size)

    def run_rank(world: LoopbackWorld) -> Any:
        share_process()  # first: what the work does may start kernels at once
        try:
            return work(world)
        except BaseException:
            world.revoke()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run_rank, world) for world in worlds]
    errors = [error for future in futures if (error := future.exception())]
    # ReleasedErrors only follow from another rank's error, which is the one to raise.
    causes = [error for error in errors if not isinstance(error, ReleasedError)]
    for error in causes or errors:
        raise error
    return [future.result() for future in futures]
