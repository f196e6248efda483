"""How far ranks may go while others wait: nothing is begun that cannot end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
from torch import nn

from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.steps import UNITS, DependencyOrder, StepCounts, StepLabel, find_block_end, label_steps
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import Update
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.train.recipe import prepare

PLANS = {
    "tiles and a joint": Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 2)),
    "fused halos": Plan(split_size=2, spatial_size=1, slice_method="2x2", halo_d2=True, fused_layers=2),
    "halos in halves": Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 2), overlap_halos=True),
    "a repartition": Plan(split_size=3, spatial_size=2, slice_method=("2x2", "1x2"), parts=2),
    "norm by tile": Plan(split_size=1, spatial_size=1, slice_method="1x2", sync_batchnorm=False),
    "gpipe": Plan(split_size=3, spatial_size=0, parts=3),
    "1f1b both ways, twice": Plan(
        split_size=3, slice_method="1x2", parts=2, schedule="1f1b", bidirectional=True, data_parallel=2
    ),
    "interleaved": Plan(split_size=4, spatial_size=0, parts=4, schedule="interleaved", stages_per_rank=2),
    "zero bubble": Plan(split_size=3, spatial_size=0, parts=4, schedule="zero_bubble"),
    "gems": Plan(split_size=3, spatial_size=0, bidirectional=True, times=2, schedule="gems"),
    "shared images": Plan(split_size=2, slice_method="2x2", local_dp=2, parts=2),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def make_net() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@cache
def compile_programs(plan: Plan) -> tuple[ModelGraph, tuple[Program, ...], DependencyOrder]:
    graph = prepare(make_net(), plan, (4 * plan.parts, 3, 8, 12)).graph
    compiler = Compiler(graph, plan)
    programs = tuple(compiler.compile_rank(rank) for rank in range(plan.ranks))
    return graph, programs, DependencyOrder(programs)


def label_programs(plan: Plan) -> list[tuple[StepLabel, ...]]:
    graph, programs, _ = compile_programs(plan)
    return [label_steps(graph, program) for program in programs]


def is_open(order: DependencyOrder, at: StepCounts) -> bool:
    """Whether some rank has ended an instruction for which another one had to begin what it has not begun."""
    return any(
        at[peer] <= needed
        for rank, needs in enumerate(order.needs)
        for index in range(at[rank])
        for peer, needed in needs[index]
    )


def walk_order(order: DependencyOrder, found: Sequence[tuple[StepLabel, ...]], unit: str) -> Iterator[StepCounts]:
    at: StepCounts = (0,) * len(order.ends)
    while at != order.ends:
        before = at
        at = order.advance_within(
            at, [find_block_end(each, place, unit) for each, place in zip(found, at, strict=True)]
        )
        assert at != before, f"no rank can go on from {at}"
        yield at


@pytest.mark.sampled(3)
@every_plan
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_leads_to_the_end_and_never_leaves_a_rank_waiting(plan: Plan, unit: str):
    order = compile_programs(plan)[2]
    assert not any(is_open(order, at) for at in walk_order(order, label_programs(plan), unit))


@pytest.mark.sampled(3)
@every_plan
def test_a_way_by_instructions_can_be_gone_and_ends_where_it_was_to(plan: Plan):
    order = compile_programs(plan)[2]
    start: StepCounts = (0,) * len(order.ends)
    way = order.list_counts(start, order.ends)
    assert way[-1] == order.ends
    for before, after in pairwise([start, *way]):
        assert all(a - b in (0, 1) for b, a in zip(before, after, strict=True))
        assert after != before
        assert not is_open(order, after)
    half = order.compute_closure(start, {0: order.ends[0] // 2})
    assert order.list_counts(start, half)[-1] == half
    assert order.list_counts(half, half) == []


@every_plan
def test_one_instruction_of_the_next_rank_takes_along_only_those_that_it_meets(plan: Plan):
    order = compile_programs(plan)[2]
    at: StepCounts = (0,) * plan.ranks
    while (rank := order.choose_next_rank(at)) is not None:
        new = order.compute_closure(at, {rank: at[rank] + 1})
        assert max(b - a for a, b in zip(at, new, strict=True)) == 1
        assert new[rank] == at[rank] + 1
        assert not is_open(order, new)
        at = new
    assert at == order.ends


@every_plan
def test_a_rank_alone_goes_to_its_end_with_the_least_of_others(plan: Plan):
    """No rank could do one instruction less."""
    order = compile_programs(plan)[2]
    rank = plan.ranks - 1
    half = order.ends[rank] // 2
    new = order.compute_closure((0,) * plan.ranks, {rank: half})
    assert new[rank] == half
    assert not is_open(order, new)
    for other in range(plan.ranks):
        if other != rank and new[other]:
            fewer = tuple(at - (who == other) for who, at in enumerate(new))
            assert is_open(order, fewer), f"rank {other} was taken farther than needed"


@every_plan
def test_weights_move_on_all_ranks_at_once(plan: Plan):
    _, programs, order = compile_programs(plan)
    assert all(isinstance(program.steps[-1].instruction, Update) for program in programs)
    almost = order.compute_closure((0,) * plan.ranks, {rank: end - 1 for rank, end in enumerate(order.ends)})
    assert almost == tuple(end - 1 for end in order.ends)
    assert order.compute_closure(almost, {0: order.ends[0]}) == order.ends


def test_who_only_sends_waits_for_nobody_and_who_receives_waits_for_the_senders():
    plan = PLANS["tiles and a joint"]
    _, programs, order = compile_programs(plan)
    steps = [program.steps for program in programs]

    def find_joint(rank: int) -> int:
        kinds = [isinstance(s.instruction, Exchange) and s.instruction.kind == "stage" for s in steps[rank]]
        return kinds.index(True)

    assert order.needs[0][find_joint(0)] == ()
    assert order.needs[4][find_joint(4)] == tuple((rank, find_joint(rank)) for rank in range(4))
    assert order.find_blocking_ranks((0,) * 5, 4) == (0, 1, 2, 3)
    alone = order.compute_closure((0,) * 5, {0: find_joint(0) + 1})
    assert alone[4] == 0


def test_a_block_is_a_layer_a_pass_or_a_phase():
    plan = PLANS["1f1b both ways, twice"]
    for found in label_programs(plan):
        for unit, key in (
            ("layer", lambda p: (p.layer, p.work, p.phase_name)),
            ("micro-batch", lambda p: (p.work, p.phase_name)),
        ):
            ends = []
            while not ends or ends[-1] < len(found):
                ends.append(find_block_end(found, ends[-1] if ends else 0, unit))
            for start, stop in zip([0, *ends], ends, strict=False):
                assert len({key(place) for place in found[start:stop]}) == 1
                assert stop == len(found) or key(found[stop]) != key(found[start])


def test_places_are_named_by_the_users_modules():
    graph, programs, _ = compile_programs(PLANS["tiles and a joint"])
    found = label_steps(graph, programs[0])
    halo = next(place for place in found if place.kind == "halo")
    after = next(place for place in found[found.index(halo) :] if place.kind == "compute")
    assert halo.layer == after.layer
    assert halo.module.startswith("0")
    assert (found[-1].phase_name, found[-1].work, found[-1].layer) == ("update", None, "")
    assert {place.phase_name for place in found} == {"forward", "backward", "update"}
    assert all(place.work.stage == 0 for place in found if place.step.phase is not Phase.UPDATE)
