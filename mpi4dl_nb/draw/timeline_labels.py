"""Labels in the bars of a timeline, where there is room for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from matplotlib.axes import Axes

from engines.program.timeline import Timeline, TimelineEvent
from mpi4dl_nb.draw.figure import CASING, INK

__all__ = ["label_rows"]

PASSES = {"forward": "F", "weights": "W"}  # else B, as in the charts of schedules
SMALL_ROW_PX = 40  # lower rows have no room for texts in their halves
ROOM_PX, LETTER_PX = 6, 7  # margin of a text, and width of a character
LEAST = 0.02  # fraction of the step; smaller bubbles are not labelled

Interval = tuple[float, float]


def label_rows(axes: Axes, timeline: Timeline) -> None:
    """Label work with its pass and micro-batch, and larger bubbles with their share of the step.

    The layout of the figure must be final, since widths on the screen decide what fits.
    """
    if axes.bbox.height / len(timeline.ranks) < SMALL_ROW_PX:
        return
    for row, rank in enumerate(timeline.ranks):
        for text, span in _find_passes(timeline, rank):
            _draw_first_fit(axes, [text], span, row - 0.22)
        for start_s, end_s in timeline.find_bubbles(rank):
            share = (end_s - start_s) / timeline.seconds
            if share >= LEAST:
                _draw_first_fit(axes, [f"waits {share:.0%}", f"{share:.0%}"], (start_s * 1e3, end_s * 1e3), row + 0.22)


def _find_passes(timeline: Timeline, rank: int) -> Iterator[tuple[str, Interval]]:
    """Yield the name and the interval (ms in the step) of each run of work on one micro-batch in one pass."""
    mine = [event for event in timeline.events if event.rank == rank and event.kind == "compute"]
    for name, events in groupby(sorted(mine, key=lambda event: event.start_s), key=_format_name):
        stretch = list(events)
        start_s, end_s = stretch[0].start_s - timeline.start_s, stretch[-1].end_s - timeline.start_s
        yield name, (start_s * 1e3, end_s * 1e3)


def _format_name(event: TimelineEvent) -> str:
    return f"{PASSES.get(event.phase, 'B')}{event.micro_batch}"


def _draw_first_fit(axes: Axes, forms: Sequence[str], span: Interval, height: float) -> None:
    """Write the first of `forms` that fits into the visible part of the span, in its middle."""
    low, high = axes.get_xlim()
    start, end = max(span[0], low), min(span[1], high)
    room_px = axes.bbox.width * (end - start) / (high - low) - ROOM_PX
    for text in forms:
        if len(text) * LETTER_PX <= room_px:
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "path_effects": CASING}
            axes.text((start + end) / 2, height, text, **style, zorder=10)
            return
