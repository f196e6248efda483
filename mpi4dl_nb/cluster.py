"""The ranks, as the notebook holds them: start them, call functions on all of them, restart and stop them."""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

from engines.errors import PlanError, RankError
from engines.facts import facts_table
from engines.host import Host, dumps, recover
from engines.predict.calibrate import calibrate
from engines.predict.machine import Machine
from mpi4dl_nb.calls import DEATH, Call, Ranks
from mpi4dl_nb.launch import LoopbackRanks, MpiRanks, threads_per_rank
from mpi4dl_nb.names import public_names

__all__ = ["Cluster"]

_BACKENDS: dict[str, Callable[[int], Ranks]] = {"mpi": MpiRanks, "loopback": LoopbackRanks}
_SAID = {"mpi": "mpi: one process per rank", "loopback": "loopback: one thread of this process per rank"}
_PATIENCE_S = 10.0  # the next call after a failure waits this long for ranks that have not come back


class Cluster:
    """`n` ranks that run functions together.

    `backend="mpi"` starts them as MPI processes, `"loopback"` as threads of this process: at once and without
    MPI, but slower at work. After a failure the ranks are ready for the next call, unless one has died: then
    `dead` says so, and only `restart()` helps.

    >>> with Cluster(2, backend="loopback") as cluster:
    ...     cluster.call(lambda host, text: f"{text} {host.world.rank} of {host.world.size}", "rank")
    ['rank 0 of 2', 'rank 1 of 2']
    """

    def __init__(self, n: int, backend: str = "mpi") -> None:
        _check_count(n)
        if backend not in _BACKENDS:
            raise PlanError(f"backend={backend!r} must be one of {', '.join(map(repr, _BACKENDS))}.")
        self.n, self.backend = n, backend
        self.dead, self._dead_rank = "", 0
        self._ranks: Ranks | None = None
        self._last: Call | None = None
        self.machine: Machine | None = None
        self._turn = RLock()  # two calls at once, from a widget's thread and a cell, would mix their messages

    def start(self) -> Cluster:
        """Start the ranks and wait for them. Raises RankError if they do not come, with what they said."""
        if self._ranks is None:
            self._ranks, self._last, self.dead = _BACKENDS[self.backend](self.n), None, ""
            atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """End the ranks, and with them all that they hold."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            atexit.unregister(self.stop)
            ranks.stop()

    def restart(self) -> Cluster:
        """Stop, and start afresh. What the ranks held is lost."""
        self.stop()
        return self.start()

    def resize(self, n: int) -> Cluster:
        """Be `n` ranks, and started. Where there are others, or one has died, all end first: what they held is lost."""
        _check_count(n)
        with self._turn:
            if n != self.n or self.dead:
                self.stop()
            self.n = n
            return self.start()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def call(
        self, function: Callable[..., Any], *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """`function(host, *args, *per_rank[rank])` on every rank at once; the values in rank order.

        `host` is the rank's own `engines.host.Host`. Functions may come from a cell. If a rank fails, the
        others stop waiting, and its error is raised within a second, with `rank` and `remote_traceback`.
        """
        parts = [()] * self.n if per_rank is None else list(per_rank)
        if len(parts) != self.n:
            raise PlanError(f"per_rank has {len(parts)} entries, but the cluster has {self.n} ranks.")
        common, own = _packed(function, (function, args)), [_packed(function, part) for part in parts]
        with self._turn:
            self._heal()
            self._last = call = Call(self._ranks)
            call.make(common, own)
            if call.failures:
                self._check_alive()
                raise call.error()
        return [call.answers[rank].value for rank in range(self.n)]

    def calibrate(self, store: str | PathLike[str] | None = None, again: bool = False) -> Machine:
        """How fast these ranks compute and send: measured once, in some seconds, and remembered (`again`: anew).

        It is their processors that are measured, in processor time, and not GPUs.

        `store` is a file: what was stored there for as many ranks is read, otherwise it is written. Raises RankError,
        and PlanError where the file holds something else.
        """
        kept = None if store is None else Path(store)
        if kept and kept.exists() and not again:
            self.machine = Machine.from_json(kept.read_text())
        if self.machine is None or self.machine.ranks != self.n or again:
            self.machine = self.call(_calibrated)[0]
            if kept:
                kept.write_text(self.machine.to_json())
        return self.machine

    def _heal(self) -> None:
        """Be ready for a call; after a failure, bring the ranks together again. Raises RankError."""
        if self._ranks is None:
            raise RankError("The cluster is not started. Call start(), or use `with Cluster(...) as cluster:`.")
        self._check_alive()
        if self._last is None or self._last.clean:
            return
        if not self._last.release(_PATIENCE_S):
            self._die(min(self._last.waiting.values()), f"it has not come back within {_PATIENCE_S:.0f} s")
        self._last = Call(self._ranks)
        self._last.make(dumps((recover, ())), [dumps(())] * self.n, _PATIENCE_S)
        if not self._last.clean:
            self._check_alive()
            self._die(self._last.error().rank, "it does not find together with the others again")

    def _check_alive(self) -> None:
        if self.dead:
            raise RankError(self.dead, self._dead_rank)
        if lost := self._ranks.lost():
            self._die(lost[0], DEATH.message)

    def _die(self, rank: int, why: str) -> NoReturn:
        self.dead = f"Rank {rank}: {why}. Call restart() on the cluster; what its ranks held is lost."
        self._dead_rank = rank
        raise RankError(self.dead, rank)

    @property
    def state(self) -> str:
        """In words: not started, ready, or why it is of no use any more."""
        return "not started" if self._ranks is None else self.dead or "ready"

    def __repr__(self) -> str:
        return f"<Cluster of {self.n} ranks, backend={self.backend!r}: {self.state}>"

    def _repr_html_(self) -> str:
        facts = {
            "Ranks": self.n,
            "Threads per rank": threads_per_rank(self.n),
            "Backend": _SAID[self.backend],
            "State": self.state,
        }
        return facts_table("Cluster", facts)

    def __dir__(self) -> list[str]:
        return public_names(self)


def _check_count(n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise PlanError(f"n={n!r} must be a whole number of ranks, 1 or more.")


def _calibrated(host: Host) -> Machine:
    return calibrate(host.world)


def _packed(function: Callable[..., Any], value: Any) -> bytes:
    try:
        return dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise PlanError(f"{name} and its arguments cannot be sent to the ranks: {error}") from error
