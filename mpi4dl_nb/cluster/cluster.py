"""A cluster of ranks in the notebook: start the ranks, call functions on all of them, restart and stop them."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import RLock, get_ident
from typing import Any, NoReturn

from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache, calibrate_cluster
from mpi4dl_nb.cluster.loopback_ranks import LoopbackRanks, SingleThreadRanks
from mpi4dl_nb.cluster.mpi_ranks import MpiRanks
from mpi4dl_nb.cluster.owned_ranks import OwnedRanks, count_alive_ranks, get_owned_ranks, watch_notebook
from mpi4dl_nb.cluster.remote_call import Ranks, RemoteCall
from mpi4dl_nb.engines.checks import check_choice, is_number
from mpi4dl_nb.engines.comm.device import compute_threads_per_rank, count_cores
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError, RankError
from mpi4dl_nb.engines.formatting import format_html_table
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.server.notebook_imports import pack
from mpi4dl_nb.engines.server.rank_server import recover, recover_and_reset
from mpi4dl_nb.launch.hosts import choose_hosts
from mpi4dl_nb.launch.mpi_library import choose_backend
from mpi4dl_nb.launch.multi_host import HostLost
from mpi4dl_nb.launch.process_output import OutputPrinter

# Names that completion offers for the public objects.


def get_public_names(thing: object) -> list[str]:
    """Return the sorted names of an object without private ones."""
    return sorted(name for name in object.__dir__(thing) if not name.startswith("_"))


_THREADS: dict[str, Callable[[int], Ranks]] = {"loopback": LoopbackRanks, "in_turn": SingleThreadRanks}
_BACKENDS = ("mpi", *_THREADS)
_DESCRIPTIONS = {
    "mpi": "mpi: one process per rank",
    "loopback": "loopback: one thread of this process per rank",
    "in_turn": "in_turn: one thread of this process for all ranks, one after another",
}
HELP = "Call heal() on the cluster; what its ranks held is lost, but for checkpoints."
_PATIENCE_S = 10.0  # time that the next call after a failure waits for ranks that have not returned


class Cluster:
    """A group of `n` ranks that run functions together.

    `backend="mpi"` starts the ranks as MPI processes, and `"loopback"` as threads of this process: at once and without
    MPI, but slower at work. `"in_turn"` uses one thread for all ranks and switches to another rank whenever one waits;
    with a plan of `offload_activations`, the running rank has its activations in memory, and the others have theirs in
    a file. (Code that polls for a message, rather than waits for it, never receives one this way.) `"auto"` uses MPI if
    this machine has one and enough memory for the processes, else threads; `cluster.backend` names the choice. After a
    failure, the ranks are ready for the next call, unless one has died: then `dead` says so, and `heal()` restarts it.

    If ranks wait for a rank that makes no progress for `hang_after_s` seconds, they are released, and that rank is
    ended (None: they wait for ever). While no rank waits for another, work may take any time: the stop button ends it.
    A start fails if one of its processes was stopped by a signal for 10 seconds, or `hang_after_s` if that is less.

    `hosts` are reached by ssh, without a password: `["node1", "node2:3"]`, with or without slots, a dict of slots by
    name, or a hostfile. Inside a Slurm or PBS job they default to the hosts of the job. All hosts need this Python in
    the same place and the current working folder; files that ranks read, and checkpoints, must be on storage that all
    hosts share. A host that does not answer for some seconds is reported with its ranks; `heal()` continues without it.

    Output, warnings and logs of the ranks are shown while they work, with `[rank 1]` before each line, up to
    20,000 characters of a rank at once and 5,000 a second after that; each line counts 100 more than it has.
    `output=False` shows none. Ranks import the notebook's modules from its `sys.path`; if the
    file of a module has changed since they imported it, they are sent its functions as the notebook has them. A cluster
    ends when no reference to it is left; so does an older cluster of a notebook that no name refers to, although `Out`
    may still hold it.

    >>> with Cluster(2, backend="loopback") as cluster:
    ...     cluster.call(lambda host, text: f"{text} {host.world.rank} of {host.world.size}", "rank")
    ['rank 0 of 2', 'rank 1 of 2']
    """

    def __init__(
        self,
        n: int,
        backend: str = "mpi",
        hang_after_s: float | None = 300.0,
        hosts: Sequence[str] | Mapping[str, int] | str | PathLike[str] | None = None,
        output: bool = True,
    ) -> None:
        _check_count(n)
        if hang_after_s is not None and not (is_number(hang_after_s) and hang_after_s >= 1):
            raise PlanError(f"hang_after_s={hang_after_s!r} must be 1 second or more, or None for no limit.")
        check_choice("backend", backend, ("auto", *_BACKENDS))
        self.hosts = choose_hosts(hosts, backend in ("auto", "mpi"))
        backend = choose_backend(backend, n, self.hosts is not None)
        self.n, self.backend, self.hang_after_s = n, backend, hang_after_s
        self._hurry: tuple[int, Callable[[], bool]] = (0, lambda: False)
        self.dead = ""
        self._dead_rank: int | None = None
        self._ranks: Ranks | None = None
        self._owned: OwnedRanks | None = None
        self._shown = OutputPrinter(output)
        self._last: RemoteCall | None = None
        self.machine: Machine | None = None
        self.freed: list[str] = []  # names of trainings that are no more here: the ranks free them with the next one
        # Held during each call: concurrent calls, from a widget's thread and a cell, would mix their messages. A caller
        # holds it where several calls, or a call and what it changes here, are one. So it is reentrant.
        self.turn = RLock()
        # Held while ranks are started or given up, so that only one thread does so. It is taken after `turn`, or alone:
        # `stop` does not wait for a call, but ends it.
        self._change = RLock()

    @property
    def is_one_process(self) -> bool:
        """Whether all ranks are in this process."""
        return self.backend != "mpi"

    def start(self) -> Cluster:
        """Start the ranks and wait until they are ready. Raises RankError, with their output, if they do not start."""
        with self.turn, self._change:
            if self._ranks is None:
                if get_owned_ranks():
                    gc.collect()  # a Training is part of a reference cycle: only a collection ends its old cluster
                self._ranks, self._last, self.dead = self._launch(), None, ""
                self._owned = OwnedRanks(self, self._ranks)
                watch_notebook()
        return self

    def _launch(self) -> Ranks:
        if self.backend == "mpi":
            return MpiRanks(self.n, self.hosts, self.hang_after_s)
        return _THREADS[self.backend](self.n)

    def stop(self) -> None:
        """End the ranks, also during a call of another thread, which then raises RankError. All their state is lost."""
        if (owned := self._give_up_ranks()) is not None:
            owned.end()

    def end_later(self) -> None:
        """End the ranks as `stop` does, but in a background thread."""
        if (owned := self._give_up_ranks()) is not None:
            owned.end_later()

    def _give_up_ranks(self) -> OwnedRanks | None:
        with self._change:
            owned, self._owned, self._ranks = self._owned, None, None
        return owned

    @property
    def is_started(self) -> bool:
        """Whether there are ranks, alive or dead."""
        return self._ranks is not None

    def restart(self) -> Cluster:
        """Stop the ranks and start new ones. All state that they held is lost."""
        self.stop()
        return self.start()

    def heal(self, fewer: bool = False) -> Cluster:
        """Make the cluster ready again after a failure. If all ranks are alive and answer, they keep their state.

        If some ranks have died, or cannot be synchronised again, all are restarted; with `fewer`, the living ranks
        continue without the dead ones, which takes no time, and `n` becomes smaller. Either way the state of the ranks
        is lost, and `training.load(...)` restores it from a checkpoint. Hosts that do not answer are left out; their
        ranks move to the other hosts, or are dropped (`fewer`). Raises RankError, and PlanError if hosts lack slots.
        """
        with self.turn:
            # From the largest loss to the smallest:
            #
            #     a host is silent          drop it, restart all ranks on the others
            #     ranks are dead, `fewer`   shrink the communicator (ULFM), without a restart
            #     ranks are dead            restart all ranks
            #     all ranks are alive       synchronise them; if that fails, restart all
            if (ranks := self._ranks) is None:
                return self.restart()
            cut, lost = ranks.find_lost_hosts(), ranks.find_lost_ranks()
            if cut and self.hosts:
                left = self.hosts.exclude(cut)
                n = self.n - fewer * sum(isinstance(ended, HostLost) for ended in lost.values())
                left.assign_ranks(n)  # raises PlanError before anything has ended, if the ranks do not fit
                self.hosts, self.n, self.machine = left, n, None
                return self.restart()
            if fewer and lost:
                if len(lost) == self.n:
                    raise RankError(f"None of the {self.n} ranks is left to go on. Call heal() to start them anew.")
                if self._last is not None:
                    self._last.release(_PATIENCE_S)
                ranks.exclude_ranks(lost)
                self.n, self.dead, self.machine = self.n - len(lost), "", None
                self._resync(ranks, recover_and_reset)
                return self
            if self.dead or lost:
                return self.restart()
            try:
                self._make_ready()
            except RankError:
                self.restart()
        return self

    def resize(self, n: int) -> Cluster:
        """Change the cluster to `n` started ranks.

        If `n` changes or a rank has died, all ranks end first, and their state is lost.
        """
        _check_count(n)
        with self.turn:
            if self.hosts:
                self.hosts.assign_ranks(n)  # raises PlanError before anything has ended, if the ranks do not fit
            if n != self.n or self.dead or (self._ranks and self._ranks.find_lost_ranks()):
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
        """Run `function(host, *args, *per_rank[rank])` on every rank at once and return the results in rank order.

        `host` is the `RankServer` of the rank. Functions may be defined in a cell. If a rank fails,
        the other ranks stop waiting, and its error is raised within a second, with `rank` and `remote_traceback`.
        """
        with self.turn:
            parts = [()] * self.n if per_rank is None else list(per_rank)
            if len(parts) != self.n:
                raise PlanError(f"per_rank has {len(parts)} entries, but the cluster has {self.n} ranks.")
            ranks = self._make_ready()
            try:
                # What is common to all ranks, with the function, is pickled once, and sent to each with its own part.
                common, *packed = ranks.pack([(function, args), *parts])
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                name = getattr(function, "__qualname__", repr(function))
                raise PlanError(f"{name} and its arguments cannot be sent to the ranks: {error}") from error
            self._shown.begin_call()
            self._last = call = RemoteCall(ranks, self._shown.show, self.hang_after_s, self._is_late)
            with self._explain_stop(ranks):
                call.run(common, packed)
                if call.failures or call.hang:
                    self._check_alive(ranks, call.make_error())
                    raise call.make_error()
            return [call.answers[rank].value for rank in range(self.n)]

    @contextmanager
    def limit_calls(self, is_late: Callable[[], bool]) -> Iterator[None]:
        """Within this context, abandon a call of this thread with CallInterrupted as soon as `is_late()` is true."""
        self._hurry, before = (get_ident(), is_late), self._hurry
        try:
            yield
        finally:
            self._hurry = before

    def _is_late(self) -> bool:
        """Whether the time limit of the current thread's call has passed."""
        thread, is_late = self._hurry
        return thread == get_ident() and is_late()

    def calibrate(
        self,
        store: str | PathLike[str] | None = None,
        again: bool = False,
        quick: bool | None = None,
        accept_noise: bool = False,
        progress: bool = True,
    ) -> Machine:
        """Measure how fast the ranks compute and send.

        The measurement takes about a minute and is remembered (`again`: measure again). It measures the ranks' CPUs, in
        processor time, not GPUs.

        `store` is a file: a calibration stored there for as many ranks is read, otherwise the file is written. Without
        `store`, the calibration is still remembered for other notebooks. `quick` measures for a quarter of a minute,
        for a first look, if nothing better is known; None accepts a quick calibration that exists, and measures quickly
        if other programs take the cores, which is known in the first second; False requires all repetitions, and is
        refused on such a machine. If repetitions differ by much (`Machine.noise`), the measurement is repeated once.
        Of a calibration that is noisy, or quick because of the load, a warning says so, and how to repeat it: it serves
        this cluster but is not remembered. `accept_noise` takes the first measurement as it is, without a warning. A
        quick or noisy calibration is not written, to no `store` either. A calibration can be interrupted. Raises
        RankError, and PlanError if the measurement is refused (`quick=False`), if the file holds something else or
        cannot be read or written, or if the ranks take turns, because their speed when working at once is unknown.
        """
        if self.backend == "in_turn":
            raise PlanError(
                "Ranks in turn cannot be calibrated: predictions are of ranks that work at once. Calibrate a Cluster "
                "with backend='mpi', or name a machine: mpi4dl_nb.forecast(model, plan, image_shape, 'Summit')."
            )
        kept = (
            CalibrationCache(Path(store)) if store else CalibrationCache.of(self.n, self.backend, str(self.hosts or ""))
        )
        remembered = self.machine
        if again:
            remembered = None
        elif store or not self._is_calibrated(quick):
            remembered = kept.read()
        self.machine = machine = remembered or self.machine
        if again or machine is None or not self._is_calibrated(quick):
            kept.check_writable()
            machine = calibrate_cluster(self.call, self.n, quick, accept_noise, progress)
            self.machine, remembered = machine, None
        if remembered is None:
            kept.write(machine)
        return machine

    def _is_calibrated(self, quick: bool | None) -> bool:
        """Whether the calibration is for the current number of ranks and, if `quick` is False, not a quick one."""
        known = self.machine
        return known is not None and known.ranks == self.n and not (quick is False and known.quick)

    def _make_ready(self) -> Ranks:
        """Return the ranks, ready for a call; after a failure, they are synchronised again. Raises RankError."""
        if (ranks := self._ranks) is None:
            raise RankError("The cluster is not started. Call start(), or use `with Cluster(...) as cluster:`.")
        with self._explain_stop(ranks):
            self._check_alive(ranks)
            if self._last is not None and not self._last.clean:
                # Ranks may still run a call that has failed: the next one must not start before all of them have
                # returned. Then they drop the messages of that call that nobody has received, or the next call would
                # receive them.
                if not self._last.release(_PATIENCE_S):
                    rank = min(self._last.waiting.values())
                    self._mark_dead(RankError(f"Rank {rank}: it has not come back within {_PATIENCE_S:.0f} s.", rank))
                self._resync(ranks, recover)
        return ranks

    @contextmanager
    def _explain_stop(self, ranks: Ranks) -> Iterator[None]:
        """Raise any error of this context as a RankError that says so if another thread has stopped `ranks`."""
        try:
            yield
        except Exception as error:
            if self._ranks is ranks:
                raise
            raise RankError(
                "The cluster was stopped by another thread during a call. What its ranks held is lost, but for "
                "checkpoints. Call start() for new ranks."
            ) from error

    def _resync(self, ranks: Ranks, function: Callable[..., None]) -> None:
        """Run a function on all ranks that synchronises them again."""
        self._last = RemoteCall(ranks, self._shown.show)
        self._last.run(pack((function, ())), [pack(())] * self.n, _PATIENCE_S)
        if not self._last.clean:
            error = self._last.make_error()
            self._check_alive(ranks, error)
            self._mark_dead(RankError(f"The ranks could not be synchronised again. {error}", error.rank))

    def _check_alive(self, ranks: Ranks, error: Mpi4dlError | None = None) -> None:
        """Raise RankError if ranks have died; `error`, if given, describes the failure in more detail."""
        if self.dead:
            raise RankError(self.dead, self._dead_rank)
        if lost := ranks.find_lost_ranks():
            rank = next(iter(lost))  # the first to die
            self._mark_dead(error or RankError(f"Rank {rank}: {lost[rank]}", rank))

    def _mark_dead(self, error: Mpi4dlError) -> NoReturn:
        """Mark the cluster as unusable until it is healed, and raise an error with the reason."""
        self.dead, self._dead_rank = f"{str(error).rstrip('.')}. {HELP}", error.rank
        # A new object for each raise: notes and tracebacks would otherwise grow with every call on a dead cluster.
        failure = RankError(self.dead, error.rank)
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from None

    @property
    def state(self) -> str:
        """State in words: not started, ready, or why the cluster is unusable."""
        return self.dead or "ready" if self.is_started else "not started"

    def __repr__(self) -> str:
        return f"<Cluster of {self.n} ranks, backend={self.backend!r}: {self.state}; {_describe_alive()}>"

    def _repr_html_(self) -> str:
        threads = {"mpi": compute_threads_per_rank(self.n), "loopback": 1, "in_turn": count_cores()}
        facts = {
            "Ranks": self.n,
            **({"Hosts": self.hosts} if self.hosts else {"Threads per rank": threads[self.backend]}),
            "Backend": _DESCRIPTIONS[self.backend],
            "State": self.state,
            "This notebook": _describe_alive(),
        }
        return format_html_table("Cluster", facts)

    def __dir__(self) -> list[str]:
        return get_public_names(self)


def _describe_alive() -> str:
    count = count_alive_ranks()
    return f"{count or 'no'} {'rank' if count == 1 else 'ranks'} of this notebook {'is' if count == 1 else 'are'} alive"


def _check_count(n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise PlanError(f"n={n!r} must be a whole number of ranks, 1 or more.")
