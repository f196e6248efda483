"""One image in a file, with its annotations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.errors import ImageError
from engines.images.mask_file import read_mask_shape
from engines.images.picture import Picture
from engines.images.picture_cache import open_cached, read_shape
from engines.images.region_picture import crop_picture
from engines.spatial.tiles import Span, Tile

__all__ = ["Example"]

_LARGEST = 64  # the most that a region, with white around the picture, may be larger than the picture

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One image: a file, or a `region` of it in pixels of `level`, with its class and mask.

    `slide` names the specimen that it was taken from: images of one slide resemble each other.
    """

    path: Path
    label: int | None = None
    mask: Path | None = None
    region: Tile | None = None
    level: int = 0
    slide: str = ""

    @property
    def name(self) -> str:
        """The path, with the region and level unless they are the whole of level 0."""
        at = f"[{_format_span(self.region.rows)}, {_format_span(self.region.cols)}]" if self.region else ""
        return f"{self.path}{at}" + (f" of level {self.level}" if self.level else "")

    @property
    def shape(self) -> Shape:
        """Height and width in pixels. Raises ImageError, naming the file, if it cannot be read."""
        return self.region.shape if self.region else read_shape(self.path, self.level)

    def open_picture(self) -> Picture:
        """Open the image. Raises ImageError, naming the file, if it cannot be read or has no such region."""
        picture = open_cached(self.path)
        tile = self.region or (Tile.whole(*picture.shape(self.level)) if self.level else None)
        if tile is None:
            return picture
        self._check_size(picture.shape(self.level))
        return crop_picture(picture, tile.rows.start, tile.cols.start, *tile.shape, self.level)

    def find_mask_origin(self, mask: Shape, source: Shape) -> tuple[int, int]:
        """Return the pixel of a mask of shape `mask` at the first pixel of the image, which has shape `source`.

        A mask covers the region or the whole picture. Raises ImageError if its shape is that of neither.
        """
        if mask == source:
            return 0, 0
        whole = read_shape(self.path, self.level)
        if self.region and mask == whole:
            return self.region.rows.start, self.region.cols.start
        of_region = f", and {self.name} has {source[0]} x {source[1]}" if self.region else ""
        raise ImageError(
            f"The mask {self.mask} has {mask[0]} x {mask[1]} pixels, but {self.path} has "
            f"{whole[0]} x {whole[1]}{of_region}. Make the mask as large as its image."
        )

    def check(self) -> None:
        """Raise ImageError if the image or its mask is found unreadable without reading pixels."""
        # Of a PNG or JPEG only the header is read here, so that a table of thousands of them is checked in seconds.
        whole = read_shape(self.path, self.level)
        if self.region and not self.region & Tile.whole(*whole):
            self.open_picture()  # raises the error for a region outside of the picture
        self._check_size(whole)
        if self.mask:
            self.find_mask_origin(read_mask_shape(self.mask), self.shape)

    def _check_size(self, whole: Shape) -> None:
        """Raise ImageError if the region is far too large: with one digit too many, its white would fill the memory."""
        if self.region and self.region.pixels > _LARGEST * whole[0] * whole[1]:
            raise ImageError(
                f"The region of {self.region.shape[0]} x {self.region.shape[1]} px in {self.path} is more than "
                f"{_LARGEST} times as large as the whole, which has {whole[0]} x {whole[1]}. Make it smaller."
            )


def _format_span(span: Span) -> str:
    return f"{span.start}:{span.stop}"
