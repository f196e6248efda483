"""A cluster that cannot start says why, and how it is mended, within seconds; the causes: tests/start_failures.py.

`python -m tests.start_failures` provokes the slow one too: processes that are each alone in a world of size 1.
"""

from __future__ import annotations

import os
import re
import tempfile

import psutil
import pytest
import torch
from torch import nn

from mpi4dl_nb.cluster import mpi_ranks
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.launch import mpi_library
from mpi4dl_nb.launch.mpi_library import find_mpiexec
from mpi4dl_nb.launch.reaper_process import is_running
from mpi4dl_nb.launch.startup_monitor import find_startup_cause, format_excerpt
from mpi4dl_nb.training.training import Training
from tests.start_failures import CASES, measure_failure


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_a_start_that_fails_says_why_at_once_and_leaves_nothing(name, tmp_path, capfd, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = list_family()
    seconds, said = measure_failure(name, tmp_path)
    assert re.search(CASES[name].says, said), said
    assert seconds < CASES[name].within_s
    printed = capfd.readouterr().err
    assert printed == "" or (name == "silent_mpiexec" and "and goes on. Of 2 ranks only 0 have reported" in printed)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list_family() == before


def list_family() -> set[psutil.Process]:
    return set(filter(is_running, psutil.Process().children(recursive=True)))


def test_after_a_failed_start_the_cluster_is_not_started(tmp_path, monkeypatch):
    CASES["no_mpiexec"].provoke(monkeypatch, tmp_path)
    cluster = Cluster(2)
    with pytest.raises(RankError, match="no mpiexec"):
        cluster.start()
    with pytest.raises(RankError, match="not started"):
        cluster.call(lambda host: None)


def test_the_mpi_here_goes_on_after_a_failure():
    assert mpi_library.find_mpi_library(find_mpiexec()).flags == ("--with-ft", "ulfm")


@pytest.fixture
def without_ulfm(monkeypatch):
    """As an Open MPI that was built without it."""
    real = mpi_library._query_mpi4py
    monkeypatch.setattr(mpi_library, "_query_mpi4py", lambda python: (*real(python)[:4], False))
    mpi_library._query_library.cache_clear()
    mpi_library._warn.cache_clear()
    yield
    mpi_library._query_library.cache_clear()


@pytest.mark.nightly
def test_without_ulfm_that_is_said_once_and_a_failure_ends_the_set(without_ulfm):
    def fail_on_rank_1(host):
        if host.world.rank == 1:
            raise ValueError("no such pixel")
        host.world.all_gather(None)

    cluster = Cluster(2)
    try:
        with pytest.warns(RuntimeWarning, match=r"no fault tolerance \(ULFM\): after a failure .* all ranks"):
            cluster.start()
        assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2
        with pytest.raises(RankError, match="Rank 1: ValueError: no such pixel"):
            cluster.call(fail_on_rank_1)
        with pytest.raises(RankError, match=r"Call heal\(\)"):
            cluster.call(lambda host: None)
        assert (
            mpi_library.find_mpi_library(find_mpiexec()).flags == ()
        )  # and no second warning, which would be an error here
    finally:
        cluster.stop()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*no fault tolerance:RuntimeWarning")
def test_without_ulfm_a_debugged_step_that_is_left_costs_nothing(without_ulfm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    with Cluster(2) as cluster:
        made = Training(model, Plan(split_size=1, slice_method="1x2"), cluster, (2, 3, 8, 8))
        pids = cluster.call(lambda host: os.getpid())
        step = made.stepping(images, labels)
        step.instruction()
        step.close()
        assert made.step(images, labels) > 0
        assert cluster.call(lambda host: os.getpid()) == pids


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("OSError: [Errno 28] No space left on device", "A file system is full."),
        ("zmq.error.ZMQError: Too many open files", "No more files may be opened."),
        ("RuntimeError: can't start new thread", "no more processes, threads or memory"),
        ("No network interfaces were found for out-of-band communications", "no network interface"),
        ("ModuleNotFoundError: No module named 'torch'", "The Python of the ranks has no torch."),
        ("error while loading shared libraries: libpmix.so.2: cannot open shared object file", "A library is missing."),
        ("[mpiexec@vm] match_arg: unrecognized argument with-ft", "does not know an option"),
        ("all is well", ""),
    ],
)
def test_known_causes_are_explained_in_words(said, means):
    assert means in find_startup_cause(said)
    assert bool(find_startup_cause(said)) == bool(means)


def test_what_was_said_is_shown_from_the_cause_on():
    lines = ["noise", "-----", "No space left on device", *map(str, range(30))]
    assert format_excerpt("\n".join(lines)).splitlines()[:3] == ["Their output:", "No space left on device", "0"]
    assert format_excerpt("\n".join(map(str, range(30)))).splitlines()[-1] == "29"
    assert format_excerpt(" \n---\n") == ""


def test_little_shared_memory_is_left_alone(monkeypatch, tmp_path):
    """As in a container, where Docker gives 64 MB: more ranks than fit would die of SIGBUS."""
    from mpi4dl_nb.launch import host_agent, run_directory

    monkeypatch.setattr(host_agent, "_SEGMENT_BYTES", 1 << 60)
    made = run_directory.RunDirectory.make(2)
    try:
        assert made.memory == made.home
    finally:
        made.home.rmdir()
    assert mpi_ranks.RunDirectory is run_directory.RunDirectory
