"""The picture with outlined tiles, tinted halos, arrows from the sources of a halo to its tile, and single pixels.

Axes are in pixels of the layer that is shown. The picture is scaled to them, not the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from matplotlib.typing import LineStyleType
from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

from mpi4dl_nb.draw.figure import CASING, INK, TILE_COLOURS, Style, format_size
from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.draw.navigation import RasterCache, compute_layer_microns
from mpi4dl_nb.draw.plain_text import PlainCanvas
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.formatting import format_microns
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Move, Tile
from mpi4dl_nb.engines.images.picture_reader import Picture, Pixels
from mpi4dl_nb.engines.plan.layout import StageRanks

# Texts on a picture: legible on any colour, inside the tile that they describe, and without overlap.


TileLabels = Mapping[int, Text]
"""One text per rank, within that rank's tile."""

PAD_PX = 4  # of the screen, around a text: its white box


def draw_label(axes: Axes, x: float, y: float, text: str, **style: Any) -> Text:
    """Draw dark text in a white box centred at (x, y)."""
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#888888", "linewidth": 0.6}
    settings: Style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": INK, "zorder": 10, "bbox": box}
    return axes.text(x, y, text, **(settings | style))


def draw_first_fit(
    axes: Axes, tiles: Mapping[int, Tile], forms: Iterable[TileLabels], avoid: Sequence[Bbox] = ()
) -> TileLabels:
    """Keep the first of `forms` that fits into the tiles, and return the labels; an empty mapping if none fits.

    Each form is drawn when `forms` is advanced. `avoid` are boxes on the screen that stay free, in addition to existing
    texts. The layout of the figure must be final.
    """
    # Texts have sizes in points and tiles have sizes in data units: only boxes on the screen can be compared. A form is
    # drawn, measured and, if a single label does not fit, removed again, as all tiles have labels of the same form.
    for lettered in forms:
        boxes = {text: text.get_window_extent().padded(PAD_PX) for text in axes.texts if text.get_text()}
        inside = all(
            get_screen_box(axes, tiles[rank]).fully_contains(*corner)
            for rank, text in lettered.items()
            for corner in (boxes[text].min, boxes[text].max)
        )
        if inside and not any(box.overlaps(other) for box, other in combinations([*boxes.values(), *avoid], 2)):
            return lettered
        for text in lettered.values():
            text.remove()
    return {}


def get_screen_box(axes: Axes, tile: Tile) -> Bbox:
    """Return the box on the screen of a rectangle in data coordinates."""
    corners = [(tile.cols.start, tile.rows.stop), (tile.cols.stop, tile.rows.start)]
    return Bbox(axes.transData.transform(corners))


# Levels (zorder): 0 the picture, 3 halos of other tiles, 4 outlines of tiles, 5 the chosen tile's halo, 6 its outline,
# 7 values of pixels, 8 the receptive field, 9 arrows and frames, 10 texts.
_LINES: tuple[LineStyleType, ...] = ("solid", (0, (5, 2)), (0, (5, 2)), "solid")
LOOKS = tuple(zip(TILE_COLOURS, _LINES, strict=True))
"""Colour and line of tiles: those of an even row alternate between the first two, of an odd row between the others."""
TINT = 0.4  # opacity of the owner's colour over what is borrowed, whose own colours are seen through it
HALO: Style = {"linewidth": 1.4, "zorder": 5}
COMPUTED: Style = HALO | {"hatch": "xx", "hatch_linewidth": 0.8}
NOT_OWN: Style = {"facecolor": (1, 1, 1, 0.45), "hatch": "/////", "linewidth": 1.2, "hatch_linewidth": 1.4, "zorder": 5}
"""Of what a rank holds of other ranks' pixels of a value, where colours are values."""
PADDING = NOT_OWN | {"hatch": "..."}
"""Likewise of what it holds beyond the image."""
OTHER_HALO: Style = {"facecolor": "none", "edgecolor": INK, "hatch": "...", "linewidth": 0.0, "zorder": 3}
TAGS = (("tile {tile}, rank {rank}", 9), ("tile {tile}\nrank {rank}", 8), ("r{rank}", 7), ("{rank}", 5))


