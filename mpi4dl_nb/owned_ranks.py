"""The ranks that this process owns: they end when their cluster is no longer referenced, or with the process."""

from __future__ import annotations

import atexit
import gc
import operator
import os
import re
import sys
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from threading import Lock, Thread, get_ident
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from mpi4dl_nb.remote_call import Ranks
from mpi4dl_nb.user_modules import is_user_module

if TYPE_CHECKING:
    from mpi4dl_nb.cluster import Cluster

__all__ = ["OwnedRanks", "count_alive_ranks", "find_holder_name", "get_running_clusters", "watch_notebook"]

# How a cluster ends without a call of `stop`, and who ends its ranks then:
#
#     its last reference goes       the finalizer of OwnedRanks, in a thread
#     no name refers to it          notebook_cleanup.py, after the next cell; then as above
#     Python exits                  `_end_all`
#     this process is killed        the cluster's reaper process (launch/reaper_process.py)
#     both are killed               the next start, which finds the record (launch/pid_file.py)
#     another host loses this one   that host's agent (launch/host_agent.py), and each rank's supervisor


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


# End clusters that a notebook can no longer reach, although IPython keeps what cells returned (`Out`, `_`).
#
# If a cell that starts a cluster is run again, the new cluster takes the variable of the old one. The old cluster is
# then
# ended, unless another name refers to it, such as that of a training.


_KEPT = re.compile(r"_+(i+|\d+|i\d+|ih|oh|dh)?|In|Out")  # names under which IPython keeps inputs and results of cells
_MOST = 20_000  # objects visited: what takes more is considered to be in use
THREAD = "a thread"


def watch_notebook() -> None:
    """Check for unreachable clusters after each cell from now on, if this process is a notebook's."""
    shell = _get_shell()
    if shell is not None and _end_unreachable not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _end_unreachable)


def _get_shell() -> Any:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _end_unreachable(*result: object) -> None:
    """End all clusters but the newest that no name refers to. Report once which name keeps a cluster alive."""
    shell, running = _get_shell(), get_running_clusters()
    for cluster in running[:-1]:
        names = shell.user_ns
        caches = [held for name, held in names.items() if _KEPT.fullmatch(name) and isinstance(held, dict | list)]
        name = find_holder_name(cluster, names, (shell, *caches), shell.user_ns_hidden)
        if not name:
            cluster.end_later()
        elif names.get(name) is not cluster and cluster.kept_by != name:
            cluster.kept_by = name
            print(
                f"The {cluster.n} ranks of an earlier cluster stay alive: they are in use by `{name}`. They end with "
                "it, or when you stop() that cluster.",
                file=sys.stderr,
            )


def find_holder_name(
    thing: object, names: Mapping[str, Any], aside: Collection[object] = (), hidden: Collection[str] = ()
) -> str:
    """Return the first of the user's names from which `thing` is reachable; empty if there is none.

    A user's module counts by the module's name, whether the notebook has that name or not. The result is `THREAD` if a
    function that runs in another thread refers to it. References through the objects `aside` and the names `hidden` are
    ignored.

    >>> thing = {"kept": []}
    >>> (
    ...     find_holder_name(thing["kept"], {"_": thing, "mine": [thing]}),
    ...     find_holder_name(thing["kept"], {"_": thing}, [thing]),
    ... )
    ('mine', '')
    """
    # Walk against the direction of the references, from the cluster to the first name:
    #
    #     training ──> Training ──> Cluster       in use by `training`
    #     Out ──> {4: Cluster}                    not in use: paths through IPython's caches end before they begin
    given = {id(value): name for name, value in names.items() if name not in hidden and not _KEPT.fullmatch(name)}
    at_work = _get_thread_locals()
    modules = []
    for name, module in list(sys.modules.items()):
        if is_user_module(name, module):
            given.setdefault(id(vars(module)), name)
        elif isinstance(module, ModuleType):
            modules.append(vars(module))
    seen = {id(each) for each in (thing, names, given, at_work, *aside, *modules)}
    # Breadth-first search backwards along references, from `thing` towards a named object. The namespaces that must not
    # count (IPython's caches, other modules) are marked as seen beforehand, which cuts these paths off.
    edge = [thing]
    while edge and len(seen) < _MOST:
        for each in edge:
            if id(each) in given:
                return given[id(each)]
            if id(each) in at_work:
                return THREAD
        edge = _find_referrers(edge, seen)
    return THREAD if edge else ""


def _find_referrers(things: list[object], seen: set[int]) -> list[object]:
    """Return what refers to `things`, except for objects of this search itself and those seen before."""
    found = [
        each
        for each in gc.get_referrers(*things)
        if each is not things
        and id(each) not in seen
        and not isinstance(each, FrameType | ModuleType)
        # `*things` has made a tuple of them for the call above, which refers to them, too
        and not (isinstance(each, tuple) and len(each) == len(things) and all(map(operator.is_, each, things)))
    ]
    seen.update(map(id, found))
    return found


def _get_thread_locals() -> set[int]:
    """Return the ids of the local variables of all functions running in other threads."""
    found: set[int] = set()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top if thread != get_ident() else None
        while frame is not None:
            found.update(map(id, frame.f_locals.values()))
            frame = frame.f_back
    return found
