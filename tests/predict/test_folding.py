"""One replica stands for all: what is simulated of it is what all ranks would have done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpi4dl_nb.engines.compiler.compile import Compiler, compile_plan
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import count_copies, forecast
from mpi4dl_nb.engines.predict.machine import Link, Machine, Speed
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.predict.simulate import simulate
from mpi4dl_nb.engines.predict.tallies import CLASSES

APART = Machine(
    "own devices", "by hand", {kind: (Speed((1.0,), 1e9, 5e8),) for kind in CLASSES}, call_s=1e-6, copy_per_s=1e10,
    latency_s=2e-6, bytes_per_s=1e9, node_ranks=4, between=Link(1e-5, 1e8),
)  # fmt: skip
PLANS = {
    "replicas alone": Plan(split_size=1, spatial_size=0, data_parallel=8, parts=2),
    "both directions": Plan(split_size=4, spatial_size=0, data_parallel=3, bidirectional=True, schedule="gems"),
    "pipelines": Plan(split_size=4, spatial_size=0, data_parallel=2, parts=2, schedule="1f1b"),
    "tiles": Plan(split_size=1, spatial_size=1, slice_method="2x2", data_parallel=4),
    "tiles, fused": Plan(
        split_size=1, spatial_size=1, slice_method="2x4", data_parallel=2, halo_d2=True, fused_layers="auto"
    ),
    "tiles, then shares": Plan(split_size=2, spatial_size=1, slice_method="1x2", local_dp=2, data_parallel=3),
    "statistics by tile": Plan(
        split_size=2, spatial_size=1, slice_method="1x3", data_parallel=3, parts=2, sync_batchnorm=False
    ),
    "not aligned with nodes": Plan(split_size=2, spatial_size=1, slice_method="2x1", data_parallel=4),
    "not aligned, both directions": Plan(
        split_size=3, spatial_size=0, data_parallel=4, bidirectional=True, schedule="gems", parts=2
    ),
    "fewer replicas than fill their nodes": Plan(split_size=3, spatial_size=0, data_parallel=3, parts=2),
}


def simulate_all_ranks(graph, plan: Plan, machine: Machine):
    """All ranks compiled, counted and simulated, none for another."""
    programs = compile_plan(graph, plan)
    return simulate(programs, [build_tally(program, graph) for program in programs], machine, [1] * len(programs))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("node_ranks", "sums"), [(2, "direct"), (4, "two_level")])
@pytest.mark.parametrize("name", PLANS)
def test_a_replica_takes_as_long_as_all_ranks_do(name, node_ranks, sums, graph_of):
    plan, machine = PLANS[name], replace(APART, node_ranks=node_ranks, sums=sums)
    alone, together = forecast(graph_of(plan), plan, machine), simulate_all_ranks(graph_of(plan), plan, machine)
    assert alone.seconds == pytest.approx(together.seconds, rel=1e-9)
    assert len(alone.timeline.ranks) == plan.replica_ranks * count_copies(plan, machine)
    ours = [event for event in together.events if event.rank in alone.timeline.ranks]
    assert [(e.rank, e.name, e.phase, e.micro_batch, e.bytes) for e in alone.timeline.events] == [
        (e.rank, e.name, e.phase, e.micro_batch, e.bytes) for e in ours
    ]
    for mine, theirs in zip(alone.timeline.events, ours, strict=True):
        assert (mine.start_s, mine.end_s, mine.wait_s) == pytest.approx((theirs.start_s, theirs.end_s, theirs.wait_s))


@pytest.mark.parametrize("name", ["pipelines", "statistics by tile"])
def test_ranks_that_share_cores_are_all_simulated_from_one_replica(name, graph_of):
    plan = PLANS[name]
    machine = replace(APART, node_ranks=None, between=None, cores=2)
    found = forecast(graph_of(plan), plan, machine)
    assert found.seconds == pytest.approx(simulate_all_ranks(graph_of(plan), plan, machine).seconds, rel=1e-9)
    assert [memory.rank for memory in found.memory] == list(range(plan.ranks))


def test_one_replica_is_compiled_whatever_their_number(graph_of, monkeypatch):
    compiled = []
    program = Compiler.compile_rank
    monkeypatch.setattr(Compiler, "compile_rank", lambda self, rank: compiled.append(rank) or program(self, rank))
    plan = Plan(split_size=2, spatial_size=1, slice_method="1x2", data_parallel=4096)
    found = forecast(graph_of(plan), plan, APART)
    assert compiled == [0, 1, 2]
    assert found.ranks == 12_288
    assert found.images == 4096 * 4
    assert len(found.timeline.ranks) == found.simulated.ranks == 12  # four replicas fill three nodes