def draw_picture(
    axes: Axes,
    rasters: RasterCache,
    size_px: tuple[int, int],
    unit: str = "px",
    names: Sequence[str] = AXIS_NAMES[-2:],
) -> None:
    """Draw the whole picture in a layer's pixel coordinates. `names` are those of the axes, down and to the right."""
    height, width = size_px
    _show_pixels(axes, rasters.whole, Tile.whole(height, width))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel(f"{names[1].removesuffix('s')}, {unit}", fontsize=9)
    axes.set_ylabel(f"{names[0].removesuffix('s')}, {unit}", fontsize=9)
    axes.tick_params(labelsize=9)


def draw_scale_bar(axes: Axes, picture: Picture, size_px: tuple[int, int]) -> None:
    """Draw a bar of a round length in micrometres below the right end of what is shown of a layer of `size_px`.

    It is at most a quarter as long as what is shown. A picture that does not know its scale gets none.
    """
    if not (microns := compute_layer_microns(picture, size_px)):
        return
    _, microns_per_px = microns
    # A little more, or rounding would choose 500 µm instead of 1000, or nothing.
    most = axes.viewLim.width * microns_per_px / 4 * (1 + 1e-9)
    power = 10.0 ** np.floor(np.log10(most))
    length = max(digit * power for digit in (1, 2, 5) if digit * power <= most)
    # Below the tick labels, beside the name of the axis: within the picture there are labels of tiles in all corners.
    axes.set_xlabel(axes.get_xlabel(), loc="left")
    anchor = {"bbox_to_anchor": (1, 0), "bbox_transform": axes.transAxes, "pad": 2.0, "borderpad": 0}
    look = {"frameon": False, "color": INK, "size_vertical": abs(axes.viewLim.height) / 200, "sep": 3}
    size = length / microns_per_px, format_microns(length)
    axes.add_artist(AnchoredSizeBar(axes.transData, *size, "upper right", **anchor, **look))


def _show_pixels(axes: Axes, pixels: Pixels, tile: Tile) -> None:
    extent = (tile.cols.start, tile.cols.stop, tile.rows.stop, tile.rows.start)
    axes.imshow(pixels, extent=extent, aspect="auto")


def draw_tiles(
    axes: Axes, ranks: StageRanks, tiles: Mapping[int, Tile], gap: float = 0, chosen: int | None = None
) -> None:
    """Draw an outline inside each tile, `gap` of the longer side of the axes from its edge.

    Neighbours differ in colour and in line style.
    """
    # In data units, which are longer on one axis if the picture is stretched.
    box, shown = axes.bbox, axes.viewLim
    down, across = (
        gap * max(box.width, box.height) * abs(units) / room
        for units, room in ((shown.height, box.height), (shown.width, box.width))
    )
    for rank, tile in tiles.items():
        if not tile:  # a section of a volume does not meet all tiles
            continue
        colour, line = get_tile_look(ranks, rank)
        width, level = (3.5, 6) if rank == chosen else (2.0, 4)
        # Inside the tile, or the outlines of two neighbours would cover each other.
        corner = tile.cols.start + across, tile.rows.start + down
        size = len(tile.cols) - 2 * across, len(tile.rows) - 2 * down
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
        style: Style = {"fontsize": size, "weight": "bold", "color": INK, "zorder": 10, "bbox": paper}
        lettered: dict[int, Text] = {}
        for rank, tile_number in names.items():
            tile, text = tiles[rank], form.format(tile=tile_number, rank=rank)
            if not tile:
                continue
            right, low = tile.cols.start > centre.cols.start, tile.rows.start > centre.rows.start
            corner = tile.cols.stop if right else tile.cols.start, tile.rows.stop if low else tile.rows.start
            inwards = -1.2 * size if right else 1.2 * size, 1.2 * size if low else -1.2 * size
            style |= {"ha": "right" if right else "left", "va": "bottom" if low else "top"}
            lettered[rank] = axes.annotate(text, corner, inwards, textcoords="offset points", **style)
        return lettered

    return draw_first_fit(axes, tiles, (draw_tile_labels(*form) for form in TAGS), avoid)


