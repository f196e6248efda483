"""Ranks end with the cluster that nobody holds any more; in a notebook with the name that another cluster has taken."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import torch
from nbclient import NotebookClient

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.cluster import owned_ranks
from mpi4dl_nb.cluster.owned_ranks import THREAD, count_alive_ranks, find_holder_name, get_owned_ranks
from mpi4dl_nb.launch.reaper_process import is_running
from mpi4dl_nb.launch.startup_monitor import StartupMonitor
from tests.launch.test_orphans import wait_within

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _none_before():
    gc.collect()
    assert wait_within(10, lambda: not count_alive_ranks())


def list_family() -> set[psutil.Process]:
    return set(filter(is_running, psutil.Process().children(recursive=True)))


@pytest.mark.nightly
def test_a_cluster_that_nobody_holds_ends():
    cluster = Cluster(2).start()
    assert cluster.call(lambda host: host.world.rank) == [0, 1]
    assert len(list_family()) >= 6
    assert "2 ranks of this notebook are alive" in repr(cluster)
    assert "2 ranks of this notebook are alive" in cluster._repr_html_()
    del cluster  # without a collection of memory: it is in no circle
    assert wait_within(10, lambda: not list_family() and not count_alive_ranks())


@pytest.mark.nightly
def test_what_holds_a_training_holds_its_cluster():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    cluster = Cluster(1, backend="loopback").start()
    training = Training(model, Plan(split_size=1, spatial_size=0), cluster, (2, 3, 8, 8))
    del cluster
    gc.collect()
    assert count_alive_ranks() == 1
    assert training.step(torch.randn(2, 3, 8, 8), torch.tensor([0, 1])) > 0
    assert repr(training.cluster).endswith("1 rank of this notebook is alive>")
    del training
    gc.collect()
    assert wait_within(5, lambda: not count_alive_ranks())


def test_the_end_of_python_does_not_hold_it():
    cluster = Cluster(1, backend="loopback").start()
    gone = weakref.ref(cluster)
    del cluster
    assert gone() is None


def test_a_copy_of_the_process_ends_nothing():
    """As workers of a data loader, which collect their memory, too."""
    cluster = Cluster(1, backend="loopback").start()
    (held,) = get_owned_ranks()
    held._process = os.getppid()
    del cluster
    assert wait_within(1, lambda: not get_owned_ranks())
    assert count_alive_ranks() == 1
    held._process = os.getpid()
    held.end()
    assert count_alive_ranks() == 0


def test_it_can_be_started_again_after_its_end():
    cluster = Cluster(2, backend="loopback")
    assert repr(cluster).endswith("not started; no ranks of this notebook are alive>")
    for _ in range(2):
        cluster.start()
        assert count_alive_ranks() == 2
        cluster.stop()
        assert count_alive_ranks() == 0


@pytest.mark.nightly
def test_python_ends_with_clusters_that_nobody_has_stopped():
    code = "from mpi4dl_nb import Cluster as C\na = C(1).start()\nb = C(2, backend='loopback').start()\nprint('ready')"
    start_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
    assert time.monotonic() - start_s < 120


# ---- in a notebook

BEGIN = """
import json, sys, threading, time, torch
from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.cluster.owned_ranks import count_alive_ranks
def left():
    deadline = time.monotonic() + 10
    while count_alive_ranks() > 2 and time.monotonic() < deadline: time.sleep(0.05)
    print("alive", count_alive_ranks())
nn = torch.nn
model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
"""
START = "cluster = Cluster(2, backend='{}').start()\ncluster"
TRAIN = "training = Training(model, Plan(split_size=2, spatial_size=0), cluster, (2, 3, 8, 8))\ntraining"
SPEAK = """
CELL = {}
def speaks(host):
    print("from cell", CELL)
    time.sleep(0.5)
cluster.call(speaks)
print("done")
"""


def run(*cells: str) -> list[str]:
    """What each cell of a notebook has printed."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (BEGIN, *cells)])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        NotebookClient(book, timeout=200, kernel_name="python3").execute()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    texts = [[out.text for out in cell.outputs if out.output_type == "stream"] for cell in book.cells]
    return ["".join(each) for each in texts][1:]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loopback", "mpi"])
def test_cells_that_are_run_again_leave_no_ranks_and_have_their_output(backend):
    """Jupyter keeps every value that a cell has shown: the old cluster is in `Out`, and in `_`."""
    start = START.format(backend)
    printed = run(start, SPEAK.format(1), start, "left()", SPEAK.format(2), "cluster.stop()")
    assert sorted(printed[1].splitlines()) == ["[rank 0] from cell 1", "[rank 1] from cell 1", "done"]
    assert printed[3] == "alive 2\n"
    assert sorted(printed[4].splitlines()) == ["[rank 0] from cell 2", "[rank 1] from cell 2", "done"]
    assert printed[0] == printed[2] == printed[5] == ""


@pytest.mark.nightly
def test_a_cluster_that_a_training_uses_stays_and_that_is_said():
    start = START.format("loopback")
    step = "print(training.step(torch.randn(2, 3, 8, 8), torch.tensor([0, 1])) > 0, count_alive_ranks())"
    other = "also = Cluster(2, backend='loopback').start()"
    printed = run(start, TRAIN, start, step, TRAIN, "left()", other, "print(cluster.state, also.state)")
    assert "The 2 ranks of an earlier cluster stay alive: they are in use by `training`." in printed[2]
    assert printed[3] == "True 4\n"
    assert printed[5] == "alive 2\n"  # the old training was in `Out`, and its cluster by it
    assert printed[7] == "ready ready\n"


