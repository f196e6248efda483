"""Close view of a seam, in which single pixels are visible: owned, borrowed, and not needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from engines.images.picture import Pixels
from engines.program.receptive import ReceptiveField
from engines.spatial.tiles import Tile
from mpi4dl_nb.draw.figure import CASING, INK, format_size, get_panel_px
from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.draw.navigation import choose_seam, make_square
from mpi4dl_nb.draw.raster_cache import RasterCache, render_cells, render_values
from mpi4dl_nb.draw.tilemap import (
    COMPUTED,
    TileLabels,
    compute_middle,
    draw_arrow,
    draw_first_fit,
    draw_halos,
    draw_label,
    draw_tiles,
    get_screen_box,
    show_raster,
)

__all__ = ["choose_zoom_view", "describe_field", "draw_field", "draw_zoom", "label_owners", "mark_zoom"]

SMALLEST_FRAME_PT, LARGE_FRAME_PT = 13, 36
GRID_UP_TO_PX = 60  # grid lines between more pixels would hide them
VEIL = 165  # of 255: opacity of the white over pixels that are not needed


def choose_zoom_view(point: HaloPoint, rank: int) -> Tile:
    """Return a square of layer pixels around a corner of the rank's tile where it borrows, or around a seam."""
    side = 10 + 6 * max(point.compute_widths(rank).values())
    return make_square(choose_seam(point, rank), side, point.size_px)


def mark_zoom(axes: Axes, view: Tile) -> list[Bbox]:
    """Draw a frame, of a visible minimum size, around the zoomed region. Return the boxes that texts must avoid."""
    # The region may be a few pixels of a large picture. The frame is a marker, whose size is in points, and not a
    # rectangle in pixels of the layer, so that it is never too small to be seen.
    box, point_px = get_screen_box(axes, view), axes.figure.dpi / 72
    side_pt = max(box.width / point_px, SMALLEST_FRAME_PT)
    frame = {"marker": "s", "markersize": side_pt, "markeredgecolor": INK, "markeredgewidth": 2.2}
    axes.plot(*compute_middle(view), markerfacecolor="none", path_effects=CASING, zorder=9.5, **frame)
    grown = box.padded((side_pt * point_px - box.width) / 2 + 3)
    # Within a large frame there is room for texts.
    return [grown] if side_pt < LARGE_FRAME_PT else []


def draw_zoom(axes: Axes, rasters: RasterCache, point: HaloPoint, rank: int, view: Tile, values: bool = False) -> None:
    """Draw each layer pixel as a cell in the picture's mean colour there; with `values`, write that into the cell."""
    size, in_cells = get_panel_px(axes), max(view.shape) <= GRID_UP_TO_PX
    pixels = rasters.render_region(point.size_px, view, max(size))
    ground = _fade_unneeded(pixels, point, rank, view)
    axes.set(xlim=(view.cols.start, view.cols.stop), ylim=(view.rows.stop, view.rows.start))
    show_raster(axes, render_cells(ground, size, lines=in_cells), view)
    draw_tiles(axes, point.ranks, point.tiles, gap=0, chosen=rank)
    draw_halos(axes, point.ranks, point.get_receives(rank))
    draw_halos(axes, point.ranks, point.find_redundant_moves(rank), COMPUTED)
    if values:
        show_raster(axes, render_values(pixels, ground, size, _find_owners(point, rank, view)), view, level=7)
    # `imshow` and the outlines of tiles beyond the view have moved the limits.
    axes.set(xlim=(view.cols.start, view.cols.stop), ylim=(view.rows.stop, view.rows.start))
    axes.set(xticks=[view.cols.start, view.cols.stop], yticks=[view.rows.start, view.rows.stop])
    axes.tick_params(labelsize=9)
    each = ", each a cell" if in_cells else ""
    axes.set_xlabel(f"the framed place: {format_size(view.shape)} px of this layer{each}", fontsize=9)
    _draw_widths(axes, point, rank, view)


def _fade_unneeded(pixels: Pixels, point: HaloPoint, rank: int, view: Tile) -> Pixels:
    """Return `pixels`, whitened where the rank neither owns nor borrows nor computes them."""
    veil = np.full(pixels.shape[:2], True)
    # A large view is rendered with fewer pixels than the layer has there.
    down, across = (there / here for there, here in zip(pixels.shape, view.shape, strict=False))
    for tile in (point.tiles[rank], *(move.tile for move in point.find_halo(rank))):
        rows, cols = (tile & view).to_slices(view)
        veil[
            round(rows.start * down) : round(rows.stop * down), round(cols.start * across) : round(cols.stop * across)
        ] = False
    pale = (pixels.astype(np.uint16) * (255 - VEIL) + 255 * VEIL) // 255
    return np.where(veil[..., None], pale, pixels).astype(np.uint8)


