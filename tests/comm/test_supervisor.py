"""What a supervisor tells of the process that it watches, and that neither outlives the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mpi4dl_nb.cluster.remote_call import find_hang
from mpi4dl_nb.engines.comm.status_board import RankStatus, StatusBoard, report_working
from mpi4dl_nb.engines.comm.supervisor import MARK
from mpi4dl_nb.launch.supervisor_reports import RankExit, StalledRank, SupervisorReports

SUPERVISOR = "mpi4dl_nb.engines.comm.supervisor"
SAYS = (
    "from mpi4dl_nb.engines.comm.status_board import StatusBoard; "
    "StatusBoard.from_environment().report(b'forward pass', 3)"
)


def start_supervisor(code: str, **more: object) -> subprocess.Popen[bytes]:
    """A supervisor, and under it a Python that does this."""
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "4"}
    command = [sys.executable, "-m", SUPERVISOR, sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, **more)


def read_reports(output: bytes) -> list[dict[str, object]]:
    """What a supervisor has written."""
    return [json.loads(line.partition(MARK)[2]) for line in output.decode().split("\n") if MARK in line]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("code", "said", "left_as"),
    [
        ("", 0, 0),
        ("import os; os._exit(3)", 3, -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV, -signal.SIGSEGV),
    ],
    ids=["in order", "with a code", "killed", "at fault"],
)
def test_it_tells_of_the_end_and_ends_alike(code: str, said: int, left_as: int):
    supervisor = start_supervisor(f"{SAYS}; {code}")
    output, _ = supervisor.communicate(timeout=20)
    (line,) = read_reports(output)
    assert (line["rank"], line["event"], line["code"]) == (4, "ended", said)
    assert (line["text"], line["step"]) == ("forward pass", 3)
    assert supervisor.returncode == left_as


@pytest.mark.nightly
def test_it_tells_once_of_a_rank_that_stands_still_and_once_that_it_goes_on():
    more = "import time; time.sleep(1.8); StatusBoard.from_environment().report(b''); time.sleep(2.3)"
    output, _ = start_supervisor(f"{SAYS}; {more}").communicate(timeout=20)
    found = [(line["event"], line["text"]) for line in read_reports(output) if line["event"] != "watches"]
    assert found == [("still", "forward pass"), ("moves", ""), ("still", ""), ("ended", "")]


@pytest.mark.nightly
def test_it_reports_until_it_has_said_that_there_is_nothing_to_do():
    more = "import time; time.sleep(3.2); StatusBoard.from_environment().report(b''); time.sleep(3.8)"
    output, _ = start_supervisor(f"{SAYS}; {more}").communicate(timeout=20)
    events = [line["event"] for line in read_reports(output)]
    assert events.count("watches") >= 2
    assert "watches" not in events[len(events) - events[::-1].index("still") :]


def test_it_tells_of_a_rank_that_is_stopped_even_where_it_has_nothing_to_do():
    supervisor = start_supervisor("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    time.sleep(1.5)
    (rank,) = psutil.Process(supervisor.pid).children()
    rank.kill()
    output, _ = supervisor.communicate(timeout=20)
    first = read_reports(output)[0]
    assert (first["event"], first["state"]) == ("still", "T")


@pytest.mark.nightly
def test_the_rank_ends_with_the_process_that_has_started_its_supervisor():
    """mpiexec, or a host's daemon, was killed: nobody is left to end what it has started."""
    supervisor = [sys.executable, "-m", SUPERVISOR, sys.executable, "-c", "import time; time.sleep(300)"]
    code = f"import subprocess, time; print(subprocess.Popen({supervisor!r}).pid, flush=True); time.sleep(300)"
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    found = psutil.Process(int(starter.stdout.readline()))
    until_s = time.monotonic() + 10
    while not found.children() and time.monotonic() < until_s:
        time.sleep(0.05)
    family = [found, *found.children()]
    starter.kill()
    starter.stdout.close()
    starter.wait()
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_the_rank_has_the_socket_of_a_launcher_of_mpichs_kind():
    """Without it a cluster with MPICH did not start: `PMI_Get_appnum returned -1`."""
    reading, writing = os.pipe()
    done = subprocess.run(
        [sys.executable, "-m", SUPERVISOR, sys.executable, "-c", f"import os; os.write({writing}, b'here')"],
        env=os.environ | {"PMI_FD": str(writing)}, pass_fds=[writing], stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, os.read(reading, 9)) == (0, b"here")
    os.close(reading)


