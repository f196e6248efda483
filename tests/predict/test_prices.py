"""What kernels, gradients and messages cost, in programs small enough to be counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.geometry.tiles import Move, Span, Tile
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict import kernel_effects, kernel_timer
from mpi4dl_nb.engines.predict.cost import ComputeWork, build_step_actions, estimate_segment_work
from mpi4dl_nb.engines.predict.kernel_timer import (
    KernelTimer,
    KernelTimes,
    LayerSize,
    build_op_tallies,
    compute_speeds,
    make_calls,
)
from mpi4dl_nb.engines.predict.machine import Machine, Speed
from mpi4dl_nb.engines.predict.rank_tally import build_tallies, build_tally
from mpi4dl_nb.engines.predict.tallies import (
    BY_ARITHMETIC,
    CLASSES,
    OpTally,
    SegmentTally,
    classify_kernel,
    get_product_shape,
)
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.program import LEAST_BYTES
from mpi4dl_nb.engines.train.recipe import prepare
from tests.predict.test_simulate import BYTE_PER_S, FORWARD, compute, list_ends, make_rank, run, transfer

SHARED = replace(BYTE_PER_S, cores=2)


class Block(nn.Module):
    """A value that two branches read, and one that nothing but a convolution reads."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return (self.second(x) + x if self.skips else self.second(x)).mean((2, 3))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_forecast_is_the_same_where_gradients_are_off(off, monkeypatch):
    """And what was found there is found again later."""
    monkeypatch.setattr(kernel_effects, "_KNOWN", {})
    recipe = prepare(Block(True), Plan(split_size=1, spatial_size=0), (1, 3, 8, 8), device="cpu")
    (program,) = compile_plan(recipe.graph, recipe.plan)
    with off():
        inside = build_tally(program, recipe.graph)
    assert inside == build_tally(program, recipe.graph)
    kernel_effects._KNOWN.clear()
    assert inside == build_tally(program, recipe.graph)


def list_moves(skips: bool) -> list[int]:
    recipe = prepare(Block(skips), Plan(split_size=1, spatial_size=0), (1, 3, 8, 8), device="cpu")
    (program,) = compile_plan(recipe.graph, recipe.plan)
    way = build_tally(program, recipe.graph).ways[0]
    return sorted(size for segment in way.segments.values() for size in segment.moves)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plan", "different"),
    [
        (Plan(split_size=2, slice_method="4x4"), 3),
        (Plan(split_size=2, slice_method="3x5", halo_d2=True), 13),
        (Plan(split_size=2, slice_method="4x1", overlap_halos=True), 3),
        (Plan(split_size=2, slice_method="2x2", bidirectional=True, schedule="gems"), 3),
        (Plan(split_size=2, spatial_size=0, local_dp=4, data_parallel=2), 2),
    ],
    ids=lambda value: value.summary if isinstance(value, Plan) else "",
)
def test_ranks_that_compute_the_same_share_one_tally(plan, different):
    recipe = prepare(resnet20_v1(), plan, (4, 3, 64, 64), device="cpu")
    programs = compile_plan(recipe.graph, recipe.plan)
    found = list(build_tallies(programs, recipe.graph))
    assert found == [build_tally(program, recipe.graph) for program in programs]
    assert len({id(tally) for tally in found}) == different


def test_a_skip_adds_one_gradient_to_another():
    size = 4 * 8 * 8 * 4
    more = list_moves(skips=True)
    for each in list_moves(skips=False):
        more.remove(each)
    assert 3 * size in more
    assert all(each in (2 * size, 3 * size) for each in more)


