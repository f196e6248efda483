"""A seam so close that single pixels are seen: owned, borrowed, and not needed."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox
from PIL import Image

from engines.images.picture import Picture, Pixels
from engines.spatial.tiles import Span, Tile
from mpi4dl_nb.draw.figure import CASING, INK, spoken_size
from mpi4dl_nb.draw.halos import HaloPoint
from mpi4dl_nb.draw.lettering import Lettered, first_that_fits, label, screen_box
from mpi4dl_nb.draw.tilemap import draw_arrow, draw_halos, draw_tiles, middle, near

__all__ = ["draw_zoom", "mark_zoom", "name_owners", "zoom_view"]

SMALLEST_FRAME_PT, LARGE_FRAME_PT = 13, 36
GRID_UP_TO_PX = 60  # lines between more pixels than that would hide them
VEIL = 165  # of 255: what lies under it is seen, but does not count


def zoom_view(point: HaloPoint, rank: int) -> Tile:
    """A square of layer pixels on a corner of the rank's tile where it borrows, or amid a seam."""
    piece = min(point.borrowed(rank), key=lambda move: move.tile.pixels).tile
    beside_the_arrow = piece.cols.start + len(piece.cols) / 4, piece.rows.start + len(piece.rows) / 4
    x, y = near(beside_the_arrow, point.tiles[rank])
    half = 5 + 3 * max(point.widths(rank).values())
    height, width = point.size_px
    return Tile(_around(y, half, height), _around(x, half, width))


def _around(px: float, half: int, size_px: int) -> Span:
    start = max(0, min(int(px) - half, size_px - 2 * half))
    return Span(start, min(size_px, start + 2 * half))


def mark_zoom(axes: Axes, view: Tile) -> list[Bbox]:
    """A frame around the zoomed place, never too small to be seen; where no text should hide it."""
    box, point_px = screen_box(axes, view), axes.figure.dpi / 72
    side_pt = max(box.width / point_px, SMALLEST_FRAME_PT)
    frame = {"marker": "s", "markersize": side_pt, "markeredgecolor": INK, "markeredgewidth": 2.2}
    axes.plot(*middle(view), markerfacecolor="none", path_effects=CASING, zorder=9.5, **frame)
    grown = box.padded((side_pt * point_px - box.width) / 2 + 3)
    return [grown] if side_pt < LARGE_FRAME_PT else []


def draw_zoom(axes: Axes, picture: Picture, point: HaloPoint, rank: int, view: Tile) -> None:
    """One cell is one pixel of the layer, in the mean colour of the picture there."""
    cols, rows = view.cols, view.rows
    extent = (cols.start, cols.stop, rows.stop, rows.start)
    axes.imshow(_pixels(picture, point.size_px, view), extent=extent, interpolation="nearest")
    axes.imshow(_veil(point, rank, view), extent=extent, interpolation="nearest")
    if max(view.shape) <= GRID_UP_TO_PX:
        axes.vlines(range(cols.start + 1, cols.stop), rows.start, rows.stop, "white", linewidth=0.6)
        axes.hlines(range(rows.start + 1, rows.stop), cols.start, cols.stop, "white", linewidth=0.6)
    draw_tiles(axes, point.ranks, point.tiles, gap=0, chosen=rank)
    draw_halos(axes, point.borrowed(rank))
    axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[cols.start, cols.stop], yticks=[rows.start, rows.stop])
    cells = ", each a cell" if max(view.shape) <= GRID_UP_TO_PX else ""
    axes.set_xlabel(f"the framed place: {spoken_size(view.shape)} px of this layer{cells}", fontsize=9)
    _measure(axes, point, rank, view)


def _pixels(picture: Picture, size_px: tuple[int, int], view: Tile) -> Pixels:
    """(h, w, 3): the picture averaged over each pixel of the layer."""
    (top, bottom), (left, right) = (
        (span.start * side / px, span.stop * side / px)
        for span, side, px in zip((view.rows, view.cols), picture.shape(), size_px, strict=True)
    )
    y0, x0 = int(top), int(left)
    there = Image.fromarray(picture.read(y0, x0, math.ceil(bottom) - y0, math.ceil(right) - x0))
    box = (left - x0, top - y0, right - x0, bottom - y0)
    return np.array(there.resize(view.shape[::-1], Image.Resampling.BOX, box=box))


def _veil(point: HaloPoint, rank: int, view: Tile) -> Pixels:
    """(h, w, 4): white over what the rank neither owns nor borrows."""
    veil = np.full((*view.shape, 4), 255, np.uint8)
    veil[..., 3] = VEIL
    for tile in (point.tiles[rank], *(move.tile for move in point.borrowed(rank))):
        if seen := tile & view:
            veil[seen.within(view)] = 0
    return veil


def _measure(axes: Axes, point: HaloPoint, rank: int, view: Tile) -> None:
    """Brackets outside of the frame: how many rows and columns are borrowed here."""
    own, width = point.tiles[rank], point.widths(rank)
    sides = (("left", own.cols.start, -1), ("right", own.cols.stop, 1))
    for side, edge, way in sides:
        if width[side] and view.cols.start < edge < view.cols.stop:
            ends, frame = (edge, edge + way * width[side]), axes.get_xaxis_transform()
            axes.plot(ends, (1.02, 1.02), color=INK, marker="|", transform=frame, clip_on=False)
            axes.text(sum(ends) / 2, 1.04, f"{width[side]} px", ha="center", va="bottom", transform=frame)
    sides = (("above", own.rows.start, -1), ("below", own.rows.stop, 1))
    for side, edge, way in sides:
        if width[side] and view.rows.start < edge < view.rows.stop:
            ends, frame = (edge, edge + way * width[side]), axes.get_yaxis_transform()
            axes.plot((1.02, 1.02), ends, color=INK, marker="_", transform=frame, clip_on=False)
            axes.text(1.04, sum(ends) / 2, f"{width[side]} px", ha="left", va="center", transform=frame)


def name_owners(axes: Axes, point: HaloPoint, rank: int, view: Tile) -> None:
    """Who lent what, with arrows, as fully as there is room."""
    pieces = {move.source: move.tile & view for move in point.borrowed(rank) if move.tile & view}
    seen = {owner: point.tiles[owner] & view for owner in (*pieces, rank) if point.tiles[owner] & view}

    def names(own: str, lent: str) -> Lettered:
        return {
            owner: label(axes, *middle(part), (own if owner == rank else lent).format(owner), fontsize=8)
            for owner, part in seen.items()
        }

    forms = (("own pixels\nof rank {}", "borrowed\nfrom rank {}"), ("own", "r{}"))
    lettered = first_that_fits(axes, seen, [lambda form=form: names(*form) for form in forms])
    for owner in pieces.keys() & lettered.keys():
        draw_arrow(axes, middle(seen[owner]), middle(pieces[owner]), after=lettered[owner], short_pt=7)
