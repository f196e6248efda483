"""A cluster as a notebook uses it: the same promises over MPI processes and over threads.

Functions are defined inside the tests, as in a cell: the ranks can't import this file.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Event, Thread, Timer, get_ident
from types import SimpleNamespace

import psutil
import pytest
import torch

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.cluster.owned_ranks import count_alive_ranks
from mpi4dl_nb.cluster.remote_call import RemoteCall
from mpi4dl_nb.engines.comm import supervisor
from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.device import compute_threads_per_rank
from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.comm.world import Message, run_on_all
from mpi4dl_nb.engines.errors import CheckpointError, ImageError, LossError, PlanError, RankError, TraceError
from mpi4dl_nb.engines.server import rank_server
from mpi4dl_nb.engines.server.notebook_imports import pack
from mpi4dl_nb.launch.supervisor_reports import RankExit

N = 3


@pytest.fixture(scope="module", params=["loopback", "mpi"])
def shared(request):
    with Cluster(N, backend=request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    """Alive, whatever the test before has done to it; started seldom, for over MPI that takes ten seconds."""
    return shared.restart() if shared.dead else shared.start()


over_mpi = pytest.mark.parametrize("shared", ["mpi"], indirect=True)


def check_usable(cluster: Cluster) -> None:
    """All ranks can still communicate."""

    def sum_ones(host):
        ones = torch.ones(2)
        all_reduce(host.world, ones, range(N)).wait()
        return ones.tolist()

    assert cluster.call(sum_ones) == [[N, N]] * N


def list_family() -> set[psutil.Process]:
    """The processes that this one has started, and theirs, as far as they work."""
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


class Watch:
    """`with Watch() as watch: ...` and then `watch.s`."""

    def __enter__(self):
        self.start_s = time.monotonic()
        return self

    def __exit__(self, *failure):
        self.s = time.monotonic() - self.start_s


@pytest.mark.sampled(1)
def test_results_come_in_rank_order(cluster):
    word = "rank"

    def return_in_reverse(host, before, own):
        time.sleep(0.1 * (N - host.world.rank))
        return f"{before} {word} {host.world.rank} {own}"

    said = cluster.call(return_in_reverse, "-", per_rank=[(letter,) for letter in "abc"])
    assert said == ["- rank 0 a", "- rank 1 b", "- rank 2 c"]


def test_ranks_communicate(cluster):
    check_usable(cluster)


def test_every_rank_has_its_share_of_the_cores(cluster):
    own = compute_threads_per_rank(N) if cluster.backend == "mpi" else 1
    assert cluster.call(lambda host: torch.get_num_threads()) == [own] * N


def test_arguments_are_copies_on_every_backend(cluster):
    mine = torch.zeros(2)
    assert cluster.call(lambda host, tensor: tensor.add_(1).tolist(), mine) == [[1, 1]] * N
    assert mine.tolist() == [0, 0]


@pytest.mark.parametrize("waiting", ["all_reduce", "gather"])
def test_a_failure_releases_those_that_wait_and_is_reported_at_once(cluster, waiting):
    def fail_on_rank_1(host):
        if host.world.rank == 1:
            raise ValueError("no such pixel")
        if waiting == "gather":
            host.world.all_gather(None)
        all_reduce(host.world, torch.ones(1), range(N)).wait()

    with Watch() as watch, pytest.raises(RankError, match="Rank 1: ValueError: no such pixel") as caught:
        cluster.call(fail_on_rank_1)
    assert watch.s < 1.5
    assert caught.value.rank == 1
    assert 'raise ValueError("no such pixel")' in caught.value.remote_traceback
    assert "rank_server.py" not in caught.value.remote_traceback
    check_usable(cluster)


@pytest.mark.nightly
def test_a_failure_is_reported_while_others_still_compute(cluster):
    def fail_on_rank_1(host):
        if host.world.rank == 1:
            raise ValueError("no such pixel")
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            time.sleep(0.01)

    with Watch() as watch, pytest.raises(RankError, match="Rank 1: ValueError"):
        cluster.call(fail_on_rank_1)
    assert watch.s < 1.5
    check_usable(cluster)


def test_many_failures_do_not_wear_it_out(cluster):
    def fail_on_one_rank(host, rank):
        if host.world.rank == rank:
            raise ValueError("again")
        host.world.all_gather(None)

    for rank in (*range(N), *range(N)):
        with pytest.raises(RankError) as caught:
            cluster.call(fail_on_one_rank, rank)
        assert caught.value.rank == rank
    check_usable(cluster)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [PlanError, TraceError, ImageError, LossError, RankError])
def test_our_own_errors_keep_their_type(cluster, kind):
    def raise_kind(host):
        raise kind("too small")

    with pytest.raises(kind, match=r"Rank 0: too small \(And so on ranks 1, 2\.\)") as caught:
        cluster.call(raise_kind)
    assert caught.value.rank == 0
    assert "too small" in caught.value.remote_traceback


def test_the_way_to_a_failure_is_reported(cluster):
    def raise_from_key_error(host):
        try:
            {}["weights"]
        except KeyError as error:
            raise ValueError("no weights") from error

    with pytest.raises(RankError, match="ValueError: no weights") as caught:
        cluster.call(raise_from_key_error)
    first, second = caught.value.remote_traceback.split("which led to")
    assert "KeyError: 'weights'" in first
    assert "ValueError: no weights" in second


def test_an_exit_is_a_failure_like_others(cluster):
    with pytest.raises(RankError, match="SystemExit: 3"):
        cluster.call(lambda host: sys.exit(3))
    check_usable(cluster)


def test_what_ranks_hold_outlives_a_failure(cluster):
    def keep(host):
        host.get_kept(tuple)["mine"] = (host.world, host.world.rank)

    def raise_value_error(host):
        raise ValueError

    def look(host):
        world, rank = host.get_kept(tuple)["mine"]
        return world is host.world and world.all_gather(rank)

    cluster.call(keep)
    with pytest.raises(RankError):
        cluster.call(raise_value_error)
    assert cluster.call(look) == [[0, 1, 2]] * N


# An interrupt between a library's opening a file of /proc and its closing it leaves the file to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.nightly
def test_an_interrupt_ends_the_call_and_not_the_cluster(cluster):
    def wait_for_rank_0(host):
        until_s = time.monotonic() + 2
        while host.world.rank == 0 and time.monotonic() < until_s:
            time.sleep(0.01)
        host.world.all_gather(None)

    Timer(0.5, _thread.interrupt_main).start()
    with Watch() as watch, pytest.raises(KeyboardInterrupt):
        cluster.call(wait_for_rank_0)
    assert watch.s < 1.5
    check_usable(cluster)


def test_an_interrupt_between_the_messages_of_a_call_leaves_no_work_behind(cluster, monkeypatch):
    ranks, sent = cluster._ranks, []

    def submit(rank, common, own):
        future = type(ranks).submit(ranks, rank, common, own)
        if not sent:
            sent.append(future)
            signal.raise_signal(signal.SIGINT)  # before the call knows that this rank has its work
        return future

    monkeypatch.setattr(ranks, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        cluster.call(lambda host: host.world.all_gather(None))
    assert cluster.call(lambda host: host.world.rank) == [*range(N)]
    assert sent[0].done()


@over_mpi
def test_outside_calls_a_rank_ignores_interrupts(cluster):
    """ipykernel lets SIGINT raise KeyboardInterrupt while it handles a message, which could end the rank."""
    cluster.call(lambda host: None)
    found = [view.apply_sync(signal.getsignal, signal.SIGINT) for view in cluster._ranks._views]
    assert found == [signal.SIG_IGN] * N


@over_mpi
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # psutil's, between its open and its `with`
def test_an_interrupt_during_a_finaliser_is_not_lost(cluster, capfd):
    def wait_for_each_other(host):
        class Slow:
            def __del__(self):
                until_s = time.monotonic() + 1
                while time.monotonic() < until_s:
                    time.sleep(0.01)

        Slow()
        while True:
            host.world.all_gather(None)

    Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.call(wait_for_each_other)
    check_usable(cluster)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["loopback", "in_turn"])
def test_after_any_interrupt_the_ranks_are_synchronised(backend, monkeypatch):
    with Cluster(2, backend=backend) as cluster:
        submit = cluster._ranks.submit

        def submit_and_interrupt(rank, common, own):
            submit(rank, common, own)
            raise KeyboardInterrupt

        monkeypatch.setattr(cluster._ranks, "submit", submit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            cluster.call(lambda host: host.world.all_gather(None))
        monkeypatch.undo()
        assert not cluster._last.clean
        assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1], [0, 1]]


def test_no_call_leaves_gradients_off(cluster):
    """An interrupt can, as `no_grad` is entered or left: the next steps would train nothing, and say nothing."""
    if cluster.backend == "mpi":
        cluster.call(lambda host: torch.set_grad_enabled(False) and None)
    assert cluster.call(lambda host: torch.is_grad_enabled()) == [True] * N


def test_what_cannot_travel_is_said_before_a_rank_is_asked(cluster):
    with pytest.raises(PlanError, match="cannot be sent to the ranks"):
        cluster.call(lambda host: cluster.n)
    check_usable(cluster)


def test_a_result_that_cannot_travel_is_a_failure(cluster):
    with pytest.raises(RankError, match="TypeError: cannot pickle"):
        cluster.call(lambda host: _thread.allocate_lock())
    check_usable(cluster)


def test_arguments_per_rank_must_be_as_many_as_ranks(cluster):
    with pytest.raises(PlanError, match="2 entries, but the cluster has 3 ranks"):
        cluster.call(lambda host, own: own, per_rank=[(1,), (2,)])


ENDS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "left": (lambda: os._exit(3), "has left with exit code 3"),
    "faulty": (lambda: ctypes.string_at(0), r"was killed by SIGSEGV \(a fault in compiled code\)"),
}


def make_ending_work(how: str):
    """A function that ends the process of rank 1 while others wait for it."""
    end = ENDS[how][0]

    def work(host):
        get_status_board().report(b"forward pass", 7)
        if host.world.rank == 1:
            end()
        all_reduce(host.world, torch.ones(1), range(host.world.size)).wait()

    return work


@pytest.mark.sampled(1)
@over_mpi
@pytest.mark.parametrize("how", ENDS)
def test_a_dead_rank_is_named_and_healing_helps(cluster, how):
    before = list_family()
    with Watch() as watch, pytest.raises(RankError, match="Rank 1: its process " + ENDS[how][1]) as caught:
        cluster.call(make_ending_work(how))
    assert watch.s < 1
    assert caught.value.rank == 1
    assert "in forward pass, step 7" in str(caught.value)
    assert sorted(caught.value.__notes__) == [f"Rank {rank} was released in forward pass, step 7." for rank in (0, 2)]
    with pytest.raises(RankError, match=r"Call heal\(\)"):
        cluster.call(lambda host: None)
    assert ENDS["left"][1] in cluster._repr_html_() or how != "left"

    assert cluster.heal() is cluster
    assert not before & list_family()
    check_usable(cluster)


@pytest.mark.nightly
@over_mpi
def test_the_others_go_on_without_the_dead(cluster):
    """The two that are left are numbered anew: the one that was rank 2 is rank 1, and named so when it ends too."""
    names = cluster.call(lambda host: os.getpid())
    with pytest.raises(RankError):
        cluster.call(make_ending_work("killed"))
    with Watch() as watch:
        cluster.heal(fewer=True)
    assert watch.s < 2
    assert (cluster.n, cluster.state) == (2, "ready")
    assert cluster.call(lambda host: (os.getpid(), host.world.all_gather(host.world.rank))) == [
        (names[0], [0, 1]),
        (names[2], [0, 1]),
    ]
    with pytest.raises(RankError, match="Rank 1: its process has left"):
        cluster.call(make_ending_work("left"))
    cluster.n = N
    cluster.heal()
    check_usable(cluster)


def test_healing_without_the_dead_is_done_in_place(cluster):
    def keep_and_fail(host):
        host.get_kept(str)["kept"] = "kept"
        raise ValueError("no such pixel")

    with pytest.raises(RankError):
        cluster.call(keep_and_fail)
    with Watch() as watch:
        assert cluster.heal() is cluster
    assert watch.s < 1
    assert cluster.call(lambda host: host.get_kept(str).pop("kept")) == ["kept"] * N


@over_mpi
def test_a_rank_that_dies_between_two_calls_is_named(cluster):
    pids = cluster.call(lambda host: os.getpid())
    os.kill(pids[2], signal.SIGKILL)
    time.sleep(1)
    with pytest.raises(RankError, match="Rank 2: its process was killed by SIGKILL"):
        cluster.call(lambda host: host.world.all_gather(None))


HANGS = {
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "it was stopped by a signal"),
    "sleeping": (lambda: time.sleep(60), "for [23]"),
}


@pytest.mark.nightly
@over_mpi
@pytest.mark.parametrize("how", HANGS)
def test_a_rank_that_hangs_is_named_with_those_that_wait_for_it(cluster, how):
    """Stopped by a signal it can only be ended; asleep it hears that it is to stop."""
    hang, why = HANGS[how]

    def wait_for_hanging_rank(host):
        get_status_board().report(f"stage {host.world.rank}".encode())
        if host.world.rank == 1:
            hang()
        all_reduce(host.world, torch.ones(1), range(host.world.size)).wait()

    cluster.hang_after_s = 2
    try:
        with Watch() as watch, pytest.raises(RankError, match=f"Rank 1 does not go on: stage 1.*{why}") as caught:
            cluster.call(wait_for_hanging_rank)
    finally:
        cluster.hang_after_s = 300
    assert 2 <= watch.s < 5
    assert caught.value.rank == 1
    assert "Rank 0 waits: stage 0, for 2" in str(caught.value)
    assert bool(cluster.dead) == (how == "stopped")
    cluster.heal()
    check_usable(cluster)


@pytest.mark.nightly
@over_mpi
@pytest.mark.parametrize("how", ["asked to end", "leaves in order"])
def test_a_rank_that_ends_in_order_is_named_while_others_wait_for_it(cluster, how):
    """SIGTERM is what `kill` and batch systems send first; MPI's own end would wait for the others."""

    def end_in_order(host):
        if host.world.rank == 1:
            if how == "asked to end":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
                return
        all_reduce(host.world, torch.ones(1), range(host.world.size)).wait()

    with Watch() as watch, pytest.raises(RankError, match="Rank 1: its process"):
        cluster.call(end_in_order)
    assert watch.s < 4
    cluster.heal()
    check_usable(cluster)


