"""Messages that take the time of a link, and what hides behind computing."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.bench.communication import ThrottledWorld, bench_overlap
from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Message
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare

BYTES_PER_S = 1e6


def make_link(world: LoopbackWorld) -> ThrottledWorld:
    return ThrottledWorld(world, BYTES_PER_S)


@pytest.mark.parametrize("prepared", [False, True])
def test_bytes_take_their_time_one_message_after_another(prepared: bool):
    def measure_seconds(world: LoopbackWorld) -> float:
        link, other = make_link(world), 1 - world.rank
        start_s = time.perf_counter()
        link.barrier()  # nothing is sent before all have looked at the clock
        under_way = []
        for tag in (2, 4):
            both = [Message(other, tag, torch.zeros(20_000, dtype=torch.uint8)) for _ in range(2)]
            under_way.append(link.prepare([both[0]], [both[1]])() if prepared else link.exchange([both[0]], [both[1]]))
        for pending in under_way:
            pending.wait()
        assert all(pending.is_completed() for pending in under_way)
        return time.perf_counter() - start_s

    assert min(run_ranks(2, measure_seconds)) >= 0.04


def test_the_link_works_while_the_rank_does_something_else():
    def compute_total(world: LoopbackWorld) -> float:
        link = make_link(world)
        link.barrier()
        summed = torch.ones(5_000)
        total = all_reduce(link, summed, range(2))
        assert not total.is_completed()  # even if all messages are here
        time.sleep(0.1)
        start_s = time.perf_counter()
        total.wait()  # the first time that it looks at them
        assert time.perf_counter() - start_s < 0.02
        assert total.is_completed()
        return summed.sum().item()

    assert run_ranks(2, compute_total) == [10_000, 10_000]


def test_the_bench_tells_how_much_of_halos_is_hidden():
    """Two convolutions with halos, on two ranks; a link of 1 MB/s."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    recipe = prepare(model, Plan(split_size=1, slice_method="1x2"), (1, 3, 64, 20))
    line = run_ranks(2, lambda world: bench_overlap(world, recipe, 1, seed=0, link_mbit_per_s=8, halos=True))[0]
    assert (line["split"], line["whole"]) == (2, 0)
    assert line["messages"] == 3  # two forward; the image's gradient is not asked for
    assert line["bytes"] == 4 * 64 * 3 + 2 * 4 * 62 * 4
    assert line["blocking_s"] >= line["bytes"] / BYTES_PER_S
    assert line["hidden"] < 1


def test_the_bench_tells_how_much_is_hidden():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    recipe = prepare(model, Plan(data_parallel=2, spatial_size=0, split_size=1), (2, 3, 8, 8))
    line = run_ranks(2, lambda world: bench_overlap(world, recipe, iterations=1, seed=0, link_mbit_per_s=8))[0]
    assert line["bytes"] > 0
    assert line["blocking_s"] >= line["bytes"] / BYTES_PER_S