def draw_halos(axes: Axes, ranks: StageRanks, pieces: Iterable[Move], look: Style = HALO) -> None:
    """Tint halo pieces in the colour of the tile that owns them; their pixels are seen through the tint."""
    for move in pieces:
        corner, (height, width) = (move.tile.cols.start, move.tile.rows.start), move.tile.shape
        axes.add_patch(Rectangle(corner, width, height, **tint_halo(get_tile_look(ranks, move.source)[0], look)))


def tint_halo(colour: str, look: Style = HALO) -> Style:
    """Return a patch's style for a halo that the tile with this colour owns."""
    return {"facecolor": to_rgba(colour, TINT), "edgecolor": colour} | look


def get_tile_look(ranks: StageRanks, rank: int) -> tuple[str, LineStyleType]:
    """Return colour and line of a rank's tile."""
    return LOOKS[find_look(ranks, rank)]


def find_look(ranks: StageRanks, rank: int) -> int:
    """Return which of `TILE_COLOURS` a rank's tile has. Neighbours differ in any section, corners included."""
    # Of a volume, both alternations begin anew with each plane of tiles: a neighbour before or behind differs in both.
    #
    #     planes of tiles    0        1
    #                        0 1      3 2
    #                        2 3      1 0
    *before, row, col = (0, *map(int, np.unravel_index(ranks.ranks.index(rank), ranks.grid)))
    return 2 * ((row + sum(before)) % 2) + (col + sum(before)) % 2


def draw_halo_arrows(axes: Axes, point: HaloPoint, rank: int, avoid: Sequence[Bbox] = ()) -> TileLabels:
    """Draw an arrow for each piece that a rank borrows. Label the arrows if all labels fit; return the labels."""
    tiles, pieces = point.tiles, point.get_receives(rank)
    if not tiles[rank]:  # a section that only meets its halo
        return {}
    # One label per source in the source's tile, and one for the tile itself. If one of them has no room, all are left
    # out, and the words beside the picture list the sources.
    texts = {move.source: point.describe_move(move, "\n") for move in pieces}
    texts[rank] = f"tile {point.numbers[rank]}, rank {rank}\n{point.describe_total(rank)}"

    labels = {owner: draw_label(axes, *compute_middle(tiles[owner]), text) for owner, text in texts.items()}
    lettered = draw_first_fit(axes, tiles, [labels], avoid)
    depth = 0.09 * min(tiles[rank].shape)  # an arrow ends just inside the tile, where it is nearest to the piece
    top, left, bottom, right = tiles[rank].sides
    for move in pieces:
        x, y = compute_middle(move.tile)
        tip = np.clip(x, left + depth, right - depth), np.clip(y, top + depth, bottom - depth)
        draw_arrow(axes, compute_middle(tiles[move.source]), tip, lettered.get(move.source))
    return lettered


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], after: Text | None, short_pt: float = 0
) -> None:
    """Draw an arrow from `start`, or the edge of the text `after` there, to `short_pt` points before `end`."""
    if after and isinstance(canvas := axes.figure.canvas, PlainCanvas):
        after.update_bbox_position_size(canvas.get_renderer())  # the arrow starts at its white box
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.6, "color": INK, "path_effects": CASING}
    ends = {"patchA": after.get_bbox_patch() if after else None, "shrinkA": 0, "shrinkB": short_pt}
    axes.annotate("", xy=end, xytext=start, arrowprops=look | ends, zorder=9)


def compute_middle(tile: Tile) -> tuple[float, float]:
    """Return the middle (x, y) of a rectangle."""
    return (tile.cols.start + tile.cols.stop) / 2, (tile.rows.start + tile.rows.stop) / 2


# Close view of a seam, in which single pixels are visible: owned, borrowed, and not needed.


SMALLEST_FRAME_PT, LARGE_FRAME_PT = 13, 36
GRID_UP_TO_PX = 60  # grid lines between more pixels would hide them
GREY, VEIL = 122, 165  # the grey over pixels that are not needed, and its opacity, of 255
SMALLEST_FONT_PX, LARGEST_FONT_PX = 7, 17
DARK = 3 * 120  # sum of red, green and blue; dark text is hard to read on less
PAPER = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.92}