@pytest.mark.nightly
@over_mpi
def test_a_process_that_a_rank_forks_ends_by_its_own_code(cluster):
    def fork_and_wait(host):
        if (child := os.fork()) == 0:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert cluster.call(fork_and_wait) == [7] * N


def test_a_call_that_waits_for_a_turn_has_as_many_ranks_as_there_are_then():
    cluster, found = Cluster(2, backend="loopback").start(), []
    with cluster.turn:
        waiting = Thread(target=lambda: found.append(cluster.call(lambda host: host.world.size)))
        waiting.start()
        time.sleep(0.1)
        cluster.resize(3)
    waiting.join()
    cluster.stop()
    assert found == [[3, 3, 3]]


def test_hosts_that_lack_slots_end_no_ranks():
    def refuse(n: int) -> None:
        raise PlanError(f"{n} ranks do not fit")

    with Cluster(2, backend="loopback") as cluster:
        cluster.hosts = SimpleNamespace(assign_ranks=refuse)
        with pytest.raises(PlanError, match="9 ranks do not fit"):
            cluster.resize(9)
        cluster.hosts = None
        assert cluster.n == 2
        assert cluster.call(lambda host: host.world.rank) == [0, 1]


def test_a_host_that_answers_again_leaves_an_error_in_words():
    """Its ranks were lost as the call looked, and are there as its error is made."""
    lost = [{1: RankExit(9)}, {}]
    call = RemoteCall(make_silent_ranks(lambda: lost.pop(0) if lost else {}, Future()), lambda lines: None)
    call.run(b"", [b"", b""], within_s=0.1)
    assert str(call.make_error()).startswith("Rank 1: ")


