"""Ranks of one thread, in turn: each has all cores while it computes, and what others wait with can lie in a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from engines import host
from engines.comm.container import cores
from engines.comm.device import share_process
from engines.errors import ReleasedError
from engines.streaming.relay import Relay
from mpi4dl_nb.launch.loopback import LoopbackRanks

__all__ = ["RanksInTurn"]

_Work = Callable[[], None]


class RanksInTurn(LoopbackRanks):
    """As threads of this process, but that all ranks are one thread: a rank goes on where the one before it waits."""

    def __init__(self, n: int) -> None:
        self._relay, self._asked = Relay(n), SimpleQueue[tuple[Future[bytes], _Work] | None]()
        self._stopped = False
        self._hosts = [host.Host(world) for world in self._relay.worlds]
        Thread(target=self._take_turns, name="ranks in turn", daemon=True).start()

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Nothing begins before all have been asked."""
        future: Future[bytes] = Future()

        def work() -> None:
            future.set_result(host.execute(self._hosts[rank], common, own))

        self._asked.put((future, work))
        return future

    def interrupt(self) -> None:
        """Release those that wait, and those that have not begun; one that computes can't be stopped."""
        super().interrupt()
        self._asked.put(None)

    def stop(self) -> None:
        """Let go of those that wait, and of the thread: it has its end where a rank waits next."""
        self._stopped = True
        self.interrupt()

    def _take_turns(self) -> None:
        """Call after call."""
        share_process(cores())
        asked: list[tuple[Future[bytes], _Work]] = []
        while not self._stopped:
            one = self._asked.get()
            if one is None:
                for future, _ in asked:
                    future.set_exception(ReleasedError("released: it had not begun"))
            asked = [] if one is None else [*asked, one]
            if len(asked) == len(self._hosts):
                self._relay.run([work for _, work in asked])
                asked = []
