"""Ranks of one thread, in turn: each has all cores while it computes, and what others wait with can lie in a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread

from engines import rank_server
from engines.comm.cgroup_limits import count_cores
from engines.comm.device import share_process
from engines.errors import ReleasedError
from engines.streaming.rank_scheduler import RankScheduler
from mpi4dl_nb.launch.loopback_ranks import LoopbackRanks

__all__ = ["SingleThreadRanks"]

_Work = Callable[[], None]


class SingleThreadRanks(LoopbackRanks):
    """As threads of this process, but that all ranks are one thread: a rank goes on where the one before it waits."""

    def __init__(self, n: int) -> None:
        self._relay, self._asked = RankScheduler(n), SimpleQueue[tuple[Future[bytes], _Work] | None]()
        self._make_servers(self._relay.worlds)
        for rank, each in enumerate(self._hosts):
            self._relay.register(rank, partial(_offload_trainings, each))
        self._interrupted = self._stopped = False
        Thread(target=self._run_calls, name="ranks in turn", daemon=True).start()

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Nothing begins before all have been asked."""
        future: Future[bytes] = Future()

        def run_call() -> None:
            try:
                if self._interrupted:
                    raise ReleasedError("released: it had not begun")
                future.set_result(rank_server.execute(self._hosts[rank], common, own))
            except BaseException as error:
                future.set_exception(error)

        self._asked.put((future, run_call))
        return future

    def interrupt(self) -> None:
        """Release those that wait, and those that have not begun; one that computes can't be stopped."""
        self._interrupted = True
        super().interrupt()
        self._asked.put(None)

    def stop(self) -> None:
        """Let go of those that wait, and of the thread: it has its end where a rank waits next."""
        self._stopped = True
        self.interrupt()

    def _run_calls(self) -> None:
        """Call after call."""
        share_process(count_cores())
        asked: list[_Work] = []
        while not self._stopped:
            one = self._asked.get()
            if one is not None:
                asked.append(one[1])
            if one is None or len(asked) == len(self._hosts):
                self._relay.run(asked)  # after an interrupt none of them begins
                asked, self._interrupted = [], self._interrupted and one is not None
            one = None  # or what it was asked would be held until the next call


def _offload_trainings(own: rank_server.RankServer) -> None:
    """What a rank's trainings hold while others compute, where their plan has that in a file."""
    for training in own.trainings.values():
        training.worker.offload()
