"""Which GPU and how many threads a rank takes: its share of the host that it is on, not of all ranks."""

from __future__ import annotations

import pytest
import torch

from mpi4dl_nb.engines.comm.device import choose_device, count_local_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.training import choose_thread_count

PLAN = Plan(split_size=1, num_spatial_parts=4)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"])
def test_the_gpu_goes_by_the_number_on_the_host(monkeypatch, four_gpus, name):
    """Ranks 6 to 9 on the second host: by rank they would take GPUs 2, 3, 0, 1; each has one of its own so, too."""
    chosen = []
    for here, rank in enumerate(range(6, 10)):
        monkeypatch.setenv(name, str(here))
        chosen.append(choose_device("auto", rank).index)
    assert chosen == [0, 1, 2, 3]


def test_ranks_without_an_mpi_take_gpus_in_turn(monkeypatch, four_gpus):
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    assert [choose_device("cuda", rank).index for rank in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("told", "here"), [("2", 2), ("9", 4), ("", 4), ("none", 4)])
def test_threads_are_shared_with_the_ranks_of_the_same_host(monkeypatch, told, here):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", told)
    monkeypatch.setattr("mpi4dl_nb.engines.train.training.count_cores", lambda: 8)
    assert count_local_ranks(4) == here
    assert choose_thread_count(PLAN, 0) == 8 // here
