"""Labels in the bars of a timeline, where there is room for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes

from engines.program.timeline import Timeline
from mpi4dl_nb.draw.figure import CASING, INK, write_first_fit

__all__ = ["label_rows"]

LETTERS = {"forward": "F", "weights": "W"}  # else B, as in the charts of schedules
SMALL_ROW_PX = 40  # lower rows have no room for texts in their halves
ROOM_PX = 6  # margin of a text
LEAST = 0.02  # fraction of the step; smaller bubbles are not labelled


def label_rows(axes: Axes, timeline: Timeline) -> None:
    """Label work with its pass and micro-batch, and larger bubbles with their share of the step.

    The layout of the figure must be final, since widths on the screen decide what fits.
    """
    if axes.bbox.height / len(timeline.ranks) < SMALL_ROW_PX:
        return
    for row, rank in enumerate(timeline.ranks):
        # Consecutive work on one micro-batch in one pass has one label.
        mine = [event for event in timeline.events if event.rank == rank and event.kind == "compute"]
        mine.sort(key=lambda event: event.start_s)
        for name, events in groupby(mine, lambda event: f"{LETTERS.get(event.phase, 'B')}{event.micro_batch}"):
            run = list(events)
            span = run[0].start_s - timeline.start_s, run[-1].end_s - timeline.start_s
            _label_span(axes, [name], span, row - 0.22)
        # Work is in the upper half of a row. A bubble is labelled in the lower half, where waiting is drawn.
        for span in timeline.find_bubbles(rank):
            share = (span[1] - span[0]) / timeline.seconds
            if share >= LEAST:
                _label_span(axes, [f"waits {share:.0%}", f"{share:.0%}"], span, row + 0.22)


def _label_span(axes: Axes, forms: Sequence[str], span_s: tuple[float, float], height: float) -> None:
    """Write the first of `forms` that fits into the visible part of a span of seconds, in its middle."""
    low, high = axes.get_xlim()
    start, end = max(span_s[0] * 1e3, low), min(span_s[1] * 1e3, high)
    room_px = axes.bbox.width * (end - start) / (high - low) - ROOM_PX
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "path_effects": CASING, "zorder": 10}
    write_first_fit(axes, (start + end) / 2, height, forms, room_px, **style)