@pytest.mark.parametrize("number", ["", "977", "none"])
def test_a_variable_that_another_launcher_has_left_over_is_no_socket(number: str, monkeypatch):
    monkeypatch.setenv("PMI_FD", number)
    supervisor = start_supervisor("")
    supervisor.communicate(timeout=20)
    assert supervisor.returncode == 0


def test_the_rank_ends_with_its_supervisor():
    supervisor = start_supervisor("import time; time.sleep(300)")
    until_s = time.monotonic() + 10
    while not (ranks := psutil.Process(supervisor.pid).children()) and time.monotonic() < until_s:
        time.sleep(0.05)
    supervisor.kill()
    supervisor.stdout.close()  # not `communicate`, which waits for the rank as well: it has the same pipe
    supervisor.wait()
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_a_child_whose_parent_has_died_before_it_could_ask_for_a_signal_ends():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = subprocess.run(
        [sys.executable, "-c", f"from {SUPERVISOR} import end_with_parent; end_with_parent({gone.pid})"],
        check=False,
    )
    assert child.returncode == -signal.SIGKILL


# ---- what the notebook makes of it


def make_line(rank: int, event: str, **facts: object) -> str:
    return f"\n{MARK}{json.dumps({'rank': rank, 'event': event, **facts})}\n"


PLACE = {"text": "stage 1", "step": 2, "waits": True, "for_s": 3.0}


def make_reports(text: str) -> SupervisorReports:
    reports = SupervisorReports()
    take(reports, text)
    return reports


def take(reports: SupervisorReports, text: str) -> None:
    for each in text.encode().split(b"\n"):
        reports.parse_line(each)


def test_reports_are_found_among_what_else_is_written():
    reports = make_reports("noise" + make_line(0, "still", state="S", **PLACE))
    assert 3 <= reports.find_stalled_ranks()[0].for_s < 4
    take(reports, make_line(0, "moves") + make_line(1, "ended", code=-15, **PLACE) + f"\n{MARK}not json\n" + MARK)
    assert reports.find_stalled_ranks() == {}
    assert str(reports.ended[1]) == "its process was killed by SIGTERM in stage 1, step 2"


def test_the_end_of_a_rank_after_that_of_a_helper_is_no_cause():
    """The reaper ends all ranks then, and their supervisors report it as any other end."""
    ended: list[int] = []
    reports = SupervisorReports(lambda: ended)
    take(reports, make_line(0, "moves") + make_line(2, "ended", code=-9, **PLACE))
    ended.append(7)
    take(reports, make_line(0, "ended", code=-15, **PLACE))
    assert reports.ended.keys() == {2}
    assert reports.find_stalled_ranks() == {}


def ask_for(
    reports: SupervisorReports, seconds: float, monkeypatch, is_cut_off: bool = False
) -> dict[int, StalledRank]:
    """What is known after so many seconds in which somebody asked again and again."""
    begin_s = time.monotonic()
    for tick in range(1, round(seconds * 2) + 1):
        monkeypatch.setattr(time, "monotonic", lambda: begin_s + tick / 2)  # noqa: B023 (asked within the turn)
        found = reports.find_stalled_ranks(is_cut_off)
    return found


def test_a_supervisor_whose_reports_do_not_arrive_any_more_watches_no_more(monkeypatch):
    """But for an idle rank, of which it has nothing to say, and for one that has ended."""
    idle, waits = {**PLACE, "text": ""}, make_line(1, "still", state="S", **PLACE)
    end = make_line(3, "moves") + make_line(3, "ended", code=0, **PLACE)
    reports = make_reports(make_line(0, "moves") + waits + make_line(2, "still", state="S", **idle) + end)
    assert sorted(reports.find_stalled_ranks()) == [1, 2]
    found = ask_for(reports, 3.5, monkeypatch)
    assert {rank: (still.silent, still.idle) for rank, still in found.items()} == {
        0: (True, False),
        1: (True, False),
        2: (False, True),
    }
    hang = find_hang((0, 1, 2), found, after_s=3, since_s=time.monotonic() - 20)
    assert hang.words.startswith("Rank 0 does not go on: no report of it has arrived for 3.5 s.")
    take(reports, make_line(0, "watches") + make_line(1, "watches"))
    assert {rank: still.silent for rank, still in reports.find_stalled_ranks().items()} == {1: False, 2: False}


