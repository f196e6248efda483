"""The watch over a start: a process that was stopped, has ended or does nothing is named within a limit in seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from threading import current_thread, main_thread

import psutil
import pytest
from ipyparallel.cluster.launcher import LocalProcessLauncher

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.cluster.mpi_ranks import MpiRanks
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.launch import startup_monitor
from mpi4dl_nb.launch.cluster_processes import ClusterProcesses
from mpi4dl_nb.launch.process_output import CaptureMixin, run_in_loop
from mpi4dl_nb.launch.reaper_process import Reaper, is_running
from mpi4dl_nb.launch.startup_monitor import StartupMonitor

WHAT = "Of 2 ranks only 0 have reported"


def call_at_start(monkeypatch: pytest.MonkeyPatch, number: int, strike: Callable[[int], object]) -> list[int]:
    """Have `strike(pid)` befall the controller (0) or mpiexec (1) as soon as it runs; return the pids that were hit."""
    register, hit = MpiRanks._register, []

    def register_and_strike(self, launcher):
        register(self, launcher)
        if len(self._launchers) == number + 1:
            hit.append(launcher.pid)
            strike(launcher.pid)

    monkeypatch.setattr(MpiRanks, "_register", register_and_strike)
    return hit


def list_family() -> set[psutil.Process]:
    return set(filter(is_running, psutil.Process().children(recursive=True)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "name"), [(0, "the controller of the ranks"), (1, "mpiexec")])
def test_a_start_names_the_helper_that_was_stopped_and_leaves_nothing(monkeypatch, number, name):
    before = list_family()
    hit = call_at_start(monkeypatch, number, lambda pid: os.kill(pid, signal.SIGSTOP))
    cluster, start_s = Cluster(2, hang_after_s=1), time.monotonic()
    with pytest.raises(RankError) as caught:
        cluster.start()
    assert f"{name} (process {hit[0]}) was stopped by a signal, and has not gone on for " in str(caught.value)
    assert "start again" in str(caught.value)
    assert time.monotonic() - start_s < 20
    assert list_family() == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [0, 1])
def test_a_start_names_the_helper_that_was_killed(monkeypatch, number):
    hit = call_at_start(monkeypatch, number, lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RankError) as caught:
        Cluster(2).start()
    told = (
        f"The controller, through which the notebook talks to the ranks (process {hit[0]}), has ended.",
        f"mpiexec (process {hit[0]}) has ended by signal 9",
    )
    assert told[number] in str(caught.value)


def test_the_signal_that_ended_a_helper_is_known_as_soon_as_its_end(monkeypatch):
    """Whoever asked while another thread had the code, but had not stored it yet, got `unknown`."""
    wait = psutil._psplatform.Process.wait

    def wait_and_pause(process, timeout=None):
        code = wait(process, timeout)
        if current_thread() is not main_thread():
            time.sleep(0.5)
        return code

    class Launcher(CaptureMixin, LocalProcessLauncher):
        pass

    async def start() -> None:
        launcher.start()

    monkeypatch.setattr(psutil._psplatform.Process, "wait", wait_and_pause)
    launcher = Launcher()
    launcher.cmd_and_args = [sys.executable, "-c", "import time; time.sleep(60)"]
    run_in_loop(start())
    assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGKILL)
    while (code := launcher.poll()) is None:
        time.sleep(0.01)
    assert code == -signal.SIGKILL


@pytest.mark.nightly
def test_a_heal_during_which_a_helper_is_stopped_fails_in_time_and_the_next_one_heals(monkeypatch):
    with Cluster(2, hang_after_s=1) as cluster:
        with pytest.raises(RankError):
            cluster.call(lambda host: os._exit(3))
        with monkeypatch.context() as patch:
            call_at_start(patch, 1, lambda pid: os.kill(pid, signal.SIGSTOP))
            with pytest.raises(RankError, match=r"mpiexec .process \d+. was stopped by a signal"):
                cluster.heal()
        assert cluster.heal().call(lambda host: host.world.rank) == [0, 1]


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(startup_monitor, "time", clock)
    monkeypatch.setattr(StartupMonitor, "usual_s", startup_monitor._WORK_S)  # as before the first start
    monkeypatch.setattr(startup_monitor, "compute_load_factor", lambda: 1.0)
    monkeypatch.setattr(startup_monitor, "count_cores", lambda: 2)
    return clock


@pytest.mark.parametrize(("hang_after_s", "limit_s"), [(None, 10), (300, 10), (3, 3)])
def test_a_stopped_process_is_reported_after_ten_seconds_or_earlier(clock, hang_after_s, limit_s):
    stopped = ["mpiexec (process 7)"]
    start = StartupMonitor(2, lambda: 0.1 * (clock.now_s - 1000), lambda: stopped, hang_after_s)
    trouble = ""
    while not trouble:
        clock.now_s += 0.5
        assert start.update(0, WHAT) == ""
        trouble = start.describe_stopped(WHAT)
    assert clock.now_s == 1000 + limit_s
    assert f"{WHAT}: mpiexec (process 7) was stopped by a signal, and has not gone on for {limit_s} s." in trouble


def test_a_process_that_goes_on_and_a_pause_of_all_are_no_fault(clock):
    """Of all: as where a batch system stops a job, or somebody the terminal's programs, the notebook included."""
    stopped = []
    start = StartupMonitor(2, lambda: 0.1 * (clock.now_s - 1000), lambda: stopped, 3)
    for turn in range(40):
        clock.now_s += 0.5
        stopped[:] = ["mpiexec (process 7)"] * (turn % 5 > 0)
        assert start.update(0, WHAT) + start.describe_stopped(WHAT) == ""
    stopped[:] = ["mpiexec (process 7)"]
    assert start.update(0, WHAT) + start.describe_stopped(WHAT) == ""
    clock.now_s += 600
    assert start.update(0, WHAT) + start.describe_stopped(WHAT) == ""


