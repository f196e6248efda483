"""Tiles of a picture's pyramid, encoded for a page that shows as much of it as is in view."""

from __future__ import annotations

import io

from PIL import Image

from engines.images.picture_reader import Picture, Pixels, make_thumbnail
from engines.spatial.tiles import Span, Tile

TILE_PX = 256  # as in page/pyramid.js
QUALITY = 88  # of JPEG, for levels whose pixels are means anyway


def count_levels(picture: Picture) -> int:
    """Return the number of levels, each half as large as the one before, until all of the picture is one tile.

    >>> import numpy as np
    >>> from engines.images.picture import open_image
    >>> count_levels(open_image(np.zeros((600, 1000, 3), np.uint8)))
    3
    """
    levels = 1
    while TILE_PX << (levels - 1) < max(picture.shape()):
        levels += 1
    return levels


def encode_tile(picture: Picture, level: int, row: int, col: int) -> bytes:
    """Return one tile as an image file: PNG with the exact pixels of the finest level, JPEG of the others.

    A tile at an edge of the picture has the pixels inside only. It is empty if it lies outside.
    """
    side = TILE_PX << level
    whole = Tile.whole(*picture.shape())
    tile = Tile(Span(row * side, (row + 1) * side), Span(col * side, (col + 1) * side)) & whole
    if not tile:
        return b""
    box = (tile.rows.start, tile.cols.start, *tile.shape)
    if level == 0:
        return encode_pixels(picture.read(*box), exact=True)
    # At an edge the tile is smaller by the same factor, so that it lies where it belongs.
    longest = max(1, round(max(tile.shape) / 2**level))
    return encode_pixels(make_thumbnail(picture, longest, box))


def encode_pixels(pixels: Pixels, exact: bool = False) -> bytes:
    """Return pixels (h, w, 3) as a PNG file if they must be exact, else as JPEG."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(buffer, "PNG", compress_level=1) if exact else image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
