"""Published results as rows: all there, with what was assumed, and their numbers by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mpi4dl_nb.engines.cli.command import format_outcomes, run_published
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.published import PUBLISHED
from mpi4dl_nb.engines.predict.published_replay import MEASURES, PublishedReplay, ReplayOutcome, RunResult

ROWS = {row.name: row for row in PUBLISHED}
HALF_AS_FAST = RunResult(images_per_s=50.0, ranks=2, peak_bytes=3 << 30, work=0.5, messages=0.1, waiting=0.4)
FAST = RunResult(images_per_s=100.0, ranks=8, peak_bytes=5 << 30, work=0.5, messages=0.1, waiting=0.4)


def test_every_claim_has_a_row():
    assert sorted(row.published for row in PUBLISHED) == [1.47, 1.476, 1.68, 2.26, 2.67, 3.0, 94.5, 97.32, 260_000]
    assert len(ROWS) == len(PUBLISHED)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_was_assumed_and_where_its_claim_is_from(name):
    row = ROWS[name]
    assert row.assumed
    assert all(row.assumed)
    assert row.source.startswith(("A. Jain", "Jain et al."))
    assert row.measure in MEASURES
    assert row.run.machine in MACHINES
    assert (row.against is None) == (row.measure in ("s per epoch", "images/s"))
    if row.against:
        assert row.run.machine == row.against.machine, "one machine for both"
    assert not any(name in ("speeds", "least_s") for variant in row.variants for name in variant.changes)


def test_the_ranks_are_those_that_were_published():
    counts = {name: row.run.plan.ranks for name, row in ROWS.items()}
    assert counts["hy-fi/layers"] == counts["hy-fi/pipeline"] == counts["hy-fi/scaling"] == 2048
    assert counts["gems/resnet-1k"] == 1024
    assert counts["resnet-50/summit"] == 1536
    assert counts["resnet-50/frontera"] == 2048 * MACHINES["Frontera"].node_ranks
    same = ("hy-fi/layers", "hy-fi/pipeline", "amoebanet/8192", "amoebanet/16384")
    assert all(ROWS[name].against.plan.ranks == counts[name] for name in same), "speedups are on the same GPUs"


def test_measures_by_hand():
    found = {name: measure(FAST, HALF_AS_FAST) for name, measure in MEASURES.items()}
    assert found == {"times as fast": 2.0, "% of linear": 50.0, "s per epoch": 12_811.67, "images/s": 100.0}


def make_outcome(simulated: float, memory_bytes: int = 16 << 30) -> ReplayOutcome:
    return ReplayOutcome(replace(ROWS["hy-fi/layers"], why=""), simulated, FAST, HALF_AS_FAST, memory_bytes, ())


def test_ratio_and_agreement_by_hand():
    assert make_outcome(2.67 * 1.5).ratio == pytest.approx(1.5)
    assert [make_outcome(2.67 * ratio).agrees for ratio in (0.79, 0.81, 1.19, 1.21)] == [False, True, True, False]
    assert "not known" in format_outcomes([make_outcome(1.0)])
    assert "not known" not in format_outcomes([make_outcome(2.67)])


def test_a_row_that_does_not_fit_says_so():
    assert make_outcome(2.67).line["fits"]
    assert not make_outcome(2.67, memory_bytes=4 << 30).line["fits"]
    assert "does not fit the 4.0 GB" in format_outcomes([make_outcome(2.67, memory_bytes=4 << 30)])


@pytest.mark.nightly
def test_the_command_prints_what_the_simulator_says(capsys):
    pytest.importorskip("monai")
    run_published(["--only", "resnet-50/summit"])
    first, *shown = capsys.readouterr().out.splitlines()
    line = json.loads(first)
    row = ROWS["resnet-50/summit"]
    found = PublishedReplay().forecast_run(row.run)
    assert line["images_per_s"][0] == round(found.images_per_s, 3)
    assert line["simulated"] == round(1_281_167 / found.images_per_s, 3)
    assert line["ratio"] == pytest.approx(line["simulated"] / 3, abs=1e-3)
    assert line["assumed"] == list(row.assumed)
    assert [variant["words"] for variant in line["variants"]] == [variant.words for variant in row.variants]
    assert "resnet-50/summit" in shown[1]
    assert f"{1_281_167 / found.images_per_s:.5g}" in shown[1]


@pytest.mark.nightly
def test_data_parallel_replicas_wait_for_each_other_little(capsys):
    """1536 times one GPU, less what the sums of gradients cost."""
    pytest.importorskip("monai")
    run = ROWS["resnet-50/summit"].run
    replay = PublishedReplay()
    all_of_them, one = (
        replay.forecast_run(run),
        replay.forecast_run(replace(run, plan=replace(run.plan, data_parallel=1))),
    )
    assert 0.9 * 1536 * one.images_per_s < all_of_them.images_per_s <= 1536 * one.images_per_s


def test_an_unknown_row_is_refused_with_those_there_are():
    with pytest.raises(PlanError, match="hy-fi/layers"):
        run_published(["--only", "alexnet"])
