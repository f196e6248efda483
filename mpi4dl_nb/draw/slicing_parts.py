"""Parts of the figures of tiles: their panels and words, the layer in a panel, and the legend."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from mpi4dl_nb.draw.figure import INK, Drawing, Style
from mpi4dl_nb.draw.halo_points import HaloPoint, choose_borrower
from mpi4dl_nb.draw.navigation import RasterCache
from mpi4dl_nb.draw.tilemap import (
    COMPUTED,
    FIELD,
    HALO,
    LOOKS,
    OTHER_HALO,
    draw_halo_arrows,
    draw_halos,
    draw_picture,
    draw_tiles,
    get_screen_box,
    label_tiles,
    tint_halo,
)
from mpi4dl_nb.engines.checks import is_integer
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.errors import PlanError

# Panels at computed positions, since the room of a panel on the screen decides how it is labelled.


Sides = Sequence[int] | tuple[float, float]
"""The height and the width of what a panel shows, of which only the ratio counts."""

WIDTH_IN, LEFT_IN, TOP_IN = 11.0, 0.75, 0.9
MAIN_IN, TALLEST_IN = 5.6, 7.6  # of the large panel
BESIDE_IN, SIDE_LEFT_IN, SIDE_IN = 7.0, 7.5, 2.7  # left edges of words and small panel; its longer side
BELOW_IN = 0.6  # below the large panel: ticks, label
UNDER_SIDE_IN, LINE_IN = 0.7, 0.167
SEVERAL_IN = 1.8  # height of a small panel that is not alone
LEGEND_IN = 0.4
LINE = 59  # characters in a line of the words


def make_panels(
    main: Sides, sides: Sequence[Sides], title: str, words: Sequence[str]
) -> tuple[Drawing, Axes, list[Axes], Text]:
    """Create a large panel and small ones with the aspect ratios of `main` and `sides` (rows, columns), and the words.

    Return the figure, the large panel, the small ones, and the words.
    """
    #     LEFT_IN                     SIDE_LEFT_IN
    #     |title                      |
    #     |+--------------------+     |+-----------+   TOP_IN
    #     ||                    |     ||  a side   |
    #     ||        main        |     |+-----------+
    #     ||                    |     UNDER_SIDE_IN: its ticks and label; below it, the next side, or
    #     |+--------------------+     words (BESIDE_IN)
    #     BELOW_IN: ticks, label; of several sides, the words are below the main panel
    #     legend of the figure
    #
    # The figure is as high as the higher one of its two columns.
    main_in, tallest = _fit_sides(main, MAIN_IN, TALLEST_IN), SIDE_IN if len(sides) < 2 else SEVERAL_IN
    sides_in = [_fit_sides(side, SIDE_IN, tallest) for side in sides]
    text = wrap_lines(words)
    columns_in = [main_in[0] + BELOW_IN, sum(side_in[0] + UNDER_SIDE_IN for side_in in sides_in)]
    column = 0 if len(sides) > 1 else 1  # that of the words
    words_top, words_left = TOP_IN + columns_in[column], (LEFT_IN, BESIDE_IN)[column]
    columns_in[column] += LINE_IN * (1 + text.count("\n"))
    high = TOP_IN + max(columns_in) + LEGEND_IN
    figure = Drawing(figsize=(WIDTH_IN, high))

    def add_axes(left: float, top: float, size: tuple[float, float], name: str) -> Axes:
        bottom = 1 - (top + size[0]) / high
        return figure.add_axes((left / WIDTH_IN, bottom, size[1] / WIDTH_IN, size[0] / high), label=name)

    large, small, top = add_axes(LEFT_IN, TOP_IN, main_in, "main"), [], TOP_IN
    for number, side_in in enumerate(sides_in):
        small.append(add_axes(SIDE_LEFT_IN, top, side_in, f"side {number}"))
        top += side_in[0] + UNDER_SIDE_IN
    style: Style = {"va": "top", "color": INK}
    figure.text(LEFT_IN / WIDTH_IN, 1 - 0.14 / high, title, fontsize=10, **style)
    return figure, large, small, figure.text(words_left / WIDTH_IN, 1 - words_top / high, text, fontsize=9, **style)


def wrap_lines(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, LINE, subsequent_indent="   ") for line in lines)


def _fit_sides(shape: Sides, width: float, height: float) -> tuple[float, float]:
    """Return the largest (height, width) with the aspect ratio of `shape` that fits into `width` and `height`."""
    scale = min(width / shape[1], height / max(1, shape[0]))
    return shape[0] * scale, shape[1] * scale


VISIBLE_PX = 6  # of the screen; a thinner halo is drawn in the zoomed panel only
OUTLINE_GAP = 0.005  # fraction of the picture's longer side


@dataclass(frozen=True)
class LayerView:
    """A view of a layer: the whole (`zoom` None), or `zoom` pixels across, around `at` (row, column).

    `field` is a receptive field to be framed, `remarks` are additional lines of text. Of a volume, all views go
    through `at`, and `along` is the number of the axis along which the large one is seen.
    """

    zoom: int | None = None
    at: tuple[int, ...] | None = None
    field: ReceptiveField | None = None
    remarks: tuple[str, ...] = ()
    along: int = 0


WHOLE = LayerView()


def check_zoom(zoom: int | None) -> None:
    """Raise PlanError if `zoom` is no number of pixels."""
    if zoom is not None and (not is_integer(zoom) or zoom < 1):
        raise PlanError(f"zoom={zoom!r} is how many pixels are shown across: give a whole number, or None for all.")


def draw_layer(axes: Axes, rasters: RasterCache, point: HaloPoint, rank: int, owners: Sequence[int]) -> None:
    """Draw the whole layer in tiles, with the halo of a rank, and those of the others of `owners`, if wide enough."""
    draw_picture(axes, rasters, point.size_px, point.unit, point.axis_names)
    draw_tiles(axes, point.ranks, point.tiles, OUTLINE_GAP, rank)
    for owner in owners:
        mine = owner == rank
        redundant = point.find_redundant_moves(owner) if mine else ()
        for pieces, look in ((point.get_receives(owner), HALO if mine else OTHER_HALO), (redundant, COMPUTED)):
            visible = [move for move in pieces if min(*get_screen_box(axes, move.tile).size) >= VISIBLE_PX]
            draw_halos(axes, point.ranks, visible, look)


def draw_names(axes: Axes, point: HaloPoint, rank: int, avoid: Sequence[Bbox] = ()) -> bool:
    """Draw arrows from the sources of a rank's halo, and label them and the tiles. Return whether arrows are labelled.

    If they are, the chosen tile has a label already, with what it borrows.
    """
    tiles = point.tiles
    lettered = draw_halo_arrows(axes, point, rank, avoid) if point.readers else {}
    untold = {owner: tile_number for owner, tile_number in point.numbers.items() if owner != rank or not lettered}
    label_tiles(axes, untold, tiles, tiles[rank], avoid)
    return bool(lettered)


def resolve_rank(point: HaloPoint, tile: int | None) -> int:
    """Return the rank of a tile of the stage; None: of the tile with most sources."""
    ranks = point.ranks.ranks
    if tile is None:
        return ranks[choose_borrower(point)]
    if not 0 <= tile < len(ranks):
        raise PlanError(f"tile={tile}, but stage {point.stage} has tiles 0 to {len(ranks) - 1}.")
    return ranks[tile]


def truncate_lines(lines: list[str]) -> list[str]:
    most = 8
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]


def draw_legend(figure: Drawing, point: HaloPoint, rank: int, close: bool, with_field: bool) -> None:
    """Draw the legend below the figure; `close` says whether a close view greys what the tile does not need."""
    outlines = tuple(Line2D([], [], color=tint, linestyle=line, linewidth=2.5) for tint, line in LOOKS)
    # A look that alternates from tile to tile has an entry with a handle for each of its colours, side by side.
    entries: dict[str, Any] = {"what a rank owns": outlines}
    for name, pieces, look in (
        (point.halo_words, point.get_receives(rank), HALO),
        ("what it computes though others own it", point.find_redundant_moves(rank), COMPUTED),
    ):
        if pieces:
            entries[name] = tuple(Patch(**tint_halo(tint, look)) for tint, _ in LOOKS)
    if close and len(entries) > 1:
        entries["grey: not needed by this tile"] = Patch(facecolor="#9a9da1", edgecolor="#777777")
    # Whether the halos of others are wide enough to be drawn depends on the screen: the figure itself tells.
    if any(patch.get_hatch() == OTHER_HALO["hatch"] for patch in figure.axes[0].patches):
        entries["halos of the other tiles"] = Patch(**OTHER_HALO | {"linewidth": 0.5})
    if with_field:
        entries["receptive field"] = Patch(edgecolor=INK, linewidth=1.6, **FIELD)
    together = {tuple: HandlerTuple(ndivide=None)}
    look = {"loc": "lower left", "ncols": len(entries), "frameon": False, "fontsize": 9, "borderaxespad": 0.2}
    figure.legend(entries.values(), entries.keys(), handler_map=together, **look)
