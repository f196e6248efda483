"""Ranks as threads of this process: no MPI, nothing to start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from engines import host
from engines.comm.device import share_process
from engines.comm.loopback import loopback
from engines.comm.world import World
from engines.output import Line, Output, diverted
from engines.packing import pack
from engines.whereabouts import here
from mpi4dl_nb.launch.reports import Ended, Still

__all__ = ["LoopbackRanks"]


class LoopbackRanks:
    """Every rank a thread of this process: no MPI, nothing to start."""

    def __init__(self, n: int) -> None:
        self._host(loopback(n))

    def _host(self, worlds: Sequence[World]) -> None:
        self._hosts = [host.Host(world) for world in worlds]
        self._said: SimpleQueue[tuple[int, Line]] = SimpleQueue()
        for rank, each in enumerate(self._hosts):
            each.board.output = Output(partial(_put, self._said, rank))

    def count(self) -> int:
        """As many as were asked for."""
        return len(self._hosts)

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """A thread of its own: a rank that never returns must not keep Python from ending."""
        future: Future[bytes] = Future()

        def work() -> None:
            share_process()
            try:
                future.set_result(host.execute(self._hosts[rank], common, own))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=work, name=f"rank {rank}", daemon=True).start()
        return future

    def interrupt(self) -> None:
        """Release those that wait; a thread that computes can't be stopped."""
        self._hosts[0].world.abort()

    def kill(self, ranks: Iterable[int]) -> None:
        """Nor can it be ended: whoever starts afresh leaves it alone."""
        self.interrupt()

    def lost(self) -> Mapping[int, Ended]:
        """Threads do not die alone."""
        return {}

    def cut_off(self) -> frozenset[str]:
        """There is no other host."""
        return frozenset()

    def still(self) -> Mapping[int, Still]:
        """Those that have not gone on for a while."""
        now = {rank: host.board.read() for rank, host in enumerate(self._hosts)}
        return {rank: Still(at) for rank, at in now.items() if at is not None}

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """As bytes; modules are those of this process, whatever becomes of them."""
        return [pack(value) for value in values]

    def listening(self) -> AbstractContextManager[None]:
        """What is printed is kept, where a rank prints it."""
        return diverted(lambda: here().output)

    def said(self) -> list[tuple[int, Line]]:
        """What has been printed."""
        return [self._said.get() for _ in range(self._said.qsize())]

    def lacks(self, rank: int, lines: int) -> bool:
        """Nothing is on its way."""
        return False

    def leave_out(self, ranks: Iterable[int]) -> None:
        """There are none to be left out."""

    def stop(self) -> None:
        """Let go of those that wait."""
        self.interrupt()


def _put(said: SimpleQueue[tuple[int, Line]], rank: int, line: Line) -> None:
    said.put((rank, line))