def test_moving_gradients_takes_time_in_backward_alone():
    op = OpTally("aten.relu.default", "pointwise", 0, 10, gradients=1)
    plain = SegmentTally((op,), frozenset(), {}, 0, 0, {}, {}, False)
    moving = replace(plain, moves=(30,))
    times = [
        estimate_segment_work(segment, BYTE_PER_S, 1, phase).seconds
        for segment in (plain, moving)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    assert times == [10, 20, 10, 50]


def test_on_shared_cores_a_rank_that_waits_for_a_message_fetches_it():
    """8 bytes at 16 a second: half a second of the receiver's, even where the message came long ago."""
    first = make_rank(0, [(compute("a"), FORWARD), (transfer(0), FORWARD)], {"a": 1})
    late = make_rank(1, [(compute("b"), FORWARD), (transfer(1), FORWARD)], {"b": 5})
    assert list_ends(run(BYTE_PER_S, first, late), 1) == [5, 5]
    assert list_ends(run(SHARED, first, late), 1) == [5, 5.5]


def test_threads_share_a_kernel_and_wait_for_each_other():
    segment = SegmentTally((OpTally("aten.relu.default", "pointwise", 0, 8),), frozenset(), {}, 0, 0, {}, {}, False)
    slow = replace(SHARED, thread_s=0.5)
    assert [estimate_segment_work(segment, slow, threads, Phase.FORWARD).seconds for threads in (1, 2)] == [8, 4.5]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    {
        "tile.conv_transpose": "transposed", "aten.conv2d.default": "convolution", "tile.pad": "pad",
        "aten.constant_pad_nd.default": "pad", "aten.expand.default": "copy", "aten.exp.default": "transcendental",
        "aten.logical_and.default": "pointwise", "aten.log_softmax.int": "transcendental",
        "aten.conv3d.default": "volume",
        "tile.cross_entropy_sums": "loss", "aten.hardswish.default": "pointwise", "tile.dropout": "drawn",
    }.items(),
)  # fmt: skip
def test_kernels_that_run_alike_are_of_one_class(kernel, kind):
    assert classify_kernel(kernel) == kind


def test_a_transposed_convolution_is_the_one_that_it_turns_around():
    assert get_product_shape("tile.conv_transpose", [(2, 64, 8, 8), (64, 32, 2, 2)]) == (128, 64, 2)


def test_separate_gradients_take_what_samples_say():
    """Of a convolution's 8 s a quarter, and seven eighths; a norm's 10 s are not apart."""
    machine = replace(
        BYTE_PER_S,
        speeds={
            "convolution": (Speed((1.0, 1.0, 1.0, 1.0), 1.0, 2.0, inputs=0.25, weights=0.875),),
            "norm": (Speed((1.0,), 1.0, 0.5),),
        },
    )
    calls = (
        OpTally("aten.conv2d.default", "convolution", 8, 0, (1, 1, 1), gradients=2),
        OpTally("tile.batch_norm", "norm", 0, 5, gradients=2),
    )
    late = SegmentTally(calls, frozenset(), {}, 0, 0, {}, {}, True)
    first = replace(late, ops=(replace(calls[0], gradients=1),))
    phases = (Phase.BACKWARD, Phase.INPUTS, Phase.WEIGHTS)
    found = [[estimate_segment_work(each, machine, 1, phase).seconds for phase in phases] for each in (late, first)]
    assert found == [[18, 12, 7], [7, 0, 7]]
    assert estimate_segment_work(replace(late, late=False), machine, 1, Phase.INPUTS).seconds == 18
    assert estimate_segment_work(replace(late, late=False), machine, 1, Phase.WEIGHTS).seconds == 0


def time_kernels(sizes: tuple[LayerSize, ...], late: float = 0.0) -> list[tuple[OpTally, KernelTimes]]:
    kernels = make_calls(sizes)
    found = KernelTimer(kernels, late, separate=True)
    found.run_round()
    return list(zip(build_op_tallies(kernels), found.timed, strict=True))


def test_the_largest_convolutions_of_several_images_are_left_out_where_that_is_asked_for():
    images = [{len(x) for _, (x, *_) in make_calls((), most)} for most in (math.inf, 1e8, 0)]
    assert images == [{1, 2, 4}, {1, 4}, {1}]


@pytest.mark.nightly
def test_samples_are_of_all_classes_whichever_comes_first():
    sizes = (LayerSize(4, 8), LayerSize(8, 4))
    first, later = (time_kernels(sizes, place) for place in (0.0, 0.75))
    assert [op for op, _ in first] == [op for op, _ in later]
    assert {op.kind for op, _ in first} == set(CLASSES)
    assert {op.kind for op, each in first if each.inputs and each.weights} == set(BY_ARITHMETIC)
    assert {op.kind for op, each in first if each.inputs or each.weights} == set(BY_ARITHMETIC)


