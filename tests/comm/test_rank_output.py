"""What ranks print, warn and log is shown while they work, with the rank before each line, bounded, or not at all."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings

import pytest
import torch

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.comm.output import LineBuffer, OutputLine, RankStream, RateLimiter, redirect_streams
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.launch.process_output import OutputPrinter, RankOutput

N = 2
BACKENDS = ("loopback", "in_turn", "mpi")


@pytest.fixture(scope="module", params=BACKENDS)
def cluster(request):
    with Cluster(N, backend=request.param) as made:
        yield made


def list_lines(text: str, rank: int) -> list[str]:
    return [line.removeprefix(f"[rank {rank}] ") for line in text.splitlines() if line.startswith(f"[rank {rank}]")]


@pytest.mark.sampled(1)
def test_what_ranks_print_has_their_number_before_it(cluster, capsys):
    def print_lines(host):
        print("hello from", host.world.rank)
        print("two\nlines", end="")
        host.world.all_gather(None)  # another rank goes on meanwhile, in the same thread where they take turns
        print(" that end here")
        print("\r10 %\r20 %\r30 %", end="", file=sys.stderr)

    cluster.call(print_lines)
    said = capsys.readouterr()
    for rank in range(N):
        assert list_lines(said.out, rank) == [f"hello from {rank}", "two", "lines that end here"]
        assert list_lines(said.err, rank) == ["30 %"]
    assert len(said.out.splitlines()) == 3 * N


@pytest.mark.sampled(1)
def test_warnings_and_logs_are_shown(cluster, capsys):
    def warn_and_log(host):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # Tests record warnings, and show none.
            warnings.showwarning = lambda message, *more: sys.stderr.write(f"{type(message).__name__}: {message}\n")
            if host.world.rank == 0:
                warnings.warn("careful", UserWarning, stacklevel=1)
        logger = logging.getLogger("mine")
        logger.propagate = False
        logging.lastResort.handle(logging.makeLogRecord({"msg": "it is late", "levelno": logging.WARNING}))

    cluster.call(warn_and_log)
    said = capsys.readouterr().err
    assert "UserWarning: careful" in list_lines(said, 0)
    assert all("it is late" in list_lines(said, rank) for rank in range(N))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["loopback", "in_turn"])
def test_a_log_that_was_set_up_before_has_the_rank_too(backend, capsys):
    handler, logger = logging.StreamHandler(), logging.getLogger("set up before")
    before = handler.stream
    logger.addHandler(handler)
    try:
        with Cluster(N, backend=backend) as cluster:
            cluster.call(lambda host: logging.getLogger("set up before").warning("layer %d", host.world.rank))
        logger.warning("of the notebook")
    finally:
        logger.removeHandler(handler)
    said = capsys.readouterr().err
    assert [list_lines(said, rank) for rank in range(N)] == [["layer 0"], ["layer 1"]]
    assert said.splitlines()[-1] == "of the notebook"
    assert handler.stream is before


@pytest.mark.nightly
def test_a_line_is_shown_while_the_rank_goes_on(cluster):
    """Not when it is done: 0.2 s after it at most, and what a machine with other work takes for it."""
    if cluster.backend == "in_turn":
        pytest.skip("ranks in turn begin one after the other")
    shown_s: list[float] = []

    class Stream:
        def write(self, text):
            shown_s.append(time.monotonic())

        def flush(self):
            pass

    def print_and_sleep(host):
        if host.world.rank == 0:
            print("begun")
        time.sleep(3)

    before, sys.stdout = sys.stdout, Stream()
    try:
        cluster.call(print_and_sleep)
    finally:
        sys.stdout = before
    assert shown_s
    assert time.monotonic() - shown_s[0] > 1


@pytest.mark.sampled(1)
def test_what_was_printed_before_a_failure_is_shown(cluster, capsys):
    def print_and_fail(host):
        print("about to divide")
        host.world.all_gather(None)  # a rank that is late with its first call would be interrupted before it prints
        raise ZeroDivisionError

    with pytest.raises(RankError):
        cluster.call(print_and_fail)
    assert "about to divide" in list_lines(capsys.readouterr().out, 0)
    assert cluster.call(lambda host: host.world.all_gather(1)) == [[1, 1]] * N


@pytest.mark.sampled(2)
def test_a_flood_is_cut_and_that_is_said(cluster, capsys):
    def print_too_much(host):
        if host.world.rank == 0:
            for number in range(20_000):
                print("line", number)
            print("x" * 100_000)

    start_s = time.monotonic()
    cluster.call(print_too_much)
    said = capsys.readouterr()
    assert 100 < len(list_lines(said.out, 0)) < 2_000
    assert any("lines more were left out" in line for line in said.err.splitlines())
    assert len(said.out) < 200_000
    assert time.monotonic() - start_s < 20


def test_it_can_be_switched_off(cluster, capsys):
    cluster._shown.on = False
    try:
        cluster.call(lambda host: print("hello"))
    finally:
        cluster._shown.on = True
    assert "hello" not in capsys.readouterr().out


def test_switched_off_from_the_start(capsys):
    with Cluster(1, backend="loopback", output=False) as cluster:
        cluster.call(lambda host: print("hello"))
    assert capsys.readouterr().out == ""


def test_threads_that_are_no_ranks_print_as_ever(capsys):
    """The rank waits, within its call, for a thread of the notebook."""
    with Cluster(1, backend="loopback") as cluster:

        def wait_for_thread(host):
            deadline = time.monotonic() + 5
            while "another" in {thread.name for thread in threading.enumerate()} and time.monotonic() < deadline:
                time.sleep(0.01)

        def print_from_thread():
            while not isinstance(sys.stdout, RankStream):
                time.sleep(0.001)
            print("another thread")

        threading.Thread(target=print_from_thread, name="another").start()
        cluster.call(wait_for_thread)
    assert capsys.readouterr().out == "another thread\n"


@pytest.mark.nightly
def test_what_reads_images_for_a_rank_prints_as_that_rank(capsys):
    class Noisy(SyntheticImages):
        def part(self, *args, **kwargs):
            print("reading")
            return super().part(*args, **kwargs)

    with Cluster(1, backend="loopback") as cluster:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        training = Training(model, Plan(split_size=1, spatial_size=0), cluster, (2, 3, 16, 16))
        training.fit(Noisy(4, (16, 16), 2), epochs=1, progress=False, workers=1)
    said = capsys.readouterr().out.splitlines()
    assert set(said) == {"[rank 0] reading"}
    assert len(said) >= 4


# ---- the parts


def test_a_meter_lets_as_many_pass_as_it_says():
    """100 characters more than its own count for each line: 20,000 at once, then 5,000 a second."""
    now_s = 0.0
    meter = RateLimiter(clock=lambda: now_s)
    assert sum(meter.allow("x" * 100) for _ in range(500)) == 100
    assert meter.report_dropped() == "... 400 lines more were left out: more than a page can show."
    now_s = 1.0
    assert not meter.allow("x" * 100)  # a quarter of the room is there again: after a flood half of it is awaited
    now_s = 3.0
    assert sum(meter.allow("x" * 100) for _ in range(500)) == 75
    assert "426 lines" in meter.report_dropped()


def test_a_call_after_a_flood_may_print_some_lines_but_a_loop_of_calls_no_flood():
    now_s = [0.0]
    meter = RateLimiter(clock=lambda: now_s[0])
    assert sum(meter.allow("x" * 100) for _ in range(500)) == 100
    passed = []
    for now_s[0] in (0.0, 0.1, 0.2, 0.3, 0.35, 0.4):  # the last two have no reserve: it comes back once a second
        meter.begin_call()
        passed.append(sum(meter.allow("x" * 100) for _ in range(50)))
    assert passed == [10, 12, 12, 12, 0, 0]
    now_s[0] = 1.1
    meter.begin_call()
    assert sum(meter.allow("x" * 100) for _ in range(200)) >= 10


def test_the_lines_of_the_call_after_a_flood_are_emitted():
    given: list[OutputLine] = []
    output = LineBuffer(given.append)
    output._meter = RateLimiter(clock=lambda: 0.0)  # on a busy machine there may be room for one line more
    output.write("stdout", "0123456789\n" * 2_000)
    output.end()
    output.write("stderr", "one warning\n")
    output.end()
    assert [line.text for line in given[-2:]] == [
        "... 1,819 lines more were left out: more than a page can show.",
        "one warning",
    ]


def test_parts_become_lines():
    given: list[OutputLine] = []
    output = LineBuffer(given.append)
    for part in ("a", "b\nc", "\r", "d\r\n", "\n", "e"):
        output.write("stdout", part)
    output.write("stderr", "f\n")
    output.end()
    output.end()
    assert given == [
        OutputLine("stdout", "ab"),
        OutputLine("stdout", "d"),
        OutputLine("stdout", ""),
        OutputLine("stderr", "f"),
        OutputLine("stdout", "e"),
    ]
    assert output.emitted == 5


def test_of_a_line_that_is_too_long_the_beginning_is_shown_and_how_much_is_left_out():
    """However it comes: `print` writes the end of a line by itself."""
    for parts in (
        ["a" * 4_000 + "b" * 3_000, "\n"],
        ["a" * 4_000 + "b" * 3_000 + "\n"],
        ["a" * 1_000] * 4 + ["b" * 3_000],
    ):
        given: list[OutputLine] = []
        output = LineBuffer(given.append)
        for part in parts:
            output.write("stdout", part)
        output.end()
        assert given == [OutputLine("stdout", "a" * 4_000 + " ... (3,000 characters more)")]


def test_at_the_end_it_is_said_what_was_left_out_though_that_was_said_just_before():
    given: list[OutputLine] = []
    output = LineBuffer(given.append)
    for _ in range(2):
        output.write("stdout", ("0123456789" * 40 + "\n") * 1_000)
        output.end()
    notes = [line.text for line in given if "left out" in line.text]
    assert len(given) - len(notes) + sum(int(note.split()[1].replace(",", "")) for note in notes) == 2_000


def test_streams_are_put_back_though_calls_overlap():
    before = sys.stdout, sys.stderr
    first, second = redirect_streams(lambda: None), redirect_streams(lambda: None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.stdout is not before[0]
    second.__exit__(None, None, None)
    assert (sys.stdout, sys.stderr) == before


def test_engines_lines_are_found_among_what_libraries_write():
    kept = {"call 1": {"stdout": "", "stderr": ""}}
    spoken = RankOutput()
    spoken.add_call(kept, "call 1")
    kept["call 1"]["stdout"] += 'half a line of C\n\x1espoken ["stderr", "a \\u001e mark\\r"]\n\n\x1espoken ["std'
    assert spoken.read_new() == [OutputLine("stdout", "half a line of C"), OutputLine("stderr", "a \x1e mark\r")]
    assert spoken.has_pending(2)
    kept["call 1"]["stdout"] += 'out", "b"]\n'
    assert spoken.read_new() == [OutputLine("stdout", "b")]
    assert not spoken.has_pending(2)
    kept["call 1"] = {"stdout": '\n\x1espoken ["stdout", "late"]\n', "stderr": ""}  # as the client begins anew
    assert spoken.read_new() == [OutputLine("stdout", "late")]


def test_where_nothing_can_be_printed_work_goes_on(monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    OutputPrinter(on=True).show([(0, OutputLine("stdout", "lost"))])