def _find_owners(point: HaloPoint, rank: int, view: Tile) -> dict[tuple[int, int], str]:
    """Return the notes, by (row, column) of the view, that name the owner of each pixel from another rank."""
    found = {}
    for sign, pieces in (("from", point.get_receives(rank)), ("of", point.find_redundant_moves(rank))):
        for move in pieces:
            rows, cols = (move.tile & view).to_slices(view)
            cells_of = ((row, col) for row in range(rows.start, rows.stop) for col in range(cols.start, cols.stop))
            found.update(dict.fromkeys(cells_of, f"{sign} r{move.source}"))
    return found


def _draw_widths(axes: Axes, point: HaloPoint, rank: int, view: Tile) -> None:
    """Draw brackets outside the frame with the numbers of rows and columns that are borrowed here."""
    own, width = point.tiles[rank], point.compute_widths(rank)
    above, beside = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for side, edge, way in (("left", own.cols.start, -1), ("right", own.cols.stop, 1)):
        if width[side] and view.cols.start < edge < view.cols.stop:
            ends = edge, edge + way * width[side]
            axes.plot(ends, (1.02, 1.02), color=INK, marker="|", transform=above, clip_on=False)
            axes.text(sum(ends) / 2, 1.04, f"{width[side]} px", ha="center", va="bottom", transform=above)
    for side, edge, way in (("above", own.rows.start, -1), ("below", own.rows.stop, 1)):
        if width[side] and view.rows.start < edge < view.rows.stop:
            ends = edge, edge + way * width[side]
            axes.plot((1.02, 1.02), ends, color=INK, marker="_", transform=beside, clip_on=False)
            axes.text(1.04, sum(ends) / 2, f"{width[side]} px", ha="left", va="center", transform=beside)


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

    verb = "computed,\nof rank {}" if point.computed else "borrowed\nfrom rank {}"
    forms = (("own pixels\nof rank {}", verb), ("own", "r{}"))
    lettered = draw_first_fit(axes, seen, [lambda form=form: draw_names(*form) for form in forms])
    # Nothing travels with fused halos, so that there is no arrow.
    for owner in pieces.keys() & lettered.keys() if not point.computed else ():
        draw_arrow(axes, compute_middle(seen[owner]), compute_middle(pieces[owner]), after=lettered[owner], short_pt=7)


# The receptive field of one output pixel, drawn on the picture and in words.


FIELD = {"fill": False, "linestyle": (0, (2, 1.2)), "zorder": 8}
SMALLEST_PX = 10  # on the screen


def draw_field(axes: Axes, point: HaloPoint, field: ReceptiveField, picture_px: tuple[int, int]) -> None:
    """Draw a dotted frame around the receptive field in the picture, in the coordinates of the layer."""
    down, across = (layer / picture for layer, picture in zip(point.size_px, picture_px, strict=True))
    height, width = field.image.shape[0] * down, field.image.shape[1] * across
    # The field of an early layer is a few pixels: the frame grows around its middle to a visible size on the screen.
    pixel = get_screen_box(axes, Tile.whole(1, 1))
    more_x, more_y = max(0.0, SMALLEST_PX / pixel.width - width), max(0.0, SMALLEST_PX / pixel.height - height)
    corner = field.image.cols.start * across - more_x / 2, field.image.rows.start * down - more_y / 2
    width, height = width + more_x, height + more_y
    for colour, line in (("white", 5.5), (INK, 2.2)):
        axes.add_patch(Rectangle(corner, width, height, edgecolor=colour, linewidth=line, **FIELD))


def describe_field(point: HaloPoint, field: ReceptiveField, picture_px: tuple[int, int]) -> Sequence[str]:
    """Describe the receptive field of an output pixel, and its share on each tile."""
    image, (row, col) = field.image, field.pixel
    if not image:
        return [f"Output pixel ({row}, {col}) sees nothing of the picture"]
    tiles = zip(point.ranks.ranks, point.ranks.grid.cut(*picture_px), strict=True)
    parts = {rank: (tile & image).pixels for rank, tile in tiles if tile & image}
    share = ", ".join(f"tile {point.numbers[rank]} {count / image.pixels:.0%}" for rank, count in parts.items())
    rows, cols = image.rows, image.cols
    seen = (
        f"Output pixel ({row}, {col}) of this layer sees {format_size(image.shape)} px of the picture (dotted): "
        f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}. They lie on {share}"
    )
    return [seen]