def make_silent_ranks(find_lost_ranks: Callable[[], dict[int, RankExit]], reply: Future[bytes]) -> SimpleNamespace:
    """Ranks whose only reply, or failure of the transport, is `reply`."""
    return SimpleNamespace(
        submit=lambda *_: reply, find_lost_ranks=find_lost_ranks, interrupt=lambda: None, count=lambda: 2,
        capture_output=nullcontext, read_output=list, find_stalled_ranks=dict, has_pending_output=lambda *_: False,
    )  # fmt: skip


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_death_that_the_transport_reports_first_is_named_as_what_it_is(is_dead):
    """The connection to a rank breaks as its process ends; that end is reported by another way, which may be slower."""
    broken: Future[bytes] = Future()
    broken.set_exception(ConnectionError("engine 0 died"))
    ends_at = time.monotonic() + 0.7
    call = RemoteCall(
        make_silent_ranks(lambda: {0: RankExit(3)} if is_dead and time.monotonic() > ends_at else {}, broken), print
    )
    call.run(b"", [b""])
    told = "its process has left with exit code 3" if is_dead else "ConnectionError: engine 0 died"
    assert str(call.make_error()) == f"Rank 0: {told}"


@pytest.mark.nightly
@over_mpi
def test_of_ranks_that_fail_in_the_midst_of_a_gather_the_true_error_is_reported(cluster):
    """What a revoked gather has brought has no sense in it, and is not read."""

    def gather_and_fail(host):
        host.world.all_gather(None)
        if host.world.rank != 1:
            time.sleep(random.random() / 200)
            raise OSError("No space left on device")
        return host.world.all_gather(bytes(100_000))

    pids = cluster.call(lambda host: os.getpid())
    for _ in range(10):
        with pytest.raises(RankError, match=r"Rank [02]: OSError: No space left on device") as caught:
            cluster.call(gather_and_fail)
        assert "pickl" not in "".join([str(caught.value), *caught.value.__notes__])
    assert cluster.call(lambda host: os.getpid()) == pids


