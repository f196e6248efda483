"""The chaos itself: the same seed draws the same faults, and its judge finds what is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mpi4dl_nb.cluster.cluster import Cluster
from tests.chaos.faults import FAULTS, Fault, draw
from tests.chaos.training import PLAN, make_batches
from tests.chaos.trial import HANG_AFTER_S, Trial, Verdict


def test_a_seed_draws_the_same_faults_and_any_fault_is_drawn(tmp_path: Path):
    first, again = (
        [draw(dice, 5, tmp_path / "note") for _ in range(20 * len(FAULTS))]
        for dice in (random.Random(3), random.Random(3))
    )
    assert first == again
    assert {(each.kind, each.whom, each.when) for each in first} == set(FAULTS)
    assert all(each.rank not in each.others for each in first)
    (only,) = {str(draw(random.Random(seed), 1, tmp_path / "note", ["kill:rank:step"])) for seed in range(9)}
    assert only == "kill of rank 0 in step"


@pytest.mark.parametrize(
    ("kind", "after_s", "late"), [("kill", 0.9, False), ("kill", 1.1, True), ("stop", 4.9, False), ("stop", 5.1, True)]
)
def test_what_is_reported_too_late_is_late(tmp_path: Path, kind: str, after_s: float, late: bool):
    fault = Fault(kind, "rank", "step", 1, 0, 0.0, tmp_path / "note")
    fault.note.write_text("100.0")
    verdict = Verdict(fault)
    verdict.tell("Rank 1", 100 + after_s)
    verdict.tell("Rank 1 again", 200.0)
    assert verdict.told_s == pytest.approx(after_s)
    assert verdict.is_late == late


def test_where_the_ranks_are_asked_nothing_for_a_while_it_counts_from_the_next_call(tmp_path: Path):
    fault = Fault("stop", "mpiexec", "calibrate", 1, 0, 0.0, tmp_path / "note")
    fault.note.write_text("100.0")
    for asked_s, late in ((99.0, True), (106.0, True), (108.0, False)):
        verdict = Verdict(fault, asked_s=asked_s)
        verdict.tell("mpiexec", 111.6)
        assert verdict.told_s == pytest.approx(111.6 - max(100.0, asked_s))
        assert verdict.is_late == late


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    with Cluster(PLAN.ranks, hang_after_s=HANG_AFTER_S) as cluster:
        found = Trial(cluster, tmp_path_factory.mktemp("saved"))
        yield found
        found.close()


FEW = [
    "raise:rank:step", "raise:rank:reader", "raise:rank:load", "raise:rank:calibrate", "raise:ranks:save",
    "disk:rank:save", "interrupt:notebook:step",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FEW)
def test_a_fault_is_reported_and_nothing_is_wrong(trial: Trial, tmp_path: Path, fault: str):
    verdict = trial.round(draw(random.Random(1), PLAN.ranks, tmp_path / "note", [fault]))
    assert verdict.happened
    assert verdict.told_s is not None
    assert verdict.wrong == []


@pytest.mark.nightly
def test_what_is_wrong_is_found(trial: Trial, tmp_path: Path):
    """Another rank is named, and other weights come out."""
    fault = draw(random.Random(1), PLAN.ranks, tmp_path / "note", ["raise:rank:step"])
    fault.note.write_text("100.0")
    other = Verdict(fault, told_s=0.1, texts=["Rank 9: ValueError"])
    trial.reference.step(*make_batches(1, seed=0)[0])
    trial._check_round(other)
    assert other.wrong[0].startswith("told of others: Rank 9")
    assert any(text.startswith("other weights") for text in other.wrong)
    assert any("steps instead of" in text for text in other.wrong)
