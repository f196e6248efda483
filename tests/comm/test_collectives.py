"""Gradients added up by torch.distributed's collectives, over MPI ranks: as NCCL does it, with gloo in its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mpi4dl_nb.engines.comm import nccl
from mpi4dl_nb.engines.comm.device import get_gpu_id
from mpi4dl_nb.engines.comm.nccl import OrderedStarter, make_collectives
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import ReleasedError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from collective_ranks import CASES  # noqa: E402

RANKS = 4


@pytest.fixture(scope="module")
def results(mpiexec, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Of the cases that are run here."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    names = [name for name in CASES if f"test_over_gloo[{name}]" in asked]
    done = mpiexec(RANKS, HERE / "collective_ranks.py", *names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_over_gloo(name: str, results: dict[str, list[str]]) -> None:
    assert results[name] == []


@pytest.mark.nightly
def test_a_rank_that_dies_is_noticed_by_those_that_wait_for_its_sum(mpiexec) -> None:
    done = mpiexec(RANKS, HERE / "collective_ranks.py", "die")
    assert "the others go on: 3" in done.stdout, done.stderr


class Told:
    """A world whose other ranks have these GPUs."""

    rank = 0

    def __init__(self, *others: str) -> None:
        self.others, self.size = others, 1 + len(others)

    def all_gather(self, value: str) -> list[str]:
        return [value, *self.others]


@pytest.mark.parametrize(
    ("own", "others", "used"),
    [("a 0", ["a 1", "b 0"], True), ("a 0", ["a 0"], False), ("a 0", [""], False), ("", ["a 1"], False)],
    ids=["one each", "two on one GPU", "one without", "here is none"],
)
def test_it_is_used_where_each_rank_has_a_gpu_of_its_own(monkeypatch, own: str, others: list[str], used: bool):
    monkeypatch.setattr(nccl, "_get_nccl_gpu", lambda device: own)
    assert (make_collectives(Told(*others), torch.device("cuda"), lambda: None) is not None) == used


@pytest.mark.parametrize(
    ("available", "switch", "found"),
    [(True, "", "here GPU-7"), (True, "0", ""), (False, "", "")],
    ids=["with NCCL", "forbidden", "without NCCL"],
)
def test_a_gpu_counts_where_nccl_is_here_and_allowed(monkeypatch, available: bool, switch: str, found: str):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: available)
    monkeypatch.setattr(nccl, "get_gpu_id", lambda device: "here GPU-7")
    monkeypatch.setenv("MPI4DL_NB_NCCL", switch)
    assert nccl._get_nccl_gpu(torch.device("cuda")) == found


def test_a_host_without_a_gpu_has_none():
    assert get_gpu_id(torch.device("cpu")) == ""


@pytest.mark.parametrize("begun", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_sums_start_in_one_order_again_and_again(begun: tuple[int, ...]):
    started: list[int] = []
    order = OrderedStarter(3)
    for _ in range(2):
        for number in begun:
            order.begin(number, lambda number=number: started.append(number))
    assert started == [0, 1, 2] * 2


def test_a_rank_that_dies_while_gpus_are_connected_is_no_fault_of_nccl(monkeypatch):
    def make_store(part: World) -> None:
        raise ReleasedError("released: another rank has failed")

    monkeypatch.setattr(nccl, "_make_tcp_store", make_store)
    with pytest.raises(ReleasedError, match=r"^released: another rank has failed$"):
        nccl.Collectives(Told("b 0"), lambda: None, lambda *_: None).connect_group((0, 1), torch.device("cpu"))
