"""The cause of a failed call is told rightly, in that call, whatever raises: the user's exception, result or argument.

Functions and classes are defined inside the tests, as in a cell: the ranks can't import this file.
"""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from threading import Timer

import pytest
import torch
import zmq
from torch.nn.functional import mse_loss

from mpi4dl_nb import Plan, Training
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.cluster.remote_call import Ranks, RemoteCall
from mpi4dl_nb.engines.comm.status_board import RankStatus
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.server import rank_server
from mpi4dl_nb.engines.server.notebook_imports import pack
from mpi4dl_nb.engines.server.rank_server import Failure, Reply
from mpi4dl_nb.launch import call_parts
from mpi4dl_nb.launch.supervisor_reports import StalledRank
from tests.chaos.links import cut_connections

N = 2


@pytest.fixture(scope="module", params=["loopback", "mpi"])
def shared(request):
    with Cluster(N, backend=request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared):
    return shared.restart() if shared.dead else shared.start()


over_mpi = pytest.mark.parametrize("shared", ["mpi"], indirect=True)


def fail(cluster: Cluster, function, *args) -> RankError:
    """Return the error of a call, after the next call has been found to work."""
    with pytest.raises(RankError) as caught:
        cluster.call(function, *args)
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * N
    return caught.value


def get_one(error: RankError) -> str:
    """Return what is said of two ranks that fail alike."""
    return re.fullmatch(r"Rank 0: (.*) \(And so on rank 1\.\)", str(error))[1]


def read_all(error: RankError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.sampled(1)
def test_an_exception_without_a_text_is_reported_with_its_kind_and_its_line(cluster):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fails(host):
        if host.world.rank == 1:
            raise MuteError
        host.world.all_gather(None)

    error = fail(cluster, fails)
    assert (str(error), error.rank) == ("Rank 1: MuteError: (it has no text: its __str__ raised RuntimeError)", 1)
    assert "in fails" in error.remote_traceback
    assert "Rank 0 was released" in read_all(error)


def test_a_cause_without_a_text_hides_nothing(cluster):
    class MuteError(Exception):
        __str__ = None

    def raise_from_mute_error(host):
        try:
            raise MuteError
        except MuteError as error:
            raise ValueError("the last one") from error

    error = fail(cluster, raise_from_mute_error)
    assert get_one(error) == "ValueError: the last one"
    assert "MuteError: (it has no text: its __str__ raised TypeError)" in error.remote_traceback


def test_a_long_text_is_cut_and_its_length_said(cluster):
    def raise_long_text(host):
        raise ValueError("x" * 30_000_000)

    error = fail(cluster, raise_long_text)
    assert get_one(error).startswith("ValueError: xxxx")
    assert get_one(error).endswith("x ... (30,000,000 characters)")
    assert len(read_all(error)) < 50_000


def test_an_exception_of_which_python_makes_no_traceback_is_reported(cluster):
    def divide_by_zero(host):
        exec(compile("1 / 0", "file", "exec").replace(co_filename="no\0file"))

    class CausedError(Exception):
        @property
        def __cause__(self):
            raise RuntimeError("no cause")

    def raise_with_cause(host):
        raise CausedError("what is known")

    assert get_one(fail(cluster, divide_by_zero)) == "ZeroDivisionError: division by zero"
    error = fail(cluster, raise_with_cause)
    assert get_one(error) == "CausedError: what is known"


def test_of_a_long_chain_the_last_exceptions_are_reported():
    error: Exception | None = None
    for number in range(5_000):
        error, before = ValueError(number), error
        error.__cause__ = before
    failure = Failure.of(error)
    assert failure.links[-1][0] == "ValueError: 4999"
    assert len(failure.links) == 30


def test_an_exception_that_cannot_be_pickled_is_reported(cluster):
    class BoundError(Exception):
        def __init__(self):
            super().__init__("bound to a stream")
            self.stream = sys.stdout

    def raise_bound_error(host):
        raise BoundError

    assert get_one(fail(cluster, raise_bound_error)) == "BoundError: bound to a stream"


@pytest.mark.parametrize("what", [ValueError, SystemExit])
def test_a_result_that_raises_while_it_is_unpickled_is_reported_in_its_own_call(cluster, what):
    def fail_to_unpickle():
        raise what("no such version")

    class Result:
        def __reduce__(self):
            return fail_to_unpickle, ()

    start_s = time.monotonic()
    error = fail(cluster, lambda host: Result() if host.world.rank == 1 else None)
    told = f"Rank 1: its result cannot be unpickled in the notebook: {what.__name__}: no such version"
    assert (str(error), error.rank) == (told, 1)
    assert time.monotonic() - start_s < 1  # it is known at once, and not after a wait for the rank's end


def test_an_argument_that_raises_while_it_is_unpickled_is_reported(cluster):
    def fail_to_unpickle():
        raise ValueError("no such version")

    class Argument:
        def __reduce__(self):
            return fail_to_unpickle, ()

    error = fail(cluster, lambda host, argument: None, Argument())
    assert "what it was sent cannot be unpickled: ValueError: no such version" in str(error)


@contextmanager
def throttle_link(cluster: Cluster, bytes_per_s: float):
    """Let each message between the notebook and the ranks take its time; parts are small, so that little shows it."""
    session = cluster._ranks._client.session
    send, read = session.send, session.deserialize

    def send_slowly(stream, message, *args, buffers=None, **more):
        time.sleep(sum(map(len, buffers or ())) / bytes_per_s)
        sent = send(stream, message, *args, buffers=buffers, **more)
        stream.flush(zmq.POLLOUT)  # before the next one has waited
        return sent

    def read_slowly(frames, *args, **more):
        time.sleep(sum(map(len, frames)) / bytes_per_s)
        return read(frames, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "send", send_slowly)
        patch.setattr(session, "deserialize", read_slowly)
        patch.setattr(call_parts, "PART_BYTES", 1 << 16)
        patch.setattr(cluster, "hang_after_s", 1.5)
        start_s = time.monotonic()
        yield
        assert time.monotonic() - start_s > 3.5  # long enough to be taken for a hang


LARGE = bytes(range(256)) * 4096  # 1 MiB


@pytest.mark.nightly
@over_mpi
def test_the_time_to_send_a_large_argument_is_no_hang(cluster):
    with throttle_link(cluster, 1 << 19):
        assert cluster.call(lambda host, x: x == bytes(range(256)) * 4096, LARGE) == [True] * N


@pytest.mark.nightly
@over_mpi
def test_the_time_to_send_the_tiles_of_a_large_batch_is_no_hang(cluster):
    plan = Plan(split_size=1, num_spatial_parts=(2,), slice_method="vertical")
    images, targets = torch.rand(1, 3, 256, 512), torch.rand(1, 1, 256, 512)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 1, 1))
    training = Training(model, plan, cluster, images.shape, loss=mse_loss, labels=targets)
    training.step(images, targets)  # the first step takes longer than others
    model.load_state_dict(training.state_dict())
    wanted = float(mse_loss(model(images), targets).detach())
    with throttle_link(cluster, 1 << 19):
        assert training.step(images, targets) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.nightly
