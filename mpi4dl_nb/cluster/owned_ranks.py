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
from typing import Any, Protocol

from mpi4dl_nb.cluster.remote_call import Ranks
from mpi4dl_nb.cluster.user_modules import find_user_file

# How a cluster ends without a call of `stop`, and who ends its ranks then:
#
#     its last reference goes       the finalizer of OwnedRanks, in a thread
#     no name refers to it          `_end_unreachable`, after the next cell; then as above
#     Python exits                  `_end_all`
#     this process is killed        the cluster's reaper process (launch/reaper_process.py)
#     both are killed               the next start, which finds the record (launch/run_directory.py)
#     another host loses this one   that host's agent (launch/host_agent.py), and each rank's supervisor


class RanksOwner(Protocol):
    """A cluster: `end_later` gives up its ranks, and ends them in a thread."""

    def end_later(self) -> None: ...


class OwnedRanks:
    """The ranks of a cluster. The cluster itself is referenced weakly: once it is collected, a thread ends the ranks.

    A fork of this process, as data loaders make it, has copies of these objects, which never end the ranks.
    """

    def __init__(self, cluster: RanksOwner, ranks: Ranks) -> None:
        self.ranks, self._process, self._ends = ranks, os.getpid(), False
        self.get_cluster = weakref.ref(cluster)
        self.kept_by = ""  # name of the variable that keeps the cluster alive, once it has been reported
        self._finalizer = weakref.finalize(cluster, self.end_later)
        self._finalizer.atexit = False  # `_end_all` ends them at exit
        with _lock:
            _owned[id(self)] = self

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
                _owned.pop(id(self), None)

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
_owned: dict[int, OwnedRanks] = {}


@atexit.register
def _end_all() -> None:
    for owned in list(_owned.values()):
        with suppress(Exception):  # an error must not keep the other clusters alive
            owned.end()


def count_alive_ranks() -> int:
    """Return the number of living ranks in all clusters of this process, including those that are just ending."""
    return sum(owned.alive for owned in list(_owned.values()))


def get_owned_ranks() -> list[OwnedRanks]:
    """Return the ranks of all clusters that still exist, in the order in which they were started."""
    return [owned for owned in list(_owned.values()) if owned.get_cluster() is not None]


# End clusters that a notebook can no longer reach, although IPython keeps what cells returned (`Out`, `_`).
#
# If a cell that starts a cluster is run again, the new cluster takes the variable of the old one. The old cluster is
# then ended, unless another name refers to it, such as that of a training.


_CACHES = ("_oh", "Out", "_ih", "In", "_dh")  # IPython's own lists and dicts of the inputs and results of cells
_KEPT = re.compile(r"_+(i+|\d+|i\d+)?")  # names that IPython gives to single inputs and results, which are the user's
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
    shell = _get_shell()
    names = shell.user_ns
    for owned in get_owned_ranks()[:-1]:
        if (cluster := owned.get_cluster()) is None:
            continue
        caches = (names[name] for name in _CACHES if name in names)
        name = find_holder_name(cluster, names, (shell, *caches), shell.user_ns_hidden)
        if not name:
            cluster.end_later()
        elif names.get(name) is not cluster and owned.kept_by != name:
            owned.kept_by = name
            print(
                f"The {owned.ranks.count()} ranks of an earlier cluster stay alive: they are in use by `{name}`. "
                "They end with it, or when you stop() that cluster.",
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
    ignored = {*hidden, *_CACHES}
    holders = {id(value): name for name, value in names.items() if name not in ignored and not _KEPT.fullmatch(name)}
    at_work = _get_thread_locals()
    modules = []
    for name, module in list(sys.modules.items()):
        if find_user_file(name, module):
            holders.setdefault(id(vars(module)), name)
        elif isinstance(module, ModuleType):
            modules.append(vars(module))
    visited = {id(item) for item in (thing, names, holders, at_work, *aside, *modules)}
    # Breadth-first search backwards along references, from `thing` towards a named object. The namespaces that must not
    # count (IPython's caches, other modules) are marked as visited beforehand, which cuts these paths off. A single
    # result (`_`, `_12`) is not cut off: the user's names may refer to the same object.
    edge = [thing]
    while edge and len(visited) < _MOST:
        for item in edge:
            if id(item) in holders:
                return holders[id(item)]
            if id(item) in at_work:
                return THREAD
        edge = _find_referrers(edge, visited)
    return THREAD if edge else ""


def _find_referrers(things: list[object], visited: set[int]) -> list[object]:
    """Return what refers to `things`, except for objects of this search itself and those visited before."""
    referrers = [
        referrer
        for referrer in gc.get_referrers(*things)
        if referrer is not things
        and id(referrer) not in visited
        and not isinstance(referrer, FrameType | ModuleType)
        # `*things` has made a tuple of them for the call above, which refers to them, too
        and not (
            isinstance(referrer, tuple) and len(referrer) == len(things) and all(map(operator.is_, referrer, things))
        )
    ]
    visited.update(map(id, referrers))
    return referrers


def _get_thread_locals() -> set[int]:
    """Return the ids of the local variables of all functions running in other threads."""
    ids: set[int] = set()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top if thread != get_ident() else None
        while frame is not None:
            ids.update(map(id, frame.f_locals.values()))
            frame = frame.f_back
    return ids