@pytest.mark.nightly
def test_a_cluster_with_a_call_under_way_stays():
    """In another thread, which no name leads to."""
    start = START.format("loopback")
    begin = (
        "threading.Thread(target=lambda c: print('came', c.call(lambda host: time.sleep(3))), args=[cluster]).start()"
    )
    printed = run(start, begin, start, "print(count_alive_ranks()); time.sleep(4)", "left()")
    assert printed[3].startswith("4\n")
    assert "came [None, None]" in "".join(printed)
    assert printed[4] == "alive 2\n"


# ---- the parts


@pytest.mark.nightly
def test_a_name_is_found_through_what_holds_a_thing():
    class Box:
        def __init__(self, thing):
            self.thing = thing

    thing = Box(None)
    names = {"_": thing, "_12": thing, "Out": {12: thing}, "hidden": [thing]}
    assert find_holder_name(thing, names, [names["Out"]], {"hidden"}) == ""
    names["mine"] = {"a": [lambda: thing], "b": Box(Box(thing))}
    assert find_holder_name(thing, names, [names["Out"]], {"hidden"}) == "mine"
    assert find_holder_name(thing, {"__": thing, "_i": 1, "x": 1}) == ""
    assert THREAD


@pytest.mark.nightly
def test_a_result_that_a_variable_refers_to_counts():
    """IPython keeps the last result under `_` and in `Out`: the variable may refer to the same dict or list."""
    thing = Clock()
    for mine in ({"c": thing}, [thing]):
        names = {"_": mine, "_1": mine, "Out": {1: mine}}
        assert find_holder_name(thing, names, [names["Out"]]) == ""
        assert find_holder_name(thing, {**names, "mine": mine}, [names["Out"]]) == "mine"


@pytest.mark.nightly
def test_a_cluster_in_the_last_result_ends_only_without_a_variable(monkeypatch, capsys):
    old, mine = Cluster(1, backend="loopback").start(), {}
    mine["c"] = old
    names = {"_": mine, "_1": mine, "_oh": {1: mine}, "mine": mine}
    names["Out"], names["new"] = names["_oh"], Cluster(1, backend="loopback").start()
    shell = SimpleNamespace(user_ns=names, user_ns_hidden=set())
    monkeypatch.setattr(owned_ranks, "_get_shell", lambda: shell)
    del old, mine
    for _ in range(2):
        owned_ranks._end_unreachable()
    assert names["mine"]["c"].state == "ready"
    assert capsys.readouterr().err.count("they are in use by `mine`") == 1
    del names["mine"]
    owned_ranks._end_unreachable()
    assert names["_"]["c"].state == "not started"
    assert wait_within(5, lambda: count_alive_ranks() == 1)


@pytest.mark.nightly
def test_a_module_of_the_users_that_holds_a_thing_counts(tmp_path, monkeypatch):
    (tmp_path / "lab_of_mine.py").write_text("held = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lab_of_mine")
    module.held["cluster"] = thing = Clock()
    try:
        assert find_holder_name(thing, {"_": thing}) == "lab_of_mine"
        module.held.clear()
        assert find_holder_name(thing, {"_": thing}) == ""
    finally:
        del sys.modules["lab_of_mine"]


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    from mpi4dl_nb.launch import startup_monitor

    clock = Clock()
    monkeypatch.setattr(startup_monitor, "time", clock)
    monkeypatch.setattr(startup_monitor, "compute_load_factor", lambda: 1.0)
    monkeypatch.setattr(startup_monitor.os, "getloadavg", lambda: (4.0 * startup_monitor.count_cores(), 0.0, 0.0))
    monkeypatch.setattr(StartupMonitor, "usual_s", 4.0)
    return clock


def test_a_slow_start_says_what_it_does_and_goes_on(clock, capsys):
    work_s = 0.0
    start = StartupMonitor(5, lambda: work_s)
    for _ in range(120):
        clock.now_s += 1
        work_s += 0.1
        assert start.update(0, "Of 5 ranks only 0 have joined") == ""
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4  # after 15, 30, 60 and 120 s
    assert said[0].startswith(
        "The start takes longer than usual, and goes on. Of 5 ranks only 0 have joined after 15 s."
    )
    # 1.5 of 20 s are done in 15 s: the other 18.5 s take ten times as many.
    assert said[0].endswith("2 s of a processor by now, and 4.0 programs wait for each core: it may take 185 s more.")


def test_a_start_for_which_nothing_is_done_is_given_up(clock):
    start = StartupMonitor(2, lambda: 3.0)
    trouble = ""
    while not trouble:
        clock.now_s += 1
        trouble = start.update(int(clock.now_s > 1020), f"Of 2 ranks only {int(clock.now_s > 1020)} have reported")
    assert clock.now_s == 1067  # 45 s after the last rank has come, and not a second sooner
    assert trouble == (
        "Of 2 ranks only 1 have reported, and nothing more for 46 s: the processes of the start have done nothing for "
        "46 s."
    )


def test_ranks_that_work_and_never_come_are_given_up(clock):
    start = StartupMonitor(2, lambda: 2 * (clock.now_s - 1000))
    trouble = ""
    while not trouble:
        clock.now_s += 1
        trouble = start.update(0, "Of 2 ranks only 0 have joined")
    assert clock.now_s == 1081  # 20 times the 4 s of a processor that a rank's start takes
    assert "in which each has taken 81 s of a processor: 4 s are usual" in trouble