@pytest.mark.parametrize(("share", "is_given_up"), [(0.010, True), (0.05, False)])
def test_processes_that_wait_take_some_time_too_and_that_is_no_progress(clock, capsys, share, is_given_up):
    """0.5 % of a core for each rank; they looked busy for minutes, with a line that grew and began anew."""
    start = StartupMonitor(2, lambda: share * (clock.now_s - 1000))
    while not (trouble := start.update(0, WHAT)) and clock.now_s < 1200:
        clock.now_s += 0.5
    assert bool(trouble) == is_given_up
    assert not is_given_up or clock.now_s < 1050
    said = capsys.readouterr().err.splitlines()
    assert is_given_up == all("Its processes have done nothing for" in line for line in said)


PARENT = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(60)"


def test_the_processes_below_mpiexec_have_names(monkeypatch):
    """mpiexec, a supervisor, its rank and its nanny, made of programs that sleep."""
    monkeypatch.setattr("mpi4dl_nb.launch.cluster_processes._LOOK_S", 0.0)
    nest = ["-c", PARENT, "-c", PARENT, "-c", "import time; time.sleep(60)"]
    rank = f"import os; os.environ['OMPI_COMM_WORLD_RANK'] = '1'; {PARENT}"
    mpiexec = subprocess.Popen([sys.executable, "-c", rank, *nest])
    try:
        processes = ClusterProcesses()
        processes.add_helper("mpiexec", mpiexec.pid)
        deadline_s = time.monotonic() + 20
        while len(tree := psutil.Process(mpiexec.pid).children(recursive=True)) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert processes.find_stopped() == []
        assert processes.measure_work_s() > 0
        for each in reversed(tree):
            each.suspend()
        for each in tree:  # a signal is sent at once, and taken when its process is next scheduled
            while each.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline_s:
                time.sleep(0.01)
        named = {pid: name for name, pid in processes.find_stopped()}
        assert [named[each.pid] for each in tree] == ["the supervisor of rank 1", "rank 1", "the nanny of rank 1"]
        processes.set_ranks([mpiexec.pid, tree[1].pid])
        stopped = f"the supervisor of rank 1 (process {tree[0].pid}) was stopped by a signal"
        assert processes.describe_stopped_helpers() == stopped
        processes.keep_ranks([1])
        assert processes.describe_stopped_helpers() == stopped.replace("rank 1", "rank 0")
    finally:
        for each in [*tree, mpiexec]:
            each.kill()
        mpiexec.wait()


def test_a_reaper_that_is_stopped_while_it_ends_a_cluster_goes_on(monkeypatch):
    monkeypatch.setattr("mpi4dl_nb.launch.reaper_process._CHECK_S", 0.2)
    reaper = Reaper("a cluster without processes", [])
    wait = type(reaper._process).wait

    def stop_and_wait(process, timeout=None):
        if timeout == 0.2 and not hit and reaper._released:
            hit.append(process.pid)
            process.send_signal(signal.SIGSTOP)
        return wait(process, timeout)

    hit: list[int] = []
    monkeypatch.setattr(type(reaper._process), "wait", stop_and_wait)
    reaper.end_cluster(5)
    assert hit
    assert not psutil.pid_exists(hit[0])
