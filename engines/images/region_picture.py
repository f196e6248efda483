"""A rectangle of a picture, with the interface of a picture."""

from __future__ import annotations

from engines.errors import ImageError
from engines.images.picture import Picture
from engines.images.picture_reader import Level, PictureReader, Pixels, split_row_bands
from engines.images.thumbnails import make_thumbnail

__all__ = ["RegionPicture", "crop_picture"]


class RegionPicture(PictureReader):
    """A view of a rectangle of one level of another picture; pixel (0, 0) is its row `y0`, column `x0`.

    The view has one level; its thumbnail is made from the picture's coarser levels, if there are any.
    """

    def __init__(self, picture: Picture, y0: int, x0: int, height_px: int, width_px: int, level: int) -> None:
        name = f"{picture.name}[{y0}:{y0 + height_px}, {x0}:{x0 + width_px}]" + (f" of level {level}" if level else "")
        microns = picture.microns_per_px and picture.microns_per_px * picture.levels[level].downsample
        super().__init__(name, [Level(height_px, width_px)], microns)
        self.picture, self.box, self.level = picture, (y0, x0, height_px, width_px), level

    def thumbnail(self, longest_px: int) -> Pixels:
        """Return the whole region, shrunk until neither side is longer than `longest_px`."""
        return make_thumbnail(self.picture, longest_px, self.box, self.level)

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        # In bands, since `read` returns a new array: a region as large as its picture would be held twice.
        height_px, width_px = out.shape[:2]
        for top, bottom in split_row_bands(0, height_px, width_px * 3):
            place = self.box[0] + y0 + top, self.box[1] + x0
            out[top:bottom] = self.picture.read(*place, bottom - top, width_px, self.level)


def crop_picture(picture: Picture, y0: int, x0: int, height_px: int, width_px: int, level: int = 0) -> Picture:
    """Return a rectangle of one level, in pixels of that level, as a picture; pixels outside of `picture` are white.

    Raises ImageError if the rectangle has no pixels, or none in common with the picture.
    """
    rows, cols = picture.shape(level)
    if min(height_px, width_px) < 1:
        raise ImageError(f"A region of {height_px} x {width_px} px of {picture.name} has no pixels.")
    if not (-height_px < y0 < rows and -width_px < x0 < cols):
        raise ImageError(
            f"The region of {height_px} x {width_px} px from row {y0}, column {x0} lies outside of {picture.name}, "
            f"which has {rows} x {cols} px at level {level}. Mind that rows and columns are in pixels of that level."
        )
    return RegionPicture(picture, y0, x0, height_px, width_px, level)
