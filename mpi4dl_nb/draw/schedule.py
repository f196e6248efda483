"""Chart of a pipeline schedule: the order of micro-batches on each rank, and the idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from engines.errors import PlanError
from engines.program.schedule import ActionKind, PipelineAction, Schedule
from mpi4dl_nb.draw.figure import (
    CASING,
    INK,
    BarStyle,
    Box,
    Drawing,
    draw_boxes,
    draw_legend,
    draw_row_frame,
    get_row_layout,
    write_first_fit,
)

__all__ = ["draw_slots", "label_slots", "show_schedule"]

HINT = "in a bar: its micro-batch; white: idle; held: forwards that have not gone all the way back"
TOP, HIGH = -0.4, 0.8  # upper edge, relative to the middle of the row, and height of a bar
ROOM_PX = 6  # for the outline of a text
LOOKS = {
    (ActionKind.FORWARD, False): BarStyle("forward", "#56b4e9", ""),
    (ActionKind.BACKWARD, False): BarStyle("backward", "#e69f00", "//"),
    (ActionKind.WEIGHTS, False): BarStyle("weights' gradient", "#bfbfbf", "++"),
    (ActionKind.FORWARD, True): BarStyle("forward, mirrored", "#009e73", "..."),
    (ActionKind.BACKWARD, True): BarStyle("backward, mirrored", "#cc79a7", "\\\\"),
    (ActionKind.WEIGHTS, True): BarStyle("weights' gradient, mirrored", "#f0e442", "xx"),
}


def show_schedule(schedule: Schedule) -> Drawing:
    """Draw a row of bars per rank over time, in units of one forward; white is idle.

    Where there is room, a bar is labelled with its work (`schedule.format_action`), or its micro-batch alone. A row is
    labelled with the rank's stages, its idle share, and the most forwards that it holds (`schedule.count_in_flight`).
    Raises PlanError if there is no work.

    >>> from engines.program.make_schedule import Batch, make_schedule
    >>> from mpi4dl_nb import show_schedule
    >>> made = make_schedule("1f1b", [[(0,), (1,)]], [Batch(0, (0, 1, 2))])
    >>> figure = show_schedule(made)
    """
    if not schedule.length:
        raise PlanError("The schedule holds no work: make it of at least one batch with a micro-batch.")
    row_in, end = get_row_layout(schedule.ranks)
    figure = Drawing(figsize=(11, 1.6 + row_in * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    length = f"{schedule.length} forwards long, idle {schedule.idle_share:.0%}"
    title = f"{schedule.name} on {schedule.ranks} ranks: {length}"
    axes.set_title(f"{title}\n{HINT}", loc="left", fontsize=10)
    draw_legend(figure, draw_slots(axes, schedule))
    left, right = [], []
    for rank in range(schedule.ranks):
        # The stages, such as `stages 0, 2 and mirrored 1`.
        actions = schedule.get_actions(rank)
        stages = [sorted({work.stage for work in actions if work.direction == way}) for way in (0, 1)]
        words = [f"{word}{', '.join(map(str, of))}" for word, of in zip(("", "mirrored "), stages, strict=True) if of]
        name = f"stage{'s' * (sum(map(len, stages)) > 1)} {' and '.join(words)}" if words else "no work"
        left.append((f"rank {rank}", name))
        idle, held = f"idle {schedule.compute_idle_share(rank):.0%}", schedule.count_in_flight(rank)
        right.append((idle, f"holds up to {held}"))
    draw_row_frame(
        axes, schedule.length, "time, in forwards", *([end.join(each) for each in side] for side in (left, right))
    )
    figure.freeze_layout()  # the final width of a bar decides which text fits
    label_slots(axes, schedule)
    told = [f"{', '.join(who)}: {', '.join(numbers)}" for who, numbers in zip(left, right, strict=True)]
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure


def draw_slots(axes: Axes, schedule: Schedule) -> list[BarStyle]:
    """Draw every slot and return the styles that occur, in the order of the legend."""
    met: set[BarStyle] = set()
    for rank, lane in enumerate(schedule.lanes):
        bars: dict[BarStyle, list[Box]] = defaultdict(list)
        for slot in lane:
            look = LOOKS[slot.work.kind, slot.work.direction > 0]
            bars[look].append((slot.start, rank + TOP, slot.stop - slot.start, HIGH))
        for look, boxes in bars.items():
            draw_boxes(axes, boxes, **look.patch | {"linewidth": 0, "label": look.name})
        # Slots of one style are one patch without an outline. A line at each start separates those that touch.
        axes.vlines([slot.start for slot in lane], rank + TOP, rank + TOP + HIGH, color=INK, linewidth=0.6)
        met.update(bars)
    return [look for look in LOOKS.values() if look in met]


def label_slots(axes: Axes, schedule: Schedule) -> None:
    """Label all bars with their work, or their micro-batch, or not at all: the longest form that fits every bar."""
    slots = [(rank, slot) for rank, lane in enumerate(schedule.lanes) for slot in lane]
    unit_px = axes.bbox.width / schedule.length
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "path_effects": CASING}
    forms: tuple[Callable[[PipelineAction], str], ...] = (schedule.format_action, lambda work: str(work.micro_batch))
    for form in forms:
        # Only the text with most characters per unit of time is measured, as it decides for all.
        rank, slot = max(slots, key=lambda each: len(form(each[1].work)) / (each[1].stop - each[1].start))
        room_px = unit_px * (slot.stop - slot.start) - ROOM_PX
        if widest := write_first_fit(axes, slot.start, rank, [form(slot.work)], room_px, **style):
            widest.remove()
            for rank, slot in slots:
                axes.text((slot.start + slot.stop) / 2, rank, form(slot.work), **style)
            return