@pytest.mark.nightly
def test_ranks_that_all_fail_after_a_gather_are_back_each_time(cluster):
    """A rank may still be in it when another one has failed: MPI's own gather was not left then, once in 170 times."""

    def gather_and_raise(host):
        host.world.all_gather(None)
        host.world.all_gather(bytes(random.randrange(3_000)))
        raise ValueError("after it")

    for _ in range(100):
        with pytest.raises(RankError, match="ValueError: after it"):
            cluster.call(gather_and_raise)
    check_usable(cluster)


def test_of_work_that_is_done_together_the_rank_is_named_where_it_failed(cluster):
    def write_on_all(host):
        def write_or_fail():
            if host.world.rank == 2:
                raise OSError("no space is left")

        run_on_all(host.world, write_or_fail, CheckpointError)

    for _ in range(5):
        with pytest.raises(CheckpointError, match=r"^Rank 2: no space is left\n"):
            cluster.call(write_on_all)


@pytest.mark.nightly
@over_mpi
def test_a_rank_that_hangs_in_the_midst_of_a_gather_is_named(cluster):
    """The others wait for its message."""

    def sleep_on_rank_1(host):
        if host.world.rank != 1:
            return host.world.all_gather(None)
        host.world.barrier()  # as the others do first
        return time.sleep(60)

    cluster.hang_after_s = 2
    try:
        with Watch() as watch, pytest.raises(RankError, match="Rank 1 does not go on") as caught:
            cluster.call(sleep_on_rank_1)
    finally:
        cluster.hang_after_s = 300
    assert 2 <= watch.s < 6
    assert "Rank 0 waits" in str(caught.value)
    cluster.heal()
    check_usable(cluster)


