"""Ranks as threads of this process, without MPI or any other process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import Any

from engines import rank_server
from engines.comm.device import share_process
from engines.comm.loopback import make_loopback_worlds
from engines.comm.world import World
from engines.output import LineBuffer, OutputLine, redirect_streams
from engines.packing import pack
from engines.status_board import get_status_board
from mpi4dl_nb.launch.guard_reports import RankExit, StalledRank

__all__ = ["LoopbackRanks"]


class LoopbackRanks:
    """Ranks as threads of this process, without MPI or any other process."""

    def __init__(self, n: int) -> None:
        self._make_servers(make_loopback_worlds(n))

    def _make_servers(self, worlds: Sequence[World]) -> None:
        self._hosts = [rank_server.RankServer(world) for world in worlds]
        self._said: SimpleQueue[tuple[int, OutputLine]] = SimpleQueue()
        for rank, each in enumerate(self._hosts):
            each.board.output = LineBuffer(lambda line, rank=rank, said=self._said: said.put((rank, line)))

    def count(self) -> int:
        """Return the number of ranks."""
        return len(self._hosts)

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Run the call in a new daemon thread: a rank that never returns must not keep Python from exiting."""
        future: Future[bytes] = Future()

        def run_call() -> None:
            share_process()
            try:
                future.set_result(rank_server.execute(self._hosts[rank], common, own))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=run_call, name=f"rank {rank}", daemon=True).start()
        return future

    def interrupt(self) -> None:
        """Release the ranks that wait; a thread that computes cannot be interrupted."""
        self._hosts[0].world.abort()

    def kill(self, ranks: Iterable[int]) -> None:
        """Release the ranks that wait; a thread that computes cannot be killed and is abandoned at a restart."""
        self.interrupt()

    def find_lost_ranks(self) -> Mapping[int, RankExit]:
        """Return nothing: threads do not die alone."""
        return {}

    def find_lost_hosts(self) -> frozenset[str]:
        """Return nothing: there is no other host."""
        return frozenset()

    def find_stalled_ranks(self) -> Mapping[int, StalledRank]:
        """Return the ranks that have made no progress for a while."""
        now = {rank: host.board.read() for rank, host in enumerate(self._hosts)}
        return {rank: StalledRank(at) for rank, at in now.items() if at is not None}

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """Pickle the values; modules are those of this process in their current state."""
        return [pack(value) for value in values]

    def capture_output(self) -> AbstractContextManager[None]:
        """Capture output in the threads of the ranks."""
        return redirect_streams(lambda: get_status_board().output)

    def read_output(self) -> list[tuple[int, OutputLine]]:
        """Return the captured lines."""
        return [self._said.get() for _ in range(self._said.qsize())]

    def has_pending_output(self, rank: int, lines: int) -> bool:
        """Return False: output needs no transfer."""
        return False

    def exclude_ranks(self, ranks: Iterable[int]) -> None:
        """Do nothing: no rank can be lost."""

    def stop(self) -> None:
        """Release the ranks that wait."""
        self.interrupt()
