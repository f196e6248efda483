"""Ranks in a single thread that take turns: each computes on all cores, while the others' data can be in a file."""

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


# Two ranks in one thread, `~` where a rank waits for a message of the other:
#
#     rank 0    compute, send ~              receive, compute, done
#     rank 1                    compute, receive, send ~              done
#
# Their memory is that of one rank if activations are written to a file at each `~` (`_offload_trainings`).


class SingleThreadRanks(LoopbackRanks):
    """Ranks that share one thread of this process: when a rank must wait, another rank continues."""

    def __init__(self, n: int) -> None:
        self._relay, self._asked = RankScheduler(n), SimpleQueue[tuple[Future[bytes], _Work] | None]()
        self._make_servers(self._relay.worlds)
        for rank, each in enumerate(self._hosts):
            self._relay.register(rank, partial(_offload_trainings, each))
        self._interrupted = self._stopped = False
        Thread(target=self._run_calls, name="ranks in turn", daemon=True).start()

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Queue the call; execution starts once all ranks have a call."""
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
            one = self._asked.get()
            if one is not None:
                asked.append(one[1])
            # Run only complete calls: ranks wait for each other, so one that is missing would block the rest. `None` is
            # an interrupt, which flushes an incomplete call; its ranks raise ReleasedError.
            if one is None or len(asked) == len(self._hosts):
                self._relay.run(asked)  # after an interrupt, none of them starts
                asked, self._interrupted = [], self._interrupted and one is not None
            # Release the call before blocking in `get`: its closure holds the pickled arguments, maybe a whole model.
            one = None


def _offload_trainings(own: rank_server.RankServer) -> None:
    """Write the activations of a rank's trainings to a file while other ranks compute, if their plan says so."""
    for training in own.trainings.values():
        training.worker.offload()