@over_mpi
def test_nobody_keeps_the_numbers_of_messages_that_are_answered(cluster):
    """A training of a million steps sends millions; the hub of the controller would hold 150 bytes for each."""
    for _ in range(5):
        cluster.call(lambda host: None)
    client = cluster._ranks._client
    queues = client.queue_status(verbose=True)
    assert [queues[number]["completed"] for number in client.ids] == [[]] * N


@pytest.mark.nightly
@over_mpi
@pytest.mark.parametrize("helper", ["controller", "mpiexec", "supervisor", "nanny"])
def test_a_helper_that_does_not_go_on_is_named(cluster, helper):
    """Those through which the notebook and the ranks hear of each other; while one is stopped, a rank hangs."""
    controller, mpiexec = (launcher.pid for launcher in cluster._ranks._launchers)
    rank = psutil.Process(cluster.call(lambda host: os.getpid())[1])
    pid = {"controller": controller, "mpiexec": mpiexec, "supervisor": rank.ppid(), "nanny": rank.children()[0].pid}[
        helper
    ]
    told = "Rank 1 does not go on" if helper == "nanny" else f"process {pid}. was stopped by a signal"
    cluster.hang_after_s = 3
    try:
        psutil.Process(pid).suspend()
        with Watch() as watch, pytest.raises(RankError, match=told):
            cluster.call(lambda host: time.sleep(60) if host.world.rank == 1 else host.world.all_gather(None))
        assert 3 <= watch.s < 10
        cluster.heal()
    finally:
        cluster.hang_after_s = 300
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).resume()
    check_usable(cluster)