def test_ranks_whose_answers_cannot_arrive_are_idle_whatever_they_do(monkeypatch):
    """The controller was stopped; until it goes on, or somebody asks again after a pause."""
    reports = make_reports(make_line(0, "moves") + make_line(1, "still", state="S", **PLACE))
    found = ask_for(reports, 2.5, monkeypatch, is_cut_off=True)
    assert found[0].idle
    assert found[0].for_s == pytest.approx(2)  # since it was first seen
    assert found[1].at.text == "stage 1"  # it had stood still before
    take(reports, make_line(0, "watches") + make_line(1, "moves"))
    assert reports.find_stalled_ranks() == {}
    assert reports.find_stalled_ranks(is_cut_off=True)[1].for_s == 0
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 600)
    assert [each.for_s for each in reports.find_stalled_ranks(is_cut_off=True).values()] == [0, 0]


def test_a_time_in_which_nobody_asked_is_no_silence(monkeypatch):
    """The notebook was stopped by a signal, and goes on: what came meanwhile is not read yet."""
    reports = make_reports(make_line(0, "moves") + make_line(1, "still", state="S", **PLACE))
    before_s = reports.find_stalled_ranks()[1].for_s
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 60)
    found = reports.find_stalled_ranks()
    assert list(found) == [1]
    assert found[1].for_s == pytest.approx(before_s, abs=1)


def test_what_came_after_nobody_had_asked_for_long_is_no_older_than_that(monkeypatch):
    """Or a hang would be told of as much later."""
    reports = make_reports(make_line(0, "moves"))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 600)
    take(reports, make_line(0, "watches") + make_line(1, "still", state="S", **PLACE))
    assert reports.find_stalled_ranks()[1].for_s == pytest.approx(0, abs=0.1)
    found = ask_for(reports, 3.5, monkeypatch)
    assert found[0].for_s == pytest.approx(3.5)
    assert found[1].for_s == pytest.approx(3.5)


LOST = " (its connection to mpiexec, or to mpiexec's daemon on its host, was lost)"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (RankExit(None), "its process has ended"),
        (RankExit(0), "its process has left with exit code 0"),
        (RankExit(-35), "its process was killed by signal 35"),
        (RankExit(195), f"its process has left with exit code 195{LOST}"),
    ],
)
def test_an_end_in_words(ended: RankExit, words: str):
    assert str(ended) == words


STOPPED = "it was stopped by a signal"
IDLE = "it does nothing"


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ({0: (9, True, ""), 1: (9, False, "")}, 1),
        ({0: (9, True, ""), 1: (9, True, "")}, 0),
        ({0: (9, True, ""), 1: (9, True, STOPPED)}, 1),
        ({0: (9, False, ""), 1: (9, False, STOPPED)}, 1),
        ({0: (9, False, ""), 1: (9, False, "")}, None),  # both compute
        ({0: (9, True, ""), 1: (1, False, "")}, None),  # one has gone on
        ({0: (9, True, "")}, None),
        ({0: (9, True, ""), 1: (9, False, IDLE)}, 1),
        ({0: (9, False, IDLE), 1: (9, False, IDLE)}, 0),
        ({0: (9, False, IDLE), 1: (1, False, "")}, None),
    ],
)
def test_who_hangs(ranks: dict[int, tuple[float, bool, str]], who: int | None):
    """`ranks` have stood still for so long, and wait or do not; or they do nothing, although they have work."""
    now_s = time.monotonic()
    found = {
        rank: StalledRank(RankStatus("" if why == IDLE else "work", now_s - ago_s, 1, waits), why)
        for rank, (ago_s, waits, why) in ranks.items()
    }
    hang = find_hang((0, 1), found, after_s=5, since_s=now_s - 20)
    assert (hang.rank if hang else None) == who
    assert find_hang((0, 1), found, after_s=5, since_s=now_s - 1) is None


def test_a_board_holds_what_fits_on_it():
    board = StatusBoard()
    with report_working(board, "x" * 2000):
        assert len(board.read().text) < 512
        board.report_waiting(True)
        assert board.read().waits
    assert board.read() is None
