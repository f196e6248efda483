"""Texts on a picture: legible on any colour, inside the tile that they describe, and without overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from engines.spatial.tiles import Tile
from mpi4dl_nb.draw.figure import INK

__all__ = ["TileLabels", "draw_first_fit", "draw_label", "get_screen_box", "get_text_box"]

TileLabels = Mapping[int, Text]
"""One text per rank, within that rank's tile."""

PAD_PX = 4  # of the screen, around a text: its white box


def draw_label(axes: Axes, x: float, y: float, text: str, **style: Any) -> Text:
    """Draw dark text in a white box centred at (x, y)."""
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#888888", "linewidth": 0.6}
    settings = {"ha": "center", "va": "center", "fontsize": 8.5, "color": INK, "zorder": 10, "bbox": box}
    return axes.text(x, y, text, **(settings | style))


def draw_first_fit(
    axes: Axes, tiles: Mapping[int, Tile], forms: Sequence[Callable[[], TileLabels]], avoid: Sequence[Bbox] = ()
) -> TileLabels:
    """Label the tiles with the first of `forms` that fits, and return the labels; an empty mapping if none fits.

    `avoid` are boxes on the screen that stay free, in addition to existing texts. The layout of the figure must be
    final.
    """
    # Texts have sizes in points and tiles have sizes in data units: only boxes on the screen can be compared. A form is
    # drawn, measured and, if a single label does not fit, removed again, as all tiles have labels of the same form.
    taken = [*avoid, *(get_text_box(text) for text in axes.texts if text.get_text())]
    for form in forms:
        lettered = form()
        boxes = {rank: get_text_box(text) for rank, text in lettered.items()}
        inside = all(
            get_screen_box(axes, tiles[rank]).fully_contains(*corner)
            for rank, box in boxes.items()
            for corner in (box.min, box.max)
        )
        pairs = combinations([*boxes.values(), *taken], 2)
        if inside and not any(one.overlaps(other) for one, other in pairs):
            return lettered
        for text in lettered.values():
            text.remove()
    return {}


def get_screen_box(axes: Axes, tile: Tile) -> Bbox:
    """Return the box on the screen of a rectangle in data coordinates."""
    corners = [(tile.cols.start, tile.rows.stop), (tile.cols.stop, tile.rows.start)]
    return Bbox(axes.transData.transform(corners))


def get_text_box(text: Text) -> Bbox:
    """Return the box of a text on the screen, with its white box."""
    return text.get_window_extent().padded(PAD_PX)
