"""The ranks of this process: they end with the cluster that nobody holds any more, or with the process."""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING

from mpi4dl_nb.remote_call import Ranks

if TYPE_CHECKING:
    from mpi4dl_nb.cluster import Cluster

__all__ = ["OwnedRanks", "count_alive_ranks", "get_running_clusters"]


class OwnedRanks:
    """The ranks of a cluster, which is itself held weakly: once it is gone a thread ends them.

    A copy of this process, as data loaders make them, has copies of these objects: it ends nothing.
    """

    def __init__(self, cluster: Cluster, ranks: Ranks) -> None:
        self.ranks, self._process, self._ends = ranks, os.getpid(), False
        self.cluster = weakref.ref(cluster)
        self._finalizer = weakref.finalize(cluster, self.end_later)
        self._finalizer.atexit = False  # `_end_all` does it then
        with _lock:
            _held[id(self)] = self

    def end(self) -> None:
        """Return when they have ended."""
        self._finalizer.detach()
        if os.getpid() != self._process:
            return
        self._ends = True
        try:
            self.ranks.stop()
        finally:
            with _lock:
                _held.pop(id(self), None)

    def end_later(self) -> None:
        """End them meanwhile. Memory may be collected in any thread, and none of them can wait."""
        if os.getpid() == self._process:
            with suppress(RuntimeError):  # no thread can begin where Python itself ends
                Thread(target=self.end, name="mpi4dl_nb ending").start()

    @property
    def alive(self) -> int:
        """How many of them are."""
        return self.ranks.count() - (0 if self._ends else len(self.ranks.find_lost_ranks()))


_lock = Lock()
_held: dict[int, OwnedRanks] = {}


@atexit.register
def _end_all() -> None:
    for held in list(_held.values()):
        with suppress(Exception):  # or the others would stay
            held.end()


def count_alive_ranks() -> int:
    """How many ranks of this process are alive, of all its clusters, those that are just ending among them."""
    return sum(held.alive for held in list(_held.values()))


def get_running_clusters() -> list[Cluster]:
    """Those that have ranks, in the order in which they were started."""
    return [cluster for held in list(_held.values()) if (cluster := held.cluster()) is not None]