@over_mpi
def test_a_helper_that_ends_is_the_cause_although_a_rank_that_ends_with_it_is_reported_first(cluster, monkeypatch):
    """On a busy machine, the reaper ends the ranks, and a report of that arrives before the notebook has looked."""
    ranks = cluster._ranks
    controller, _ = ranks._launchers
    poll = controller.poll

    def poll_late() -> object:
        code, deadline = poll(), time.monotonic() + 5
        if code is not None:
            while not ranks._reaper.get_ended_pids() and time.monotonic() < deadline:
                time.sleep(0.01)
            facts = {"rank": 2, "event": "moves"}, {"rank": 2, "event": "ended", "code": -15, "text": "", "for_s": 0}
            for each in facts:
                ranks._reports.parse_line(f"{supervisor.MARK}{json.dumps(each)}".encode())
        return code

    monkeypatch.setattr(controller, "poll", poll_late)
    told = rf"Rank 0: its process has ended with the controller of the ranks \(process {controller.pid}\)"
    Timer(0.5, os.kill, (controller.pid, signal.SIGTERM)).start()
    with pytest.raises(RankError, match=told) as caught:
        cluster.call(lambda host: time.sleep(60) if host.world.rank == 1 else host.world.all_gather(None))
    assert "SIGTERM" not in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.nightly