def mark_zoom(axes: Axes, view: Tile) -> list[Bbox]:
    """Draw a frame, of a visible minimum size, around the zoomed region. Return the boxes that texts must avoid."""
    # The region may be a few pixels of a large picture. The frame is a marker, whose size is in points, and not a
    # rectangle in pixels of the layer, so that it is never too small to be seen.
    box, point_px = get_screen_box(axes, view), axes.figure.dpi / 72
    side_pt = max(box.width / point_px, SMALLEST_FRAME_PT)
    frame: Style = {"marker": "s", "markersize": side_pt, "markeredgecolor": INK, "markeredgewidth": 2.2}
    axes.plot(*compute_middle(view), markerfacecolor="none", path_effects=CASING, zorder=9.5, **frame)
    grown = box.padded((side_pt * point_px - box.width) / 2 + 3)
    # Within a large frame there is room for texts.
    return [grown] if side_pt < LARGE_FRAME_PT else []


def draw_zoom(axes: Axes, rasters: RasterCache, point: HaloPoint, rank: int, view: Tile, values: bool = False) -> None:
    """Draw each layer pixel as a cell in the picture's mean colour there; with `values`, write that into the cell."""
    pixels = rasters.render_region(point.size_px, view)
    # Pixels that the rank neither owns nor borrows nor computes are greyed.
    veil = np.full(pixels.shape[:2], True)
    # A large view is rendered with fewer pixels than the layer has there.
    down, across = (there / here for there, here in zip(pixels.shape, view.shape, strict=False))
    for tile in (point.tiles[rank], *(move.tile for move in point.find_halo(rank))):
        part = (tile & view).to_slices(view)
        y, x = (slice(round(s.start * by), round(s.stop * by)) for s, by in zip(part, (down, across), strict=True))
        veil[y, x] = False
    pale = (pixels.astype(np.uint16) * (255 - VEIL) + GREY * VEIL) // 255
    ground = np.where(veil[..., None], pale, pixels).astype(np.uint8)
    _show_pixels(axes, ground, view)
    in_cells, (rows, cols) = max(view.shape) <= GRID_UP_TO_PX, (view.rows, view.cols)
    if in_cells:
        axes.hlines(range(rows.start + 1, rows.stop), cols.start, cols.stop, color="white", linewidth=0.7, zorder=1)
        axes.vlines(range(cols.start + 1, cols.stop), rows.start, rows.stop, color="white", linewidth=0.7, zorder=1)
    draw_tiles(axes, point.ranks, point.tiles, chosen=rank)
    draw_halos(axes, point.ranks, point.get_receives(rank))
    draw_halos(axes, point.ranks, point.find_redundant_moves(rank), COMPUTED)
    if values:
        _write_values(axes, rasters, ground, view, point, rank)
    # The outlines of tiles beyond the view have moved the limits.
    axes.set(xlim=(cols.start, cols.stop), ylim=(rows.stop, rows.start))
    axes.set(xticks=[cols.start, cols.stop], yticks=[rows.start, rows.stop])
    axes.tick_params(labelsize=9)
    cells = ", each a cell" if in_cells else ""
    axes.set_xlabel(f"the framed place: {format_size(view.shape)} {point.unit}{cells}", fontsize=9)
    # Brackets outside the frame, with the numbers of rows and columns that are borrowed here.
    owned, width = point.tiles[rank], point.compute_widths(rank)
    per_row, per_col = compute_layer_microns(rasters.picture, point.size_px) or (0.0, 0.0)

    def format_width(px: int, microns: float) -> str:
        return f"{px} px\n{format_microns(px * microns)}" if microns else f"{px} px"

    above, beside = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for side, edge, way in (("left", owned.cols.start, -1), ("right", owned.cols.stop, 1)):
        if width[side] and cols.start < edge < cols.stop:
            ends = edge, edge + way * width[side]
            axes.plot(ends, (1.02, 1.02), color=INK, marker="|", transform=above, clip_on=False)
            words = format_width(width[side], per_col)
            axes.text(sum(ends) / 2, 1.04, words, ha="center", va="bottom", transform=above, fontsize=9)
    for side, edge, way in (("above", owned.rows.start, -1), ("below", owned.rows.stop, 1)):
        if width[side] and rows.start < edge < rows.stop:
            ends = edge, edge + way * width[side]
            axes.plot((1.02, 1.02), ends, color=INK, marker="_", transform=beside, clip_on=False)
            words = format_width(width[side], per_row)
            axes.text(1.05, sum(ends) / 2, words, ha="left", va="center", transform=beside, fontsize=9)


