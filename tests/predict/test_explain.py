"""The best plan of each kind in words, with the search's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.formatting import format_bytes, format_number
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.explain import KINDS, classify_plan, describe_plan, explain
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.search import generate_plans, search
from mpi4dl_nb.engines.program.timeline import SHARES, compute_time_shares
from tests.predict.test_simulate import FLAT
from tests.zoo import Chain

SHAPE = (4, 3, 32, 32)


@pytest.fixture(scope="module")
def traces() -> TraceCache:
    return TraceCache(Chain(), SHAPE, nn.CrossEntropyLoss())


@pytest.fixture(scope="module")
def found(traces):
    return search(4, 4, traces.get_graph, FLAT)


def test_every_plan_is_of_one_kind():
    kinds = {classify_plan(plan): plan for plan in generate_plans(4, batch=4)}
    assert set(kinds) == set(KINDS)
    assert classify_plan(Plan(split_size=2, spatial_size=2, slice_method=("2x2", "1x2"))) == "spatial"
    assert classify_plan(Plan(split_size=2, bidirectional=True)) == "hybrid"
    assert classify_plan(Plan(split_size=1, spatial_size=0, local_dp=4)) == "data"


@pytest.mark.nightly
def test_each_kind_has_its_fastest_plan(found):
    explained = explain(found.fitting, found.refused)
    for kind in KINDS:
        of_kind = [each for each in found.fitting if classify_plan(each.plan) == kind]
        verdict = explained.get_verdict(kind)
        assert verdict.looked_at == len(of_kind) + sum(classify_plan(plan) == kind for plan, _ in found.refused)
        assert verdict.best is max(of_kind, key=lambda each: each.images_per_s)
        assert verdict.share == pytest.approx(verdict.best.images_per_s / found.fitting[0].images_per_s)
    assert explained.best.best is found.fitting[0]
    assert explained.sentences[0].startswith("The best for 4 ranks, as predicted, is ")
    assert describe_plan(found.fitting[0].plan) in explained.sentences[0]
    assert f"{format_number(found.fitting[0].images_per_s)} images/s" in explained.sentences[0]
    assert len(explained.sentences) == len(KINDS)
    shares = [explained.get_verdict(kind).share for kind in KINDS]
    assert len([sentence for sentence in explained.sentences if " of that: " in sentence]) == len(shares) - 1


@pytest.mark.parametrize("neutral_batch", [None, 4, 16])
def test_the_best_is_the_first_that_a_search_finds(found, neutral_batch):
    ordered = sorted(found.fitting, key=lambda each: -each.compute_throughput(neutral_batch))
    explained = explain(found.fitting, found.refused, neutral_batch=neutral_batch)
    assert explained.best.best is ordered[0]
    assert explained.best.share == 1
    other = explained.get_verdict("data")
    assert other.share == pytest.approx(
        other.best.compute_throughput(neutral_batch) / ordered[0].compute_throughput(neutral_batch)
    )


def test_by_memory_the_leanest_of_each_kind_is_compared(found):
    explained = explain(found.fitting, found.refused, by="memory")
    least = min(found.fitting, key=lambda each: each.peak_bytes)
    assert explained.best.best.peak_bytes == least.peak_bytes
    assert explained.best.share == 1
    data = explained.get_verdict("data")
    leanest = min(each.peak_bytes for each in found.fitting if classify_plan(each.plan) == "data")
    assert data.best.peak_bytes == leanest
    assert data.share == pytest.approx(least.peak_bytes / leanest)
    assert explained.sentences[0].startswith("What needs least memory for 4 ranks, as predicted, is ")
    (line,) = (sentence for sentence in explained.sentences if sentence.startswith("Pure data parallelism"))
    assert f" needs {format_number(leanest / least.peak_bytes)} times as much: " in line


@pytest.mark.nightly
def test_what_does_not_fit_says_how_much_it_needs_of_how_much(traces):
    lean = [replace(plan, checkpoint_activations=True) for plan in generate_plans(4, 4)]
    everything = search(4, 4, traces.get_graph, FLAT, asked=lean)
    data = next(each for each in everything.fitting if classify_plan(each.plan) == "data")
    limit = data.peak_bytes - 1
    found = search(4, 4, traces.get_graph, FLAT, rank_bytes=limit)
    explained = explain((*found.fitting, *found.too_large), found.refused, limit)
    verdict = explained.get_verdict("data")
    assert not verdict.fits
    assert verdict.best.plan == data.plan
    needed = f"it needs {format_bytes(data.peak_bytes)} of {format_bytes(limit)}."  # with recomputed activations or not
    assert f"Pure data parallelism does not fit: {needed}" in explained.sentences
    assert explained.sentences.index(f"Pure data parallelism does not fit: {needed}") >= 1
    assert explained.best.fits
    assert explained._repr_html_().count("<li>") == len(explained.sentences)


def test_where_nothing_fits_there_is_no_best(traces):
    plan = Plan(split_size=1, spatial_size=0)
    explained = explain([forecast(traces.get_graph(plan), plan, FLAT)], rank_bytes=10)
    assert explained.best is None
    assert explained.sentences[0].startswith("Pure data parallelism does not fit: it needs ")


def test_a_kind_that_cannot_run_says_why():
    plan = Plan(split_size=40, spatial_size=0)
    explained = explain([], [(plan, "The model has only 5 layers.")])
    assert explained.words == "Layer parallelism cannot run: The model has only 5 layers."
    assert explained.ranks == 40


@pytest.mark.nightly
def test_the_parts_of_the_time_are_all_of_it(found):
    for each in found.fitting:
        shares = compute_time_shares(each.timeline)
        assert tuple(shares) == SHARES
        assert sum(shares.values()) == pytest.approx(1)
        uses = each.timeline.time_shares.values()
        assert shares["compute"] == pytest.approx(sum(use.work for use in uses) / len(uses))
    one = next(each for each in found.fitting if classify_plan(each.plan) == "layer")
    assert compute_time_shares(one.timeline)["waiting for messages"] > 0.3  # stages that wait for each other