@over_mpi
@pytest.mark.parametrize("also", ["", "supervisor"])
def test_a_stopped_controller_is_named_while_ranks_compute(cluster, also):
    """Whatever they find would not arrive. With a supervisor stopped too nobody reports that its rank has ended."""
    pid = cluster._ranks._launchers[0].pid
    if also:
        psutil.Process(cluster.call(lambda host: os.getpid())[2]).parent().suspend()

    def run_turns(host):
        if host.world.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        for turn in range(60):
            get_status_board().report(f"turn {turn}".encode())
            time.sleep(0.1)

    cluster.hang_after_s = 2
    try:
        told = f"its answer does not arrive; the controller of the ranks .process {pid}. was stopped by a signal"
        with Watch() as watch, pytest.raises(RankError, match=told):
            cluster.call(run_turns)
        assert 2 <= watch.s < 4
        cluster.heal()
    finally:
        cluster.hang_after_s = 300
    check_usable(cluster)


@pytest.mark.nightly
@over_mpi
def test_a_stopped_helper_is_no_fault_as_long_as_ranks_answer(cluster):
    """It goes on, or it does not: nobody needs it."""
    mpiexec = psutil.Process(cluster._ranks._launchers[1].pid)
    cluster.hang_after_s = 3
    try:
        mpiexec.suspend()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            assert cluster.call(lambda host: host.world.rank) == list(range(N))
    finally:
        cluster.hang_after_s = 300
        mpiexec.resume()
    check_usable(cluster)


@pytest.mark.nightly
def test_ranks_that_compute_for_long_are_no_hang(cluster):
    cluster.hang_after_s = 1
    try:
        assert cluster.call(lambda host: time.sleep(2.5 if host.world.rank else 0)) == [None] * N
    finally:
        cluster.hang_after_s = 300


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_the_time_after_which_ranks_hang_is_checked(seconds):
    with pytest.raises(PlanError, match=r"hang_after_s=.* 1 second or more"):
        Cluster(2, hang_after_s=seconds)


def test_stop_leaves_no_process(shared):
    shared.stop()
    shared.stop()
    assert list_family() == set()
    with pytest.raises(RankError, match="not started"):
        shared.call(lambda host: None)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loopback", "mpi"])
def test_it_becomes_larger_or_smaller(backend):
    def place(host):
        ones = torch.ones(1)
        all_reduce(host.world, ones, range(host.world.size)).wait()
        kept, host.get_kept(bool)["kept"] = host.get_kept(bool).get("kept"), True
        return host.world.rank, ones.item(), kept

    cluster = Cluster(3, backend=backend)
    try:
        assert cluster.resize(2) is cluster  # it was not started, and is now
        assert cluster.call(place) == [(0, 2, None), (1, 2, None)]
        assert cluster.resize(2).call(place) == [(0, 2, True), (1, 2, True)]  # the same ranks, and what they hold
        with pytest.raises(PlanError, match="n=0 must be a whole number of ranks"):
            cluster.resize(0)
        assert cluster.resize(1).call(place) == [(0, 1, None)]
        assert (cluster.n, cluster.state) == (1, "ready")
    finally:
        cluster.stop()
    assert cluster.state == "not started"


@pytest.mark.parametrize("n", [0, -1, 1.5, "4", True, None])
def test_n_must_be_a_number_of_ranks(n):
    with pytest.raises(PlanError, match="whole number of ranks"):
        Cluster(n)


def test_an_unknown_backend_is_refused():
    with pytest.raises(PlanError, match="mpi, loopback"):
        Cluster(2, backend="nccl")


def test_a_call_needs_a_start():
    with pytest.raises(RankError, match=r"not started. Call start\(\)"):
        Cluster(2, backend="loopback").call(lambda host: None)


@pytest.mark.parametrize("end", [Cluster.stop, Cluster.end_later, Cluster.restart])
def test_a_stop_during_a_call_of_another_thread_is_named(end):
    def wait_for_message(host):
        host.world.exchange([], [Message(1 - host.world.rank, 0, torch.empty(1))]).wait()

    with Cluster(2, backend="loopback") as cluster:
        Timer(0.3, end, [cluster]).start()
        with pytest.raises(RankError, match="The cluster was stopped by another thread during a call"):
            cluster.call(wait_for_message)
        assert cluster.start().call(lambda host: host.world.rank) == [0, 1]