@over_mpi
def test_the_time_to_send_a_large_result_is_no_hang(cluster):
    with throttle_link(cluster, 1 << 19):
        assert cluster.call(lambda host: bytes(range(256)) * 4096) == [LARGE] * N
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * N


@pytest.mark.nightly
@over_mpi
def test_a_connection_of_mpiexec_that_is_cut_is_reported_as_what_it_is(cluster):
    """MPI ends the ranks, each with an exit code of its own, which alone would say nothing."""
    mpiexec = cluster._ranks._launchers[1].pid

    def gather_slowly(host):
        for _ in range(100):
            host.world.all_gather(None)
            time.sleep(0.05)

    Timer(0.3, cut_connections, [mpiexec]).start()
    with pytest.raises(RankError, match=r"exit code 195 \(its connection to mpiexec, .*, was lost\)"):
        cluster.call(gather_slowly)
    assert cluster.heal().call(lambda host: host.world.rank) == [0, 1]


@over_mpi
def test_where_all_helpers_run_a_message_that_has_not_arrived_may_have_been_cut(cluster, monkeypatch):
    ranks = cluster._ranks
    now_s = time.monotonic()
    stalled = {0: StalledRank(RankStatus("", now_s)), 1: StalledRank(RankStatus("halo", now_s, waits=True))}
    monkeypatch.setattr(ranks._reports, "find_stalled_ranks", lambda is_cut_off: stalled)
    pid = ranks._launchers[0].pid
    told = f"a connection of the controller of the ranks (process {pid}) may have been cut"
    assert {rank: still.why for rank, still in ranks.find_stalled_ranks().items()} == {0: told, 1: ""}


def test_parts_that_are_lost_are_said(monkeypatch):
    class Server:
        arriving, leaving, board = None, b"", rank_server.StatusBoard()

    server = Server()
    monkeypatch.setattr(rank_server, "_get_server", lambda: server)
    rank_server.receive_part(b"abc", 0, 9)
    assert str(server.board.read()) == "the arrival of its work (3 of 9 bytes)"
    assert server.board.read().waits
    rank_server.receive_part(b"def", 3, 9)
    rank_server.receive_part(b"ghi", 6, 9)
    assert [bytes(piece) for piece in rank_server._take_work(server, 2, 7)] == [b"ab", b"cdefghi"]
    rank_server.receive_part(b"abc", 0, 9)
    rank_server.receive_part(b"ghi", 6, 9)
    with pytest.raises(RankError, match="of the 9 bytes of its work 0 have arrived"):
        rank_server._take_work(server, 2, 7)


def test_a_reply_is_fetched_in_parts_each_of_which_is_progress(monkeypatch):
    class Server:
        leaving, board = b"", rank_server.StatusBoard()

    server = Server()
    monkeypatch.setattr(rank_server, "_get_server", lambda: server)
    assert rank_server._keep_large(server, b"abc", 3) == b"abc"
    assert (rank_server._keep_large(server, b"abcdefgh", 3), server.board.read().waits) == (8, True)
    assert str(server.board.read()) == "the sending of its result (0 of 8 bytes)"
    assert [rank_server.send_part(begin, 3) for begin in (0, 3)] == [b"abc", b"def"]
    assert str(server.board.read()) == "the sending of its result (3 of 8 bytes)"
    assert (rank_server.send_part(6, 3), server.board.read(), server.leaving) == (b"gh", None, b"")


def test_a_rank_is_not_taken_for_hanging_because_the_report_that_it_goes_on_is_late():
    """Rank 0 has waited for rank 1, which has replied; what is known of rank 0 is half a second old."""

    class LateReports(Ranks):
        def submit(self, rank, common, own):
            future: Future[bytes] = Future()
            Timer(0.5 if rank == 1 else 0.6, future.set_result, [pack(Reply(rank))]).start()
            return future

        def find_stalled_ranks(self):
            return {0: StalledRank(RankStatus("all-reduce", time.monotonic() - 9, waits=True))}

        def capture_output(self):
            return nullcontext()

        def read_output(self):
            return []

    call = RemoteCall(LateReports(), print, hang_after_s=0.3)
    call.run(b"", [b"", b""])
    assert call.hang is None
    assert {rank: reply.value for rank, reply in call.answers.items()} == {0: 0, 1: 1}