def _write_values(axes: Axes, rasters: RasterCache, ground: Pixels, view: Tile, point: HaloPoint, rank: int) -> None:
    """Write the numbers of each pixel into its cell of the colour `ground`, below its owner if it is lent."""
    cells = rasters.list_cells(point.size_px, view)
    notes: dict[tuple[int, int], str] = {}
    for sign, pieces in (("from", point.get_receives(rank)), ("of", point.find_redundant_moves(rank))):
        for move in pieces:
            lent = np.zeros(view.shape, bool)
            lent[(move.tile & view).to_slices(view)] = True
            notes |= dict.fromkeys(zip(*np.nonzero(lent), strict=True), f"{sign} r{move.source}")
    cell = min(axes.bbox.height / view.shape[0], axes.bbox.width / view.shape[1])
    size_px = min(LARGEST_FONT_PX, max(SMALLEST_FONT_PX, int(cell / 5.2)))
    style: Style = {"ha": "center", "va": "center", "linespacing": 1, "zorder": 7}
    style["fontsize"] = size_px * 72 / axes.figure.dpi
    for row, col in np.ndindex(view.shape):
        lines = cells[row][col]
        if note := notes.get((row, col)):
            look: Style = {"color": INK, "bbox": PAPER}
            lines.insert(0, note)
        else:
            look = {"color": INK if int(ground[row, col].sum(dtype=int)) > DARK else "white"}
        axes.text(view.cols.start + col + 0.5, view.rows.start + row + 0.5, "\n".join(lines), **style | look)


def label_owners(axes: Axes, point: HaloPoint, rank: int, view: Tile) -> None:
    """Label the pixels with their owners, as fully as fits, with arrows to borrowed pixels."""
    lent = point.find_halo(rank)
    pieces = {move.source: move.tile & view for move in lent if move.tile & view}
    seen = {owner: point.tiles[owner] & view for owner in (*pieces, rank) if point.tiles[owner] & view}

    def draw_names(own: str, lent: str) -> TileLabels:
        return {
            owner: draw_label(axes, *compute_middle(part), (own if owner == rank else lent).format(owner), fontsize=8)
            for owner, part in seen.items()
        }

    forms = (("own pixels\nof rank {}", point.owner_form), ("own", "r{}"))
    lettered = draw_first_fit(axes, seen, (draw_names(*form) for form in forms))
    # Nothing travels with fused halos, so that there is no arrow.
    for owner in pieces.keys() & lettered.keys() if not point.computed else ():
        draw_arrow(axes, compute_middle(seen[owner]), compute_middle(pieces[owner]), after=lettered[owner], short_pt=7)


# The receptive field of one output pixel, drawn on the picture and in words.


FIELD: Style = {"fill": False, "linestyle": (0, (2, 1.2)), "zorder": 8}
SMALLEST_PX = 10  # on the screen


def draw_field(axes: Axes, point: HaloPoint, field: ReceptiveField, picture_px: tuple[int, int]) -> None:
    """Draw a dashed frame around the receptive field in the picture, in the coordinates of the layer."""
    down, across = (layer / picture for layer, picture in zip(point.size_px, picture_px, strict=True))
    height, width = field.image.shape[0] * down, field.image.shape[1] * across
    # The field of an early layer is a few pixels: the frame grows around its middle to a visible size on the screen.
    pixel = get_screen_box(axes, Tile.whole(1, 1))
    more_x, more_y = max(0.0, SMALLEST_PX / pixel.width - width), max(0.0, SMALLEST_PX / pixel.height - height)
    corner = field.image.cols.start * across - more_x / 2, field.image.rows.start * down - more_y / 2
    width, height = width + more_x, height + more_y
    for colour, line in (("white", 5.5), (INK, 2.2)):
        axes.add_patch(Rectangle(corner, width, height, edgecolor=colour, linewidth=line, **FIELD))
