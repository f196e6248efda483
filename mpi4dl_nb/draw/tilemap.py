"""The picture with outlined tiles, hatched halos, and arrows from the sources of a tile's halo to the tile.

Axes are in pixels of the layer that is shown. The picture is scaled to them, not the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from engines.images.picture import Pixels
from engines.spatial.layout import StageRanks
from engines.spatial.tiles import Move, Span, Tile
from mpi4dl_nb.draw.figure import BLUE, CASING, INK, ORANGE, choose_ticks, format_bytes, get_panel_px
from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.draw.raster_cache import RasterCache

__all__ = [
    "COMPUTED",
    "HALO",
    "LOOKS",
    "OTHER_HALO",
    "TileLabels",
    "clamp_point",
    "compute_middle",
    "draw_arrow",
    "draw_first_fit",
    "draw_halo_arrows",
    "draw_halos",
    "draw_label",
    "draw_picture",
    "draw_tiles",
    "get_screen_box",
    "get_text_box",
    "get_tile_colour",
    "label_tiles",
    "show_raster",
]

# Texts on a picture: legible on any colour, inside the tile that they describe, and without overlap.


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


# Levels (zorder): 0 the picture, 3 halos of other tiles, 4 outlines of tiles, 5 the chosen tile's halo, 6 its outline,
# 7 values of pixels, 8 the receptive field, 9 arrows and frames, 10 texts.
LOOKS = ((ORANGE, "solid"), (BLUE, (0, (5, 2))))  # of tiles, alternating
HALO = {"facecolor": (1, 1, 1, 0.45), "hatch": "/////", "linewidth": 1.2, "hatch_linewidth": 1.4, "zorder": 5}
COMPUTED = HALO | {"hatch": "xxxx"}
OTHER_HALO = {"facecolor": "none", "edgecolor": INK, "hatch": "...", "linewidth": 0.0, "zorder": 3}
TAGS = (("tile {tile}, rank {rank}", 9), ("tile {tile}\nrank {rank}", 8), ("r{rank}", 7), ("{rank}", 5))


def draw_picture(axes: Axes, rasters: RasterCache, size_px: tuple[int, int], unit: str = "px") -> None:
    """Draw the whole picture in a layer's pixel coordinates."""
    height, width = size_px
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=choose_ticks(0, width), yticks=choose_ticks(0, height))
    show_raster(axes, rasters.render_whole(get_panel_px(axes)), Tile.whole(height, width))
    axes.set_xlabel(f"column, {unit}", fontsize=9)
    axes.set_ylabel(f"row, {unit}", fontsize=9)
    axes.tick_params(labelsize=9)


def show_raster(axes: Axes, raster: Pixels, tile: Tile, level: float = 0) -> None:
    """Draw an image at screen resolution, so that Matplotlib need not rescale it in each redraw."""
    extent = (tile.cols.start, tile.cols.stop, tile.rows.stop, tile.rows.start)
    axes.imshow(raster, extent=extent, aspect="auto", interpolation="nearest", zorder=level)


def draw_tiles(axes: Axes, ranks: StageRanks, tiles: Mapping[int, Tile], gap: float, chosen: int | None = None) -> None:
    """Draw an outline `gap` px inside each tile. Neighbours differ in colour and in line style."""
    for (row, col), (rank, tile) in zip(ranks.grid, tiles.items(), strict=True):
        colour, line = LOOKS[(row + col) % 2]
        width, level = (3.5, 6) if rank == chosen else (2.0, 4)
        # Inside the tile, or the outlines of two neighbours would cover each other.
        corner = tile.cols.start + gap, tile.rows.start + gap
        size = len(tile.cols) - 2 * gap, len(tile.rows) - 2 * gap
        # A white line below the coloured one: tissue has any colour.
        for under, tint, style in ((3.0, "white", "solid"), (0.0, colour, line)):
            outline = Rectangle(corner, *size, fill=False, edgecolor=tint, linestyle=style, zorder=level)
            outline.set_linewidth(width + under)
            axes.add_patch(outline)