@pytest.mark.nightly
def test_others_see_a_rank_that_samples_go_on_with_each_kernel(monkeypatch):
    """A whole turn takes seconds where cores are shared; `hang_after_s` may be one."""
    board = Mock()
    monkeypatch.setattr(kernel_timer, "get_status_board", lambda: board)
    found = time_kernels((LayerSize(4, 8),))
    kernels = sum(len(each.forward + each.backward + each.inputs + each.weights) for _, each in found)
    assert board.report.call_count == kernels > 0


def test_a_sample_is_as_crowded_as_all_ranks_found_it():
    def make_times(seconds: float) -> KernelTimes:
        return KernelTimes([seconds] * 3, [seconds] * 3)

    crowded = [[make_times(1.2)], [make_times(1.5)], [make_times(2.0)]]
    op = OpTally("aten.relu.default", "pointwise", 0, 100)
    found = compute_speeds([op], [make_times(1.0)], [make_times(0.75)], crowded, call_s=0.5, back_call_s=0.0, cores=2)
    assert found == {"pointwise": (Speed((100.0,), 200.0, 100.0, crowded=1.5, spread=2 / 3),)}  # 0.25 + 0.75 of 0.5 + 1
    assert Machine("two", "an example", found, cores=2).estimate_spread("pointwise", (50,)) == pytest.approx(2 / 3)
    assert Machine("two", "an example", found, cores=2).estimate_crowding("pointwise", (50,)) == 1.5
    assert Machine("its own", "an example", found).estimate_crowding("pointwise", (50,)) == 1


@pytest.mark.parametrize(
    ("host_per_s", "takes_s"), [(None, [1 + 4, 2]), (LEAST_BYTES / 8, [1 + 8, 2 + 8])], ids=["a host", "a device"]
)
def test_what_is_away_is_carried_and_comes_back_where_it_cannot_be_read(host_per_s, takes_s):
    """`LEAST_BYTES`, copied in 4 s; on the way to the host and back 8 s."""
    program, counted = make_rank(0, [(compute("a"), FORWARD), (compute("a"), Phase.BACKWARD)], {"a": 1})
    segment = replace(counted.ways[0].segments["a"], fresh={"kept": LEAST_BYTES, "small": LEAST_BYTES - 1})
    counted.ways[0].segments["a"] = segment
    machine = replace(BYTE_PER_S, copy_per_s=LEAST_BYTES / 4, host_per_s=host_per_s)
    steps = build_step_actions(program, counted, machine, 1, recompute=False, offload=True)
    assert [sum(action.seconds for action in step) for step in steps] == takes_s


def test_a_message_that_leaves_one_way_is_not_packed():
    """The whole of the value, and so in a row; a part of several images is copied."""
    slow = replace(BYTE_PER_S, copy_per_s=8.0)
    program, counted = make_rank(0, [(transfer(0), FORWARD)], {})
    assert _sum_work_s(program, counted, slow) == 0
    left = Tile(Span(0, 2), Span(0, 1))
    cut = replace(
        transfer(0), shape=(1, 1, 2, 2), own=Tile.whole(2, 2), sends=(Move(0, 1, left),)
    )  # a column of two rows: 8 bytes
    program, counted = make_rank(0, [(cut, FORWARD)], {})
    assert _sum_work_s(program, counted, slow) == 1


def _sum_work_s(program, counted, machine: Machine) -> float:
    (actions,) = build_step_actions(program, counted, machine, 1, recompute=False, offload=False)
    return sum(action.seconds for action in actions if isinstance(action, ComputeWork))


@pytest.mark.parametrize(("copies", "cache_bytes", "more_s"), [(0, 9, 0), (1, 9, 0.5), (3, 9, 1.5), (3, 1, 0.75)])
def test_who_has_waited_finds_its_caches_cold_as_far_as_they_reach(copies, cache_bytes, more_s, monkeypatch):
    """Work on two bytes, copied at four a second; nobody has waited before the one behind it."""
    monkeypatch.setattr("mpi4dl_nb.engines.predict.cost._CACHE_BYTES", cache_bytes)
    works = [(transfer(1), FORWARD), (compute("a"), FORWARD), (compute("b"), FORWARD)]
    program, counted = make_rank(1, works, {"a": 2, "b": 2})
    machine = replace(BYTE_PER_S, copy_per_s=4.0, cold_copies=copies)
    _, first, second = build_step_actions(program, counted, machine, 1, recompute=False, offload=False)
    assert [sum(action.seconds for action in step) for step in (first, second)] == [2 + more_s, 2]
