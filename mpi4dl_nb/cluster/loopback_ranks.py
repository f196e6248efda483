"""Ranks as threads of this process, without MPI or any other process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from mpi4dl_nb.cluster.remote_call import Ranks
from mpi4dl_nb.engines.comm.device import count_cores, share_process
from mpi4dl_nb.engines.comm.loopback import make_loopback_worlds
from mpi4dl_nb.engines.comm.output import LineBuffer, OutputLine, redirect_streams
from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import ReleasedError
from mpi4dl_nb.engines.program.rank_scheduler import RankScheduler
from mpi4dl_nb.engines.server import rank_server
from mpi4dl_nb.engines.server.notebook_imports import pack
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.launch.process_output import settle
from mpi4dl_nb.launch.supervisor_reports import StalledRank


def _put_line(lines: SimpleQueue[tuple[int, OutputLine]], rank: int, line: OutputLine) -> None:
    lines.put((rank, line))


class LoopbackRanks(Ranks):
    """Ranks as threads of this process, without MPI or any other process."""

    def __init__(self, n: int) -> None:
        self._make_servers(make_loopback_worlds(n))

    def _make_servers(self, worlds: Sequence[World]) -> None:
        self._hosts = [rank_server.RankServer(world) for world in worlds]
        self._threads: dict[int, Thread] = {}  # of the last call of each rank
        self._lines: SimpleQueue[tuple[int, OutputLine]] = SimpleQueue()
        for rank, host in enumerate(self._hosts):
            host.board.output = LineBuffer(partial(_put_line, self._lines, rank))

    def count(self) -> int:
        """Return the number of ranks."""
        return len(self._hosts)

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Run the call in a new daemon thread: a rank that never returns must not keep Python from exiting."""
        future: Future[bytes] = Future()
        last = self._threads.get(rank)

        def run_call() -> None:
            # A call that was interrupted while it was submitted may not have begun yet: its messages come before ours.
            if last is not None:
                last.join()
            share_process()
            settle(future, lambda: rank_server.execute(self._hosts[rank], common, own))

        self._threads[rank] = thread = Thread(target=run_call, name=f"rank {rank}", daemon=True)
        thread.start()
        return future

    def interrupt(self) -> None:
        """Release the ranks that wait; a thread that computes cannot be interrupted."""
        self._hosts[0].world.revoke()

    def kill(self, ranks: Iterable[int]) -> None:
        """Release the ranks that wait; a thread that computes cannot be killed and is abandoned at a restart."""
        self.interrupt()

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
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def stop(self) -> None:
        """Release the ranks that wait."""
        self.interrupt()


# Ranks in a single thread that take turns: each computes on all cores, while the others' data can be in a file.


_Work = Callable[[], None]


# Two ranks in one thread, `~` where a rank waits for a message of the other:
#
#     rank 0    compute, send ~              receive, compute, done
#     rank 1                    compute, receive, send ~              done
#
# Their memory is that of one rank if activations are written to a file at each `~` (`_offload_trainings`).


class SingleThreadRanks(LoopbackRanks):
    """Ranks that share one thread of this process: when a rank must wait, another rank continues."""

    def __init__(self, n: int) -> None:
        self._relay, self._asked = RankScheduler(n), SimpleQueue[_Work | None]()
        self._make_servers(self._relay.worlds)
        for rank, host in enumerate(self._hosts):
            self._relay.register(rank, partial(_offload_trainings, host))
        self._interrupted = self._stopped = False
        Thread(target=self._run_calls, name="ranks in turn", daemon=True).start()

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Queue the call; execution starts once all ranks have a call."""
        future: Future[bytes] = Future()

        def run_call() -> bytes:
            if self._interrupted:
                raise ReleasedError("released: it had not begun")
            return rank_server.execute(self._hosts[rank], common, own)

        self._asked.put(partial(settle, future, run_call))
        return future

    def interrupt(self) -> None:
        """Release the ranks that wait and those that have not started; a rank that computes cannot be interrupted."""
        self._interrupted = True
        super().interrupt()
        self._asked.put(None)

    def stop(self) -> None:
        """Release the ranks that wait, and the thread, which ends when a rank next waits."""
        self._stopped = True
        self.interrupt()

    def _run_calls(self) -> None:
        """Run one call after another, each on all ranks."""
        share_process(count_cores())
        asked: list[_Work] = []
        while not self._stopped:
            item = self._asked.get()
            if item is not None:
                asked.append(item)
            # Run only complete calls: ranks wait for each other, so one that is missing would block the rest. `None` is
            # an interrupt, which flushes an incomplete call; its ranks raise ReleasedError.
            if item is None or len(asked) == len(self._hosts):
                self._relay.run(asked)  # after an interrupt, none of them starts
                asked, self._interrupted = [], self._interrupted and item is not None
            # Release the call before blocking in `get`: its closure holds the pickled arguments, maybe a whole model.
            item = None


def _offload_trainings(own: rank_server.RankServer) -> None:
    """Write the activations of a rank's trainings to a file while other ranks compute, if their plan says so."""
    for training in own.get_kept(RankTraining).values():
        training.offload()
