"""The loads of the ranks as rows of bars: weights, activations kept for backward, and bytes sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten

from matplotlib.axes import Axes

from engines.formatting import format_bytes, format_seconds
from engines.predict.rank_load import RankLoad
from mpi4dl_nb.draw.bars import BarStyle
from mpi4dl_nb.draw.figure import INK, format_ranks
from mpi4dl_nb.draw.sheet import Box, draw_boxes, write

__all__ = [
    "COUNTING",
    "NOT_COUNTED",
    "RanksByLoad",
    "compute_height",
    "describe_loads",
    "draw_loads",
    "group_loads",
]

RanksByLoad = Mapping[RankLoad, tuple[int, ...]]
"""Ranks grouped by equal load."""

NAMES_LEFT_IN, ROW_IN, BAR_IN = 0.15, 0.27, 0.18
MOST_ROWS, MOST_LETTERS = 16, 22
COUNTING, NOT_COUNTED = "counting ...", "not counted"
LOOKS = (
    BarStyle("weights and buffers", "#56b4e9", ""),
    BarStyle("activations kept for backward", "#e69f00", "//"),
    BarStyle("sent in a training step", "#009e73", "xx"),
    BarStyle("own work in a step, predicted", "#bfbfbf", "\\\\"),
)
PLACES = {3: ((1.75, 1.1), (4.2, 1.1), (7.6, 1.2)), 4: ((1.6, 0.6), (3.25, 0.6), (5.9, 0.6), (8.45, 0.6))}
"""By number of columns: the left edge of each column's bars, and the length of its longest bar, in inches."""


def group_loads(loads: Sequence[RankLoad]) -> RanksByLoad:
    """Group ranks of equal load. `loads` holds the load of each rank, in rank order."""
    groups: dict[RankLoad, tuple[int, ...]] = {}
    for rank, load in enumerate(loads):
        groups[load] = (*groups.get(load, ()), rank)
    return groups


def compute_height(loads: RanksByLoad) -> float:
    """Return the height of the rows in inches."""
    rows = min(len(loads), MOST_ROWS) + (len(loads) > MOST_ROWS)
    return ROW_IN * (rows + 1) if rows else 0.0


def draw_loads(axes: Axes, loads: RanksByLoad, top: float, missing: str) -> None:
    """Draw a row per group of equal load: three bars, or four with times, each with its number or `missing`."""
    #             weights and buffers   activations kept     sent in a training step
    #    rank 0   [====] 486.6 KB       [//] 3.2 MB          [xxx] 182 messages, 1.1 MB
    #    ranks 1, 2 ...
    # Each column has a scale of its own: its longest bar is the largest number in it.
    groups = list(loads.items())
    columns = 4 if any(load.busy_s is not None for load in loads) else 3
    for column, (look, (left, longest)) in enumerate(zip(LOOKS, PLACES[columns], strict=False) if groups else ()):
        write(axes, left, top, look.name, 9, weight="bold")
        largest = max(_get_sizes(load)[column] for load in loads) or 1
        boxes: list[Box] = []
        for row, (load, _) in enumerate(groups[:MOST_ROWS]):
            length = longest * _get_sizes(load)[column] / largest
            boxes.append((left, _compute_middle(top, row) - BAR_IN / 2, length, BAR_IN))
            write(axes, left + length + 0.07, _compute_middle(top, row), _format_values(load, missing)[column], 9)
        draw_boxes(axes, boxes, facecolor=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0)
    for row, (_, ranks) in enumerate(groups[:MOST_ROWS]):
        name = shorten(format_ranks(ranks), MOST_LETTERS, placeholder=" ...")
        write(axes, NAMES_LEFT_IN, _compute_middle(top, row), name, 9)
    if rest := sum(len(ranks) for _, ranks in groups[MOST_ROWS:]):
        write(axes, NAMES_LEFT_IN, _compute_middle(top, MOST_ROWS), f"... and {rest} more ranks", 9)


def describe_loads(loads: RanksByLoad, missing: str) -> Iterable[str]:
    """Yield a description of each row."""
    for load, ranks in loads.items():
        parts = zip((look.name for look in LOOKS), _format_values(load, missing), strict=False)
        yield f"{format_ranks(ranks)}: {', '.join(f'{name} {said}' for name, said in parts)}"


def _compute_middle(top: float, row: int) -> float:
    return top + ROW_IN * (row + 1)


def _get_sizes(load: RankLoad) -> tuple[float, ...]:
    return load.weight_bytes, load.kept_bytes or 0, load.sent.bytes, load.busy_s or 0.0


def _format_values(load: RankLoad, missing: str) -> tuple[str, ...]:
    kept = missing
    if load.kept_bytes is not None and load.peak_bytes is not None:
        kept = f"{format_bytes(load.kept_bytes)} ({format_bytes(load.peak_bytes)} in all)"
    sent = f"{load.sent.messages:,} messages, {format_bytes(load.sent.bytes)}" if load.sent.messages else "nothing"
    texts = (format_bytes(load.weight_bytes), kept, sent)
    if load.busy_s is None or load.wait_s is None:
        return texts
    return (*texts, f"{format_seconds(load.busy_s, 2)}, waits {format_seconds(load.wait_s, 2)}")
