"""Programs small enough to be timed by hand, and what must hold for any program."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Move, Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machine import Machine, Speed
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.predict.simulate import simulate
from mpi4dl_nb.engines.predict.tallies import CLASSES, DirectionTally, OpTally, RankTally, SegmentTally
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute
from mpi4dl_nb.engines.program.program import DirectionProgram, Program, Step
from mpi4dl_nb.engines.train.recipe import prepare

PX = Tile.whole(1, 2)  # two pixels of float32: 8 bytes
BYTE_PER_S = Machine("toy", "by hand", {"pointwise": (Speed((1.0,), 1.0, 0.5),)}, latency_s=0.5, bytes_per_s=16.0)


def compute(name: str) -> Compute:
    return Compute(name, (), (), (), True)


def transfer(rank: int) -> Exchange:
    """From rank 0 to rank 1."""
    move, sends = Move(0, 1, PX), rank == 0
    return Exchange(
        "there", "stage", "x", "x", (-2, -1), (1, 1, 1, 2), "float32", PX if sends else None, None if sends else PX,
        0.0, (move,) if sends else (), () if sends else (move,), 2, True,
    )  # fmt: skip


def make_rank(rank: int, steps: list, seconds: dict[str, int]) -> tuple[Program, RankTally]:
    """A rank whose segments take so many seconds forward, and twice that back."""
    walked = tuple(Step(item, phase) for item, phase in steps)
    items = tuple(dict.fromkeys(item for item, _ in steps))
    way = DirectionProgram({0: items}, {}, None, None, False, frozenset())
    ops = {name: OpTally("aten.relu.default", "pointwise", 0, count, gradients=1) for name, count in seconds.items()}
    segments = {name: SegmentTally((op,), frozenset(), {}, 0, 0, {}, {}, False) for name, op in ops.items()}
    tallies = RankTally({0: DirectionTally({}, {}, {}, frozenset(), segments, {})}, {}, {})
    return Program(rank, walked, {0: way}, {0: 0}, 1, (), ()), tallies


def run(machine: Machine, *ranks: tuple[Program, RankTally]):
    programs, tallies = zip(*ranks, strict=True)
    return simulate(programs, tallies, machine, [1] * len(ranks))


def list_ends(timeline, rank: int) -> list[float]:
    return [event.end_s for event in timeline.events if event.rank == rank]


FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def test_a_message_arrives_after_latency_and_bytes_and_is_waited_for():
    first = make_rank(0, [(compute("a"), FORWARD), (transfer(0), FORWARD), (compute("b"), FORWARD)], {"a": 1, "b": 1})
    second = make_rank(1, [(transfer(1), FORWARD), (compute("c"), FORWARD)], {"c": 2})
    timeline = run(BYTE_PER_S, first, second)
    assert list_ends(timeline, 0) == [1, 1, 2]  # what is sent is not waited for
    assert list_ends(timeline, 1) == [2, 4]  # 1 s of work, 0.5 s of latency, 8 bytes at 16 in a second
    assert [event.bytes for event in timeline.events] == [0, 8, 0, 0, 0]
    assert [event.wait_s for event in timeline.events] == [0, 0, 0, 2, 0]
    assert timeline.seconds == 4


def test_a_gradient_goes_home_by_the_same_moves():
    first = make_rank(0, [(transfer(0), FORWARD), (transfer(0), BACKWARD), (compute("a"), BACKWARD)], {"a": 1})
    second = make_rank(1, [(transfer(1), FORWARD), (transfer(1), BACKWARD)], {})
    timeline = run(BYTE_PER_S, first, second)
    assert list_ends(timeline, 1) == [1, 1]
    assert list_ends(timeline, 0) == [0, 2, 4]  # backward takes twice as long


def test_a_sum_is_complete_when_the_last_one_has_come():
    total = AllReduce("sum", "x", "y", TensorSpec((1, 2), "float32"), (0, 1, 2), True)
    ranks = [make_rank(r, [(compute("a"), FORWARD), (total, FORWARD)], {"a": 1 + r}) for r in range(3)]
    timeline = run(BYTE_PER_S, *ranks)
    assert [list_ends(timeline, rank)[-1] for rank in range(3)] == [4.5] * 3  # 3 s of work, 0.5 s, 16 bytes each
    assert [event.wait_s for event in timeline.events if event.name == "sum"] == [3.5, 2.5, 1.5]


def test_ranks_share_the_cores_of_a_host():
    machine = replace(BYTE_PER_S, cores=1)
    ranks = [make_rank(r, [(compute("a"), FORWARD)], {"a": seconds}) for r, seconds in enumerate((1, 3))]
    timeline = run(machine, *ranks)
    assert list_ends(timeline, 0) + list_ends(timeline, 1) == pytest.approx([2, 4], abs=machine.slice_s)
    assert run(replace(machine, cores=2), *ranks).seconds == 3


def test_two_ranks_that_wait_for_each_other_are_an_error():
    ranks = [make_rank(0, [(compute("a"), FORWARD)], {"a": 1}), make_rank(1, [(transfer(1), FORWARD)], {})]
    with pytest.raises(PlanError, match=r"wait for ever: ranks 1 wait, rank 1 in step 0 \(there, forward\)"):
        run(BYTE_PER_S, *ranks)


def test_a_class_that_was_not_measured_is_an_error():
    with pytest.raises(PlanError, match="no speed for pointwise"):
        run(replace(BYTE_PER_S, speeds={}), make_rank(0, [(compute("a"), FORWARD)], {"a": 1}))


def test_a_machine_is_the_same_after_being_stored():
    machine = replace(BYTE_PER_S, cores=2, ranks=4)
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("text", ["", "{}", '{"speeds": 3}', "[" * 50_000, "1" * 5000, "\0", '{"speeds": {}, "a": 1}'])
def test_what_is_no_machine_is_refused(text):
    with pytest.raises(PlanError, match="no machine that was stored"):
        Machine.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"call_s": float("nan")},
        {"latency_s": -1.0},
        {"latency_s": float("inf")},
        {"bytes_per_s": 0},
        {"cores": "many"},
        {"cores": 1.5},
        {"ranks": -1},
        {"name": 3},
        {"speeds": {"pointwise": [{"at": [1], "per_s": float("nan"), "back_per_s": 1}]}},
        {"speeds": {"pointwise": [{"at": ["x"], "per_s": 1, "back_per_s": 1}]}},
    ],
    ids=str,
)
def test_a_machine_with_impossible_numbers_is_refused(fields):
    """As JSON, in which Python reads NaN and Infinity too."""
    with pytest.raises(PlanError, match="no machine that was stored"):
        Machine.from_json(json.dumps(json.loads(BYTE_PER_S.to_json()) | fields))


FLAT = Machine(
    "flat", "made up", {kind: (Speed((1.0,), 1e9, 1e9),) for kind in CLASSES},
    call_s=1e-6, back_call_s=2e-6, instruction_s=1e-5, copy_per_s=1e10, latency_s=1e-4, bytes_per_s=1e8,
)  # fmt: skip
PLANS = (
    Plan(split_size=2, spatial_size=1),
    Plan(split_size=3, spatial_size=0, parts=2, schedule="1f1b"),
    Plan(split_size=3, spatial_size=0, parts=2, schedule="zero_bubble"),
    Plan(split_size=2, spatial_size=0, bidirectional=True, schedule="gems", data_parallel=2),
)


@pytest.fixture(scope="module")
def compiled():
    found = []
    for plan in PLANS:
        graph = prepare(resnet20_v1(), plan, (2, 3, 32, 32)).graph
        programs = compile_plan(graph, plan)
        found.append((programs, [build_tally(program, graph) for program in programs]))
    return found


@pytest.mark.nightly
@settings(max_examples=25)
@given(
    which=st.integers(0, len(PLANS) - 1),
    bandwidth=st.floats(1e5, 1e10), latency=st.floats(0, 1e-2), times=st.floats(1, 100),
)  # fmt: skip
def test_a_faster_link_is_never_slower(compiled, which, bandwidth, latency, times):
    programs, tallies = compiled[which]
    slow = replace(FLAT, bytes_per_s=bandwidth, latency_s=latency)
    fast = replace(FLAT, bytes_per_s=bandwidth * times, latency_s=latency / times)
    before, after = (simulate(programs, tallies, each, [1] * len(programs)).seconds for each in (slow, fast))
    assert after <= before * (1 + 1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("which", range(len(PLANS)))
def test_no_rank_is_done_before_its_own_work_and_each_step_happens_once(compiled, which):
    programs, tallies = compiled[which]
    timeline = simulate(programs, tallies, FLAT, [1] * len(programs))
    for program in programs:
        mine = [event for event in timeline.events if event.rank == program.rank]
        assert [event.name for event in mine] == [step.instruction.name for step in program.steps]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(mine))
    shared = simulate(programs, tallies, replace(FLAT, cores=1), [1] * len(programs))
    work = sum(event.end_s - event.start_s for event in timeline.events if event.kind == "compute")
    assert shared.seconds >= work * (1 - 1e-9)
