"""What can be read on a figure, and whether it can be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def collect_texts(figure: Figure) -> list[Text]:
    """Every text that a person sees."""
    figure.draw_without_rendering()
    found = list(figure.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        found += _iterate_axes_texts(axes)
        for child in axes.child_axes:
            found += _iterate_axes_texts(child)
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def _iterate_axes_texts(axes: Axes) -> Iterator[Text]:
    yield from axes.texts
    yield from (axes.title, axes._left_title, axes._right_title)
    if axes.axison:
        for axis in (axes.xaxis, axes.yaxis):
            yield axis.label
            for tick in axis.get_major_ticks():
                low, high = sorted(axis.get_view_interval())
                if low <= tick.get_loc() <= high:
                    yield from (label for label in (tick.label1, tick.label2) if label.get_visible())


def read(figure: Figure) -> str:
    """All texts, each on one line."""
    return "\n".join(" ".join(text.get_text().split()) for text in collect_texts(figure))


def find_unreadable(figure: Figure) -> list[str]:
    """Pairs of texts that lie on each other, and texts beyond the figure's edge."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in collect_texts(figure)]
    clashes = [f"{a!r} on {b!r}" for (a, x), (b, y) in combinations(boxes, 2) if x.overlaps(y)]
    page = figure.bbox.padded(1)
    return clashes + [f"{name!r} leaves the figure" for name, box in boxes if not _is_within(box, page)]


def _is_within(box, page) -> bool:
    return page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
