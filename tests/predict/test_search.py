"""Which plans are looked at, and in which order they come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.search import generate_plans, search
from tests.predict.test_simulate import FLAT


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 6])
def test_every_plan_uses_all_ranks_and_comes_once(ranks):
    found = list(generate_plans(ranks, batch=4))
    assert {plan.ranks for plan in found} == {ranks}
    assert len(set(found)) == len(found)


def test_all_kinds_of_parallelism_are_looked_at():
    found = list(generate_plans(4, batch=4))
    assert {plan.schedule for plan in found} == {"fill_drain", "1f1b", "zero_bubble", "interleaved", "gems"}
    assert {plan.data_parallel for plan in found} == {1, 2, 4}
    assert {plan.spatial_size for plan in found} == {0, 1}
    assert {plan.local_dp for plan in found} == {1, 2}
    assert {plan.halo_d2 for plan in found} == {True, False}


def test_micro_batches_divide_the_batch():
    assert {plan.parts for plan in generate_plans(3, batch=6)} == {1, 2}


def test_the_fastest_comes_first_and_refusals_have_reasons(graph_of):
    seen = []
    found = search(3, 2, graph_of, FLAT, seen=lambda done, of: seen.append((done, of)))
    rates = [each.images_per_s for each in found.fitting]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) > 5
    assert seen[-1][0] == seen[-1][1] == len(found.fitting) + len(found.refused)
    assert all(text for _, text in found.refused)


def test_by_memory_the_leanest_comes_first_with_recomputation(graph_of):
    """No plan that a search by speed predicts needs less, nor does the same plan with recomputed activations."""
    found = search(3, 2, graph_of, FLAT, by="memory")
    sizes = [each.peak_bytes for each in found.fitting]
    assert sizes == sorted(sizes)
    least: dict[Plan, int] = {}
    for again in (False, True):
        plans = [replace(plan, checkpoint_activations=again) for plan in generate_plans(3, 2)]
        for each in search(3, 2, graph_of, FLAT, asked=plans).fitting:
            plan = replace(each.plan, checkpoint_activations=False)
            least[plan] = min(each.peak_bytes, least.get(plan, each.peak_bytes))
    assert sizes == sorted(least.values())
    equal = [each.images_per_s for each in found.fitting if each.peak_bytes == sizes[0]]
    assert equal == sorted(equal, reverse=True)  # of equally lean plans the faster one
    with pytest.raises(PlanError, match=r"by='size' is unknown.*speed.*memory"):
        search(3, 2, graph_of, FLAT, by="size")


def test_by_memory_activations_are_recomputed_where_that_saves_some():
    graph_of = TraceCache(resnet20_v1(), (1, 3, 64, 64), nn.CrossEntropyLoss()).get_graph
    (plain,), (lean,) = (search(1, 1, graph_of, FLAT, by=by).fitting for by in ("speed", "memory"))
    assert (plain.plan.checkpoint_activations, lean.plan.checkpoint_activations) == (False, True)
    assert lean.peak_bytes < plain.peak_bytes


def test_what_does_not_fit_is_listed_separately(graph_of):
    lean = [replace(plan, checkpoint_activations=True) for plan in generate_plans(2, 2)]
    sizes = sorted(each.peak_bytes for each in search(2, 2, graph_of, FLAT, asked=lean).fitting)
    found = search(2, 2, graph_of, FLAT, rank_bytes=sizes[2])
    assert max(each.peak_bytes for each in found.fitting) <= sizes[2] < found.too_large[-1].peak_bytes
    kept = search(2, 2, graph_of, FLAT, asked=list(generate_plans(2, 2))).fitting
    least = min(sizes[0], *(each.peak_bytes for each in kept))
    with pytest.raises(
        PlanError, match=f"No plan for 2 ranks fits: the smallest needs {format_bytes(least)} of a rank"
    ):
        search(2, 2, graph_of, FLAT, rank_bytes=10)


@pytest.mark.nightly
def test_what_does_not_fit_is_taken_with_activations_computed_again():
    graph_of = TraceCache(resnet20_v1(), (4, 3, 64, 64), nn.CrossEntropyLoss()).get_graph
    plan = Plan(split_size=2, spatial_size=0, parts=4)
    lean = replace(plan, checkpoint_activations=True)
    limit, least = (forecast(graph_of(each), each, FLAT).peak_bytes for each in (plan, lean))
    assert least < limit
    for rank_bytes, wanted in ((limit, plan), (limit - 1, lean), (least, lean)):
        found = search(2, 4, graph_of, FLAT, rank_bytes=rank_bytes, asked=[plan])
        assert [each.plan for each in found.fitting] == [wanted]


def test_images_beyond_the_neutral_batch_do_not_count(graph_of):
    asked = [Plan(split_size=1, spatial_size=0, data_parallel=4), Plan(split_size=4, spatial_size=0)]
    many, few = (forecast(graph_of(plan), plan, FLAT) for plan in asked)
    assert many.images > few.images
    assert many.images_per_s > few.images_per_s
    neutral = few.images
    by_time = search(4, 2, graph_of, FLAT, asked=asked, neutral_batch=neutral).fitting
    assert [each.compute_throughput(neutral) for each in by_time] == sorted(
        (neutral / e.seconds for e in (many, few)), reverse=True
    )
    assert by_time[0].seconds == min(many.seconds, few.seconds)
