"""The picture of a training tells what the ranks told, and can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from legible import find_unreadable, read

from mpi4dl_nb.draw.monitor import (
    COMMUNICATES,
    MEMORY,
    OTHER,
    POINTS,
    WAITS,
    WORKS,
    format_progress_html,
    format_tables_html,
    show_progress,
)
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import TimelineEvent
from mpi4dl_nb.engines.train.history import Progress
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.training_events import Counts, EpochResult, Scores, StepResult


def report(rank: int, work_s: float, halo_s: float, wait_s: float) -> StepReport:
    work = TimelineEvent(rank, "a", "compute", "forward", 0, 0.0, work_s, 0)
    halo = TimelineEvent(rank, "b", "halo", "forward", 0, work_s, work_s + halo_s + wait_s, 0, wait_s)
    return StepReport({0: 1.0}, (work, halo), (rank + 1) << 28)


PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2")
REPORTS = [report(0, 0.5, 0.3, 0.2), report(1, 0.25, 0.25, 0.5), report(2, 0.9, 0.02, 0.08)]
LAST = StepResult(1, 2, 4, 1.5, 0.25, Counts((1, 2), (2, 2), (2, 2)), 0.5)
EPOCH = EpochResult(0, 3, 12, 3.0, 1.0, 0.75, Counts(), held_out=Scores(0.5, Counts()))
LOSSES, SPEEDS = (2.0, 1.0, 0.5, 0.4, 0.3, 0.25), (4.0, 5.0, 6.0, 6.0, 6.0, 2.5)
RUNNING = Progress(PLAN, "running", True, 12, LOSSES, SPEEDS, LAST, (EPOCH,), (3,), REPORTS, 75.0, 3725.0, 2)


def read_time_shares(figure) -> dict[str, list[float]]:
    """Each look's bars of the time: start and end, rank by rank."""
    found = {}
    for bars in figure.axes[2].containers:
        found[bars.get_label()] = [place for bar in bars for place in (bar.get_x(), bar.get_x() + bar.get_width())]
    return found


def test_bars_are_as_long_as_what_they_tell():
    found = read_time_shares(show_progress(RUNNING))
    assert found[WORKS.name] == pytest.approx([0, 0.5, 0, 0.25, 0, 0.9])
    assert found[COMMUNICATES.name] == pytest.approx([0.5, 0.8, 0.25, 0.5, 0.9, 0.92])
    assert found[WAITS.name] == pytest.approx([0.8, 1, 0.5, 1, 0.92, 1])
    assert [bar.get_width() for bar in show_progress(RUNNING).axes[3].patches] == pytest.approx([1 / 3, 2 / 3, 1])


def test_what_is_neither_work_nor_waiting_is_shown_too():
    idle = replace(RUNNING, reports=[report(0, 1.0, 0.0, 0.0), report(1, 0.25, 0.25, 0.25), report(2, 1.0, 0.0, 0.0)])
    assert read_time_shares(show_progress(idle))[OTHER.name] == pytest.approx([0.75, 1])
    assert "25%" in format_tables_html(idle)


def test_a_figure_says_which_step_it_is_of():
    assert "after step 6" in read(show_progress(RUNNING))


def test_looks_differ_without_colour():
    looks = (WORKS, COMMUNICATES, WAITS, MEMORY)
    assert len({look.hatch for look in looks}) == len({look.colour for look in looks}) == 4


def test_curves_are_the_numbers():
    loss, speed, *_ = show_progress(RUNNING).axes
    assert list(loss.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(loss.lines[0].get_ydata()) == list(RUNNING.losses)
    assert list(speed.lines[0].get_ydata()) == list(RUNNING.speeds)
    (held_out,) = [line for line in loss.lines if line.get_label() == "held out"]
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == ([3], [0.5])


def test_a_judgement_gone_wild_does_not_flatten_the_losses():
    wild = replace(EPOCH, held_out=Scores(1e28, Counts()))
    figure = show_progress(replace(RUNNING, epochs=(wild,)))
    assert figure.axes[0].get_ylim()[1] < 3
    assert "1e+28" in format_tables_html(replace(RUNNING, epochs=(wild,)))
    assert find_unreadable(figure) == []


def test_many_steps_are_means_of_neighbours():
    losses = tuple(range(10 * POINTS))
    line = show_progress(replace(RUNNING, losses=losses, speeds=losses, epochs=(), ends=())).axes[0].lines[0]
    assert len(line.get_xdata()) == POINTS
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (5.5, 4.5)
    assert line.get_ydata().mean() == pytest.approx(sum(losses) / len(losses))


def test_the_alt_text_has_the_numbers():
    assert show_progress(RUNNING).alt == (
        "A training, running: 6 of 12 steps done, loss from 2 to 0.25, 2.5 images per second in the last step. "
        "rank 0: stage 0, tile 0: works 50%, communicates 30%, waits 20%; "
        "rank 1: stage 0, tile 1: works 25%, communicates 25%, waits 50%; "
        "rank 2: stage 1, tile 0: works 90%, communicates 2%, waits 8%. "
        "memory of rank 0: 256.0 MB; memory of rank 1: 512.0 MB; memory of rank 2: 768.0 MB."
    )


def test_the_numbers_are_said_in_words():
    html = format_progress_html(RUNNING) + format_tables_html(RUNNING)
    step = ("<b>running</b>", "epoch 1, step 6 of 12", "loss 0.25", "2.50 images/s", "waiting for images 25%")
    times = ("1:15 so far", "about 1:02:05 left", "2 bad images left out", 'value="6" max="12"')
    for part in (*step, *times, "768.0 MB", "90%", ">0.75<"):
        assert part in html
    assert "dice" not in html, "it has none"


def test_ranks_that_are_threads_have_one_memory():
    threads = replace(RUNNING, one_process=True)
    assert show_progress(threads).alt.endswith("memory of all ranks: 256.0 MB.")
    assert format_tables_html(threads).count("256.0 MB") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 3, 16, 40])
def test_it_can_be_read(ranks: int):
    plan = Plan(split_size=1, slice_method=f"1x{ranks}")
    reports = [report(rank, 0.4, 0.3, 0.3) for rank in range(ranks)]
    assert find_unreadable(show_progress(replace(RUNNING, plan=plan, reports=reports))) == []
    assert find_unreadable(show_progress(Progress(plan))) == []


def test_before_the_first_step_it_says_so():
    figure = show_progress(Progress(PLAN, total=12))
    assert figure.alt == "A training, not begun: 0 of 12 steps done."
    assert "no step yet" in read(figure)
    assert "step 0 of 12" in format_progress_html(Progress(PLAN, total=12))
