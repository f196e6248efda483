"""The chart of a schedule holds every slot where and as long as it is, and says the same in words."""

from __future__ import annotations

from collections import defaultdict

import pytest
from legible import find_unreadable, read

import mpi4dl_nb
from mpi4dl_nb.draw.timeline import SLOTS, show_schedule
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan.make_schedule import make_schedule
from mpi4dl_nb.engines.plan.schedule import ActionKind, Batch, Schedule


def make_line(ranks: int, per_rank: int = 1) -> list[tuple[int, ...]]:
    return [(stage % ranks,) for stage in range(ranks * per_rank)]


def make_numbers(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


GEMS = make_schedule("gems", [[(0, 1), (2,)], [(2, 1), (0,)]], [Batch(0, (0, 1)), Batch(1, (2, 3))])
SPLIT = make_schedule(
    "zero_bubble", [make_line(3), make_line(3)[::-1]], [Batch(0, make_numbers(0, 4)), Batch(1, make_numbers(4, 4))]
)
LOOPED = make_schedule("interleaved", [make_line(2, 2)], [Batch(0, make_numbers(0, 4))])
LONG = make_schedule("1f1b", [make_line(20)], [Batch(0, make_numbers(0, 40))])


def read_bars(figure) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Starts and stops by rank and the legend's name."""
    drawn = defaultdict(list)
    for patch in figure.axes[0].patches:
        for corners in patch.get_path().vertices.reshape(-1, 5, 2):
            (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
            drawn[round((y0 + y1) / 2), patch.get_label()].append((x0, x1))
    return drawn


@pytest.mark.nightly
@pytest.mark.parametrize("made", [GEMS, SPLIT, LOOPED, LONG], ids=lambda made: made.name)
def test_every_slot_is_drawn_where_it_is(made: Schedule):
    expected = defaultdict(list)
    for rank, lane in enumerate(made.lanes):
        for slot in lane:
            look = SLOTS[slot.work.kind, slot.work.direction == 1]
            expected[rank, look.name].append((slot.start, slot.stop))
    assert read_bars(show_schedule(made)) == expected


def read_texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_what_stands_in_the_bars_is_what_stands_in_the_picture():
    expected = [GEMS.format_action(work) for rank in range(GEMS.ranks) for work in GEMS.get_actions(rank)]
    assert read_texts(show_schedule(GEMS)) == expected
    assert {"F0", "B1", "f2", "b3"} <= set(expected)


def test_names_give_way_to_numbers_and_numbers_to_nothing():
    assert read_texts(show_schedule(SPLIT))[:3] == ["F0", "F1", "F2"]
    longer = make_schedule("interleaved", [make_line(4, 2)], [Batch(0, make_numbers(0, 8))])
    assert read_texts(show_schedule(longer))[:4] == ["0", "1", "2", "3"]
    assert read_texts(show_schedule(LONG)) == []


def test_the_alt_text_has_the_numbers():
    assert show_schedule(GEMS).alt == (
        "gems on 3 ranks: 18 forwards long, idle 33%. "
        "rank 0, stages 0 and mirrored 1: idle 33%, holds up to 2; "
        "rank 1, stages 0 and mirrored 0: idle 33%, holds up to 2; "
        "rank 2, stages 1 and mirrored 0: idle 33%, holds up to 2."
    )
    assert "rank 1, stages 1, 3: idle 11%, holds up to 3." in show_schedule(LOOPED).alt


def test_the_rows_say_it_too():
    shown = read(show_schedule(GEMS))
    assert "rank 2 stages 1 and mirrored 0" in shown
    assert "idle 33% holds up to 2" in shown
    assert "backward, mirrored" in shown


def test_a_part_of_the_ranks_may_idle_more():
    made = make_schedule("1f1b", [make_line(2), [(1,)]], [Batch(0, (0,)), Batch(1, (1,))])
    assert [made.compute_idle_share(rank) for rank in (0, 1)] == [0.5, 0.0]
    assert made.idle_share == 0.25


def test_kinds_differ_in_colour_and_in_hatch():
    assert len({each.colour for each in SLOTS.values()}) == len({each.hatch for each in SLOTS.values()}) == len(SLOTS)
    assert len(SLOTS) == 2 * len(ActionKind)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", [GEMS, SPLIT, LOOPED, LONG], ids=lambda made: made.name)
def test_no_text_lies_on_another(made):
    assert find_unreadable(show_schedule(made)) == []


def test_no_work_is_no_drawing():
    with pytest.raises(PlanError, match="holds no work"):
        show_schedule(make_schedule("1f1b", [make_line(2)], []))


def test_a_notebook_has_it():
    assert mpi4dl_nb.show_schedule is show_schedule