def label_tiles(
    axes: Axes, names: Mapping[int, int], tiles: Mapping[int, Tile], centre: Tile, avoid: Sequence[Bbox] = ()
) -> TileLabels:
    """Label tiles with `names` (tile number by rank), as fully as fits, in the corners farthest from `centre`."""

    def draw_tile_labels(form: str, size: int) -> TileLabels:
        paper = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"}
        style = {"fontsize": size, "weight": "bold", "color": INK, "zorder": 10, "bbox": paper}
        lettered: dict[int, Text] = {}
        for rank, number in names.items():
            tile, text = tiles[rank], form.format(tile=number, rank=rank)
            right, low = tile.cols.start > centre.cols.start, tile.rows.start > centre.rows.start
            corner = tile.cols.stop if right else tile.cols.start, tile.rows.stop if low else tile.rows.start
            inwards = -1.2 * size if right else 1.2 * size, 1.2 * size if low else -1.2 * size
            aligned = {"ha": "right" if right else "left", "va": "bottom" if low else "top"}
            lettered[rank] = axes.annotate(text, corner, inwards, textcoords="offset points", **aligned, **style)
        return lettered

    return draw_first_fit(axes, tiles, [lambda form=form: draw_tile_labels(*form) for form in TAGS], avoid)


def draw_halos(axes: Axes, ranks: StageRanks, pieces: Iterable[Move], look: Mapping[str, Any] = HALO) -> None:
    """Hatch halo pieces on white, in the colour of the tile that owns them."""
    for move in pieces:
        corner, (height, width) = (move.tile.cols.start, move.tile.rows.start), move.tile.shape
        if look is not OTHER_HALO:  # as with outlines, the hatch has a white casing; the dots of others do without
            casing = look | {"edgecolor": "white", "linewidth": 4, "hatch_linewidth": 3.5}
            axes.add_patch(Rectangle(corner, width, height, **casing))
        axes.add_patch(Rectangle(corner, width, height, **{"edgecolor": get_tile_colour(ranks, move.source)} | look))


def get_tile_colour(ranks: StageRanks, rank: int) -> str:
    """Return the colour of a rank's tile. Neighbours differ."""
    row, col = divmod(ranks.ranks.index(rank), ranks.grid.cols)
    return LOOKS[(row + col) % 2][0]


def draw_halo_arrows(axes: Axes, point: HaloPoint, rank: int, avoid: Sequence[Bbox] = ()) -> TileLabels:
    """Draw an arrow for each piece that a rank borrows. Label the arrows if all labels fit; return the labels."""
    tiles, pieces = point.tiles, point.get_receives(rank)
    # One label per source in the source's tile, and one for the tile itself. If one of them has no room, all are left
    # out, and the words beside the picture list the sources.
    texts = {move.source: point.describe_move(move, "\n") for move in pieces}
    total = format_bytes(point.count_bytes(pieces)) if pieces else "nothing"
    texts[rank] = f"tile {point.numbers[rank]}, rank {rank}\nborrows {total}"

    def draw_labels() -> TileLabels:
        return {owner: draw_label(axes, *compute_middle(tiles[owner]), text) for owner, text in texts.items()}

    lettered = draw_first_fit(axes, tiles, [draw_labels], avoid)
    depth = 0.09 * min(tiles[rank].shape)  # an arrow ends just inside the tile, where it is nearest to the piece
    inner = Tile(*(Span(span.start + depth, span.stop - depth) for span in (tiles[rank].rows, tiles[rank].cols)))
    for move in pieces:
        tip = clamp_point(compute_middle(move.tile), inner)
        draw_arrow(axes, compute_middle(tiles[move.source]), tip, lettered.get(move.source))
    return lettered


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], after: Text | None, short_pt: float = 0
) -> None:
    """Draw an arrow from `start`, or the edge of the text `after` there, to `short_pt` points before `end`."""
    if after:
        after.update_bbox_position_size(axes.figure.canvas.get_renderer())  # the arrow starts at its white box
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.6, "color": INK, "path_effects": CASING}
    ends = {"patchA": after.get_bbox_patch() if after else None, "shrinkA": 0, "shrinkB": short_pt}
    axes.annotate("", xy=end, xytext=start, arrowprops=look | ends, zorder=9)


def compute_middle(tile: Tile) -> tuple[float, float]:
    """Return the middle (x, y) of a rectangle."""
    return (tile.cols.start + tile.cols.stop) / 2, (tile.rows.start + tile.rows.stop) / 2


def clamp_point(point: tuple[float, float], tile: Tile) -> tuple[float, float]:
    """Return the point of a rectangle that is nearest to (x, y)."""
    x, y = point
    return min(max(x, tile.cols.start), tile.cols.stop), min(max(y, tile.rows.start), tile.rows.stop)
