"""The figure of replicas that do not wait has the studies' own numbers."""

from __future__ import annotations

import pytest
from legible import find_unreadable, read

from mpi4dl_nb import show_asynchrony
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, ReplicaStep, ReplicaStudy


def make_study(mode: str, staleness: tuple[int, ...], losses: tuple[float, ...]) -> ReplicaStudy:
    turns = tuple(ReplicaStep(n % 3, n, loss, 0.5 * n + 0.5) for n, loss in enumerate(losses))
    return ReplicaStudy(Asynchrony(mode=mode, replicas=3, slow={2: 0.25}), 8, turns, staleness, (), ())


STUDIES = (
    make_study("synchronous", (0,) * 10, (2.0, 1.5, 1.0, 0.5, 0.25)),
    make_study("server", (0, 1, 1, 2, 2, 2, 14), (2.0, 90.0, 0.5, 0.4, 0.3)),
    make_study("peers", (1, 1, 3), (2.0, 1.0, 0.5, 0.25, 0.125)),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shown", [STUDIES, STUDIES[:2], STUDIES[2], STUDIES[1]], ids=["all", "two", "one", "server"])
def test_it_is_legible(shown: ReplicaStudy | tuple[ReplicaStudy, ...]) -> None:
    assert find_unreadable(show_asynchrony(shown)) == []


def test_it_says_what_was_seen() -> None:
    figure = show_asynchrony(STUDIES)
    told = figure.alt
    assert "3 replicas, 8 images in each batch; replica 2 sleeps 0.25 s in each step" in read(figure)
    assert "Server: loss 2 at first, 0.3 at last, after 2.50 s and 40 images (16.0 images/s)" in told
    assert "staleness (how often): 0 (1), 1 (2), 2 (3), 14 (1)" in told


def test_bars_are_as_high_as_staleness_is_often() -> None:
    bars = show_asynchrony(STUDIES).axes[2].patches
    assert [bar.get_height() for bar in bars] == [10, 1, 2, 3, 1, 2, 1]


@pytest.mark.parametrize("shown", [(), (STUDIES[0], STUDIES[0])], ids=["none", "twice"])
def test_one_study_of_each_mode(shown: tuple[ReplicaStudy, ...]) -> None:
    with pytest.raises(PlanError, match="Give one study, or one of each mode"):
        show_asynchrony(shown)
