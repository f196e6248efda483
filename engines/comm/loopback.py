"""All ranks in one process, one thread each: for tests, and where there is no MPI."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.comm.world import Message, Pending
from engines.errors import RankError, ReleasedError

__all__ = ["LoopbackWorld", "loopback", "run_ranks"]

_GATHER = -1
_RECOVERY_S = 10.0


class _Mail:
    """Letters between ranks, by (source, target, tag), first in first out."""

    def __init__(self, size: int) -> None:
        self.all_here = threading.Barrier(size, action=self.clear)
        self.arrived = threading.Condition()
        self.boxes: dict[tuple[int, int, Any], deque[Any]] = defaultdict(deque)
        self.failed = False

    def post(self, source: int, target: int, tag: Any, letter: Any) -> None:
        with self.arrived:
            self.boxes[source, target, tag].append(letter)
            self.arrived.notify_all()

    def fetch(self, source: int, target: int, tag: Any) -> Any:
        key = source, target, tag
        with self.arrived:
            self.arrived.wait_for(lambda: self.boxes[key] or self.failed)
            if self.failed:
                raise ReleasedError("released: another rank has failed")
            return self.boxes[key].popleft()

    def has(self, source: int, target: int, tag: Any) -> bool:
        with self.arrived:
            if self.failed:
                raise ReleasedError("released: another rank has failed")
            return bool(self.boxes[source, target, tag])

    def fail(self) -> None:
        with self.arrived:
            self.failed = True
            self.arrived.notify_all()

    def clear(self) -> None:
        with self.arrived:
            self.boxes.clear()
            self.failed = False


class _Receipt:
    """Letters still to be fetched into their tensors."""

    def __init__(self, fetches: Sequence[Callable[[], None]], arrived: Sequence[Callable[[], bool]]) -> None:
        self.fetches, self.arrived = fetches, arrived

    def wait(self) -> None:
        for fetch in self.fetches:
            fetch()
        self.fetches = ()

    def done(self) -> bool:
        if not all(waiting() for waiting in self.arrived):
            return False
        self.wait()
        return True


class LoopbackWorld:
    """One rank's end of the mail."""

    def __init__(self, rank: int, size: int, mail: _Mail) -> None:
        self.rank, self.size = rank, size
        self._mail = mail

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        for message in sends:
            self._mail.post(self.rank, message.peer, message.tag, message.tensor.clone())
        arrived = [partial(self._mail.has, m.peer, self.rank, m.tag) for m in receives]
        return _Receipt([self._fetch_into(message) for message in receives], arrived)

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Messages to be started again and again."""
        return partial(self.exchange, sends, receives)

    def _fetch_into(self, message: Message) -> Callable[[], None]:
        return lambda: _copy(message.tensor, self._mail.fetch(message.peer, self.rank, message.tag))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        for peer in range(self.size):
            self._mail.post(self.rank, peer, _GATHER, value)
        return [self._mail.fetch(peer, self.rank, _GATHER) for peer in range(self.size)]

    def rest(self) -> None:
        """Return when every rank is here."""
        self.gather(None)

    def fail(self) -> None:
        """Release every rank that waits."""
        self._mail.fail()

    def recover(self) -> None:
        """Throw away old letters once every rank is here."""
        try:
            self._mail.all_here.wait(timeout=_RECOVERY_S)
        except threading.BrokenBarrierError as error:
            self._mail.all_here.reset()
            raise RankError(f"not all {self.size} ranks came to recover within {_RECOVERY_S} s") from error


def _copy(into: Tensor, letter: Tensor) -> None:
    if into.shape != letter.shape:
        raise RankError(f"a message of shape {tuple(letter.shape)} came where {tuple(into.shape)} was expected")
    into.copy_(letter)


def loopback(size: int) -> list[LoopbackWorld]:
    """The ends of `size` ranks that reach each other."""
    mail = _Mail(size)
    return [LoopbackWorld(rank, size, mail) for rank in range(size)]


def run_ranks(size: int, work: Callable[[LoopbackWorld], Any]) -> list[Any]:
    """Run `work(world)` on `size` ranks at once; their results in rank order, or the first failure."""
    worlds = loopback(size)

    def one(world: LoopbackWorld) -> Any:
        torch.set_num_threads(1)
        try:
            return work(world)
        except BaseException:
            world.fail()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, world) for world in worlds]
    errors = [error for future in futures if (error := future.exception())]
    causes = [error for error in errors if not isinstance(error, ReleasedError)]
    for error in causes or errors:
        raise error
    return [future.result() for future in futures]