@pytest.mark.nightly
def test_a_stop_during_a_call_over_mpi_is_named():
    with Cluster(2) as cluster:
        for _ in range(3):
            Timer(0.5, cluster.stop).start()
            with Watch() as watch, pytest.raises(RankError, match="was stopped by another thread"):
                cluster.call(lambda host: time.sleep(20))
            assert watch.s < 10
            assert cluster.start().call(lambda host: host.world.rank) == [0, 1]


class SlowToStart(Cluster):
    def _launch(self):
        self.launched = [*getattr(self, "launched", []), time.monotonic()]
        time.sleep(0.3)
        return super()._launch()


def test_threads_that_start_a_cluster_at_once_start_one():
    cluster = SlowToStart(2, backend="loopback")
    threads = [Thread(target=cluster.start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cluster.launched) == 1
    assert cluster.call(lambda host: host.world.rank) == [0, 1]
    cluster.stop()


def test_a_stop_during_a_start_ends_what_was_started():
    cluster = SlowToStart(2, backend="loopback")
    before, thread = count_alive_ranks(), Thread(target=cluster.start)
    thread.start()
    while not hasattr(cluster, "launched"):
        time.sleep(0.01)
    cluster.stop()
    thread.join()
    assert cluster.state == "not started"
    assert count_alive_ranks() == before


def test_an_interrupt_ends_a_start_that_waits_for_another_thread():
    cluster, release = Cluster(2, backend="loopback"), Event()

    def hold() -> None:
        with cluster.turn:
            release.wait(10)

    thread = Thread(target=hold)
    thread.start()
    Timer(0.3, signal.pthread_kill, [get_ident(), signal.SIGINT]).start()
    with Watch() as watch, pytest.raises(KeyboardInterrupt):
        cluster.start()
    release.set()
    thread.join()
    assert watch.s < 5
    with cluster:
        assert cluster.call(lambda host: host.world.rank) == [0, 1]


def test_the_card_says_it_in_words():
    cluster = Cluster(2, backend="loopback")
    assert "not started" in repr(cluster)
    with cluster:
        card = cluster._repr_html_()
    assert '<th scope="row"' in card
    assert "ready" in card
    assert "color:" not in card


def test_a_tile_travels_without_its_image():
    image = torch.zeros(64, 64)
    assert len(pack(image[:1])) < image.nbytes / 8
    assert len(pack(image)) > image.nbytes


@pytest.mark.nightly
def test_the_notebook_knows_no_mpi():
    code = "import sys, mpi4dl_nb.cluster.cluster; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path.cwd()).returncode == 0


@pytest.mark.parametrize("seconds", ["300", 0, (1, 2)])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(PlanError, match=r"hang_after_s=.* must be 1 second or more, or None"):
        Cluster(2, hang_after_s=seconds)


def test_a_call_that_begins_late_ends_before_the_next_one(monkeypatch):
    """Threads begin when the system lets them: messages of an interrupted call must not meet those of the next one."""
    with Cluster(2, backend="loopback") as cluster:
        execute, delays = rank_server.execute, iter([0.5])

        def begin_late(*arguments):
            time.sleep(next(delays, 0))
            return execute(*arguments)

        submit = cluster._ranks.submit

        def submit_and_interrupt(rank, common, own):
            submit(rank, common, own)
            raise KeyboardInterrupt

        monkeypatch.setattr(rank_server, "execute", begin_late)
        monkeypatch.setattr(cluster._ranks, "submit", submit_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            cluster.call(lambda host: host.world.all_gather(None))
        monkeypatch.setattr(cluster._ranks, "submit", submit)

        def gather_for_a_second(host):  # still at work when the late call begins
            for _ in range(20):
                time.sleep(0.05)
                assert host.world.all_gather(host.world.rank) == [0, 1]

        cluster.call(gather_for_a_second)
