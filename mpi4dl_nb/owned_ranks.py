"""The ranks that this process owns: they end when their cluster is no longer referenced, or with the process."""

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


# How a cluster ends without a call of `stop`, and who ends its ranks then:
#
#     its last reference goes       the finalizer of OwnedRanks, in a thread
#     no name refers to it          notebook_cleanup.py, after the next cell; then as above
#     Python exits                  `_end_all`
#     this process is killed        the cluster's reaper process (launch/reaper_process.py)
#     both are killed               the next start, which finds the record (launch/pid_file.py)
#     another host loses this one   that host's agent (launch/host_agent.py), and each rank's guard (engines.supervisor)


class OwnedRanks:
    """The ranks of a cluster. The cluster itself is referenced weakly: once it is collected, a thread ends the ranks.

    A fork of this process, as data loaders make it, has copies of these objects, which never end the ranks.
    """

    def __init__(self, cluster: Cluster, ranks: Ranks) -> None:
        self.ranks, self._process, self._ends = ranks, os.getpid(), False
        self.cluster = weakref.ref(cluster)
        self._finalizer = weakref.finalize(cluster, self.end_later)
        self._finalizer.atexit = False  # `_end_all` ends them at exit
        with _lock:
            _held[id(self)] = self

    def end(self) -> None:
        """End the ranks and wait until they have ended."""
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
        """End the ranks in a thread: objects may be collected in any thread, and none of these can wait."""
        if os.getpid() == self._process:
            with suppress(RuntimeError):  # no thread can start during interpreter shutdown
                Thread(target=self.end, name="mpi4dl_nb ending").start()

    @property
    def alive(self) -> int:
        """The number of living ranks."""
        return self.ranks.count() - (0 if self._ends else len(self.ranks.find_lost_ranks()))


_lock = Lock()
_held: dict[int, OwnedRanks] = {}


@atexit.register
def _end_all() -> None:
    for held in list(_held.values()):
        with suppress(Exception):  # an error must not keep the other clusters alive
            held.end()


def count_alive_ranks() -> int:
    """Return the number of living ranks in all clusters of this process, including those that are just ending."""
    return sum(held.alive for held in list(_held.values()))


def get_running_clusters() -> list[Cluster]:
    """Return the clusters that have ranks, in the order in which they were started."""
    return [cluster for held in list(_held.values()) if (cluster := held.cluster()) is not None]
