"""The receptive field of one output pixel, drawn on the picture and in words."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from engines.program.receptive import ReceptiveField
from engines.spatial.tiles import Tile
from mpi4dl_nb.draw.figure import INK, format_size
from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.draw.tile_labels import get_screen_box

__all__ = ["describe_field", "draw_field"]

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
