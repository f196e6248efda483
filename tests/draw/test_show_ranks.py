"""The picture of the ranks: each where its tile lies, with the numbers of its program."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from legible import find_unreadable, read

from mpi4dl_nb import show_ranks
from mpi4dl_nb.draw.rank_map import draw_ranks
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.predict.forecast import count_load
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory
from mpi4dl_nb.engines.program.program import count_traffic
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining

SHAPE = (4, 3, 32, 32)
ALL = Plan(split_size=3, slice_method="2x3", bidirectional=True, data_parallel=2, parts=2)
PLANS = [
    Plan(),
    ALL,
    Plan(split_size=3, spatial_size=2, slice_method=("2x3", "vertical"), local_dp=2),
    Plan(split_size=5, schedule="interleaved", stages_per_rank=2),
    Plan(split_size=24, spatial_size=0),
    Plan(split_size=8, spatial_size=2, slice_method="8x8", data_parallel=16),
]


def find_rank_positions(figure) -> list[tuple[float, float, int]]:
    """Where each rank's name stands, from above and from the left."""
    found = [(text.get_position(), text.get_text().removeprefix("rank ")) for text in figure.axes[0].texts]
    return [(round(y, 3), round(x, 3), int(name)) for (x, y), name in found if name.isdecimal()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_it_is_legible(plan: Plan):
    assert find_unreadable(draw_ranks(plan)) == []


@pytest.mark.parametrize("plan", [Plan(), ALL], ids=lambda plan: plan.summary)
def test_every_rank_is_named_as_often_as_it_has_a_role(plan: Plan):
    roles = Counter({rank: len(roles) for rank, roles in enumerate(Layout.of(plan).roles)})
    assert Counter(rank for _, _, rank in find_rank_positions(draw_ranks(plan))) == roles


def test_tiles_stand_in_their_grid_and_copies_below_each_other():
    rows = {}
    for y, x, rank in sorted(find_rank_positions(draw_ranks(Plan(split_size=1, slice_method="2x3", data_parallel=2)))):
        rows.setdefault(y, []).append((x, rank))
    assert [[rank for _, rank in sorted(row)] for row in rows.values()] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    assert len({tuple(x for x, _ in sorted(row)) for row in rows.values()}) == 1


def test_the_mirrored_copy_is_named_and_hatched():
    plan = Plan(split_size=3, spatial_size=0, bidirectional=True)
    figure = draw_ranks(plan)
    assert "replica 0, mirrored: stage 0 on rank 2, stage 1 on rank 1, stage 2 on rank 0" in figure.alt
    assert "replica 0 mirrored" in read(figure)
    assert {patch.get_hatch() for patch in figure.axes[0].patches} >= {"//"}


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [Plan(), ALL, Plan(split_size=2, local_dp=2)], ids=lambda plan: plan.summary)
def test_the_numbers_are_those_of_the_programs(plan: Plan):
    graph = prepare(resnet20_v1(), plan, SHAPE).graph
    figure, programs = show_ranks(plan, resnet20_v1(), SHAPE), compile_plan(graph, plan)
    for program in programs:
        load = count_load(program, graph, plan)
        memory, sent = predict_rank_memory(program, graph, plan), count_traffic(program).values()
        assert load.kept_bytes == memory.at_peak["activations"] + memory.at_peak["halos"] > 0
        told = f"{format_bytes(load.kept_bytes)} ({format_bytes(memory.peak_bytes)} in all), sent in a training step "
        told += f"{sum(part.messages for part in sent):,} messages, {format_bytes(sum(part.bytes for part in sent))}"
        assert f"{format_bytes(load.weight_bytes)}, activations kept for backward {told}" in figure.alt
        assert f"{sum(part.messages for part in sent):,} messages" in read(figure)


@pytest.mark.nightly
def test_the_numbers_are_those_of_ranks_at_work():
    plan = Plan(split_size=2, slice_method="1x2", parts=2, bidirectional=True)
    recipe = prepare(resnet20_v1(), plan, SHAPE, device="cpu")
    count = SHAPE[0] * plan.batches
    batch = {"images": torch.randn(count, *SHAPE[1:]), "labels": torch.zeros(count, dtype=torch.int64)}

    def count_bytes(world) -> tuple[int, int]:
        training = RankTraining(world, recipe)
        report = training.step(training.cut(batch))
        owned = [*training.weights.values(), *training.buffers.values()]
        return sum(tensor.nbytes for tensor in owned), sum(event.bytes for event in report.events)

    loads = [count_load(program, recipe.graph, plan) for program in compile_plan(recipe.graph, plan)]
    for load, (weights, sent) in zip(loads, run_ranks(plan.ranks, count_bytes), strict=True):
        assert load.weight_bytes == weights
        assert load.sent.bytes == pytest.approx(sent, rel=1e-3)


def test_a_model_needs_a_size():
    with pytest.raises(PlanError, match="needs the image_shape"):
        show_ranks(Plan(), resnet20_v1())
