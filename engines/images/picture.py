"""Pictures from files, arrays, tensors or open slides, and their regions; the reader of whole slides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError, make_path
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.colour_profile import check_stored_colours
from mpi4dl_nb.engines.images.files import FileCache, FileReader, read_head, translate_errors
from mpi4dl_nb.engines.images.foreign_formats import describe_format
from mpi4dl_nb.engines.images.orientation import SWAPPED
from mpi4dl_nb.engines.images.picture_reader import (
    ArrayPicture,
    DecodeBlock,
    Level,
    Picture,
    Pixels,
    convert_array,
    convert_tensor,
    make_thumbnail,
    split_row_bands,
)
from mpi4dl_nb.engines.images.pillow import (
    PillowPicture,
    allow_any_size,
    check_mode,
    choose_conversion,
    find_orientation,
    find_stated_colours,
    is_animated,
    is_apple_png,
)
from mpi4dl_nb.engines.images.regular_file import JPEG_HEAD, PNG_HEAD, TIFF_HEADS, open_regular
from mpi4dl_nb.engines.images.tiff import TiffPicture, detect_vendor, find_whole_page
from mpi4dl_nb.engines.images.zarr import ZarrPicture, is_zarr

# Whole slides of many vendors through OpenSlide, and any object with OpenSlide's interface.


BLOCK_PX = 1024  # side of a block read at once; OpenSlide's copy of it is released before the next one is read
BLENDED_PX = 256  # the same, for a level whose downsample factor is not an integer


@runtime_checkable
class SlideLike(Protocol):
    """The common interface of OpenSlide, TiffSlide and others. Sizes are (width, height), locations (x, y)."""

    @property
    def level_dimensions(self) -> Sequence[tuple[int, int]]:
        """The size of each level, in its own pixels."""

    @property
    def level_downsamples(self) -> Sequence[float]:
        """Pixels of level 0 per pixel of each level."""

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Any:
        """Return an image of `size` pixels of a level, whose first pixel is at `location` in pixels of level 0."""


def has_openslide() -> bool:
    """Return whether the extra `wsi` is installed."""
    return find_spec("openslide") is not None


def make_openslide_error(path: Path) -> ImageError:
    """Build the error for a slide if the extra `wsi` is not installed."""
    return ImageError(
        f"{path} is a whole slide, which OpenSlide reads: pip install 'mpi4dl_nb[wsi]', or save it as a tiled TIFF "
        "file."
    )


def detect_openslide(path: Path) -> str | None:
    """Return the vendor that OpenSlide detects for a file; None if it detects none or is not installed."""
    if not has_openslide():
        return None
    import openslide  # an optional package, with a shared library of its own

    with translate_errors(path):
        return openslide.OpenSlide.detect_format(path)


class OpenSlidePicture(FileReader[Any]):
    """A slide in a file. Raises ImageError if OpenSlide cannot open it or is not installed."""

    def _open(self) -> tuple[Any, Sequence[Level], float | None]:
        if not has_openslide():
            raise make_openslide_error(self.path)
        import openslide

        with translate_errors(self.path):
            slide = openslide.OpenSlide(self.path)
        check_stored_colours(self.path, _read_profile(slide), "RGB")
        return slide, _read_levels(slide, self.path.name), _read_microns(slide)

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        handle = self.handle
        try:
            with translate_errors(self.path):
                _read_slide(handle, self.levels[level], level, out, (y0, x0))
        except ImageError:
            self.close()  # an OpenSlide handle that failed once fails for ever
            raise


class SlideLikePicture(Picture):
    """A slide object that the caller has opened. To reach other ranks, the object itself is pickled, if possible."""

    def __init__(self, slide: SlideLike) -> None:
        check_stored_colours(Path("slide"), _read_profile(slide), "RGB")
        super().__init__("slide", _read_levels(slide, "slide"), _read_microns(slide))
        self._slide = slide

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        with self._lock:
            _read_slide(self._slide, self.levels[level], level, out, (y0, x0))

    def __getstate__(self) -> dict[str, Any]:
        try:
            return super().__getstate__() | {"_slide": cloudpickle.dumps(self._slide)}
        except Exception as error:  # pickling a foreign object may raise anything
            kind = type(self._slide).__name__
            raise ImageError(f"An open {kind} cannot be sent to another rank ({error}). Give its path.") from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_slide": cloudpickle.loads(state["_slide"])})


def _read_levels(slide: SlideLike, name: str) -> list[Level]:
    levels = [
        Level(int(height), int(width), float(factor))
        for (width, height), factor in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
    ]
    if not levels or min(min(level.shape) for level in levels) < 1:
        raise ImageError(f"{name} has levels of {[level.shape for level in levels]} px: there is nothing to read.")
    return levels


def _read_microns(slide: SlideLike) -> float | None:
    """Return the mean of a pixel's two sides in micrometres, or None if it is not given."""
    properties = getattr(slide, "properties", {})
    try:
        sides = [float(properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
    except (KeyError, TypeError, ValueError):
        return None
    return sum(sides) / 2 if min(sides) > 0 and all(map(math.isfinite, sides)) else None


def _read_profile(slide: SlideLike) -> bytes | None:
    """Return the ICC profile of a slide; None if it has none, or a damaged one."""
    try:
        profile = getattr(slide, "color_profile", None)
        return bytes(profile.tobytes()) if profile is not None else None
    except Exception:  # an object of any kind, and a profile of any content
        return None


def _read_slide(slide: SlideLike, shape: Level, level: int, out: Pixels, corner: tuple[int, int]) -> None:
    """Fill `out` with the rectangle of a level whose first pixel is `corner` = (row, column).

    OpenSlide takes the location in pixels of level 0. With an integer downsample factor n, row y starts exactly at
    y * n. With any other (32914 rows become 8228: the factor is 4.0001), most rows start between two rows of level 0,
    and OpenSlide interpolates by the remainder, so that pixels would depend on where a read starts. Such a level is
    therefore read in blocks of a fixed grid, each from the nearest location: every read returns the same pixels, at
    most half a pixel of level 0 from their true position.
    """
    #     +-------+-------+-------+
    #     |    +--|---+   |       |       A read (the inner box) of such a level takes whole blocks of the grid, and
    #     +----|--+---|---+-------+       keeps what it needs of each. Of a level with an integer factor it takes only
    #     |    +--|---+   |       |       the parts of blocks inside the box.
    #     +-------+-------+-------+
    wanted = Tile(Span(corner[0], corner[0] + out.shape[0]), Span(corner[1], corner[1] + out.shape[1]))
    exact = shape.downsample.is_integer()
    side_px, within = (BLOCK_PX, wanted) if exact else (BLENDED_PX, Tile.whole(*shape.shape))
    for block in _split_blocks(wanted, side_px, within):
        location = round(block.cols.start * shape.downsample), round(block.rows.start * shape.downsample)
        rows, cols = block.shape
        part = convert_array(np.asarray(slide.read_region(location, level, (cols, rows))), "What read_region gave")
        if part.shape[:2] != (rows, cols):
            raise ImageError(f"Asked for {rows} x {cols} px, read_region gave {part.shape[0]} x {part.shape[1]}.")
        common = block & wanted
        out[common.to_slices(wanted)] = part[common.to_slices(block)]


def _split_blocks(wanted: Tile, side_px: int, within: Tile) -> Iterator[Tile]:
    """Yield the blocks of a fixed grid that intersect a rectangle, clipped to `within`."""
    starts = ([*range(span.start - span.start % side_px, span.stop, side_px)] for span in (wanted.rows, wanted.cols))
    for row, col in product(*starts):
        yield Tile(Span(row, row + side_px), Span(col, col + side_px)) & within


# Pictures of all kinds, recognised by their content.

Source = str | PathLike[str] | NDArray[np.generic] | torch.Tensor | Picture | SlideLike

_NO_TIFF = (".mrxs", ".vms", ".vmu", ".dcm", ".czi")  # slides that are not TIFF files internally


def open_image(source: Source) -> Picture:
    """Open the picture in a file, a NumPy array (H, W, C), a tensor (C, H, W), or an open slide.

    Files are PNG, JPEG, TIFF (OME-TIFF, pyramids), Zarr and, with the extra `wsi`, whatever OpenSlide reads; they are
    recognised by their content, not their names (except `.mrxs`). Each process opens a file itself and reads only the
    requested pixels. Grey becomes three equal channels, and transparent pixels are composited on white. Red, green
    and blue are used as they are stored, with one warning for each colour profile that shows other colours than sRGB;
    inks (CMYK) are converted by their profile. Numbers are uint8, or floats from 0 to 1. An object with OpenSlide's
    `read_region`, `level_dimensions` and `level_downsamples` is used directly. Raises ImageError, naming the file and
    the reason, if there is no readable picture, or if a file that can only be decoded whole (PNG, JPEG, TIFF in one
    strip) would take more memory than the larger of 1 GB (2 GB for a file of a megabyte) and 128 times its bytes, or
    than half of the free memory.

    `.shape()` is (rows, columns), and `.read(y, x, rows, columns)` returns pixels (rows, columns, 3) of uint8.

    >>> import numpy as np
    >>> from mpi4dl_nb import open_image
    >>> picture = open_image(np.zeros((4, 6), np.uint8))
    >>> picture.shape(), picture.read(0, 2, 3, 4).shape
    ((4, 6), (3, 4, 3))
    """
    if isinstance(source, str | PathLike):
        return _open_file(make_path(source))
    if isinstance(source, torch.Tensor):
        return ArrayPicture("picture", convert_tensor(source))
    if isinstance(source, np.ndarray):
        return ArrayPicture("picture", convert_array(source, "The array"))
    if isinstance(source, Picture):
        return source
    if isinstance(source, SlideLike):
        return SlideLikePicture(source)
    raise ImageError(
        f"No picture can be read from a value of type {type(source).__name__}. Give the path of a file, "
        "an (H, W, C) NumPy array, a (C, H, W) tensor, or an open slide."
    )


def _open_file(path: Path) -> Picture:
    if is_zarr(path):
        return ZarrPicture(path)
    head, ending = read_head(path, 8), path.suffix.lower()
    if ending == ".mrxs":  # the slide is in a folder next to the file, which is itself a small JPEG picture
        return _open_slide(path)
    if head.startswith(TIFF_HEADS):
        # OpenSlide knows the vendors' gaps and overlaps between tiles, so that it reads their files, or the user is
        # told to install it. What it does not take for a vendor's file is ordinary TIFF whose tags only look like one.
        maker = detect_vendor(path)
        if maker and not (has_openslide() and detect_openslide(path) in (None, "generic-tiff")):
            return OpenSlidePicture(path)
        page = find_whole_page(path)
        return TiffPicture(path) if page is None else PillowPicture(path, page)
    if head.startswith((PNG_HEAD, JPEG_HEAD)):
        return PillowPicture(path)
    return _open_slide(path)


def _open_slide(path: Path) -> Picture:
    if path.suffix.lower() in _NO_TIFF and not has_openslide():
        raise make_openslide_error(path)
    if detect_openslide(path) is None:
        what, way = describe_format(path)
        raise ImageError(
            f"{path} is not a PNG, JPEG or TIFF picture, nor a slide that OpenSlide knows: {what} {way}".rstrip()
        )
    return OpenSlidePicture(path)


# A rectangle of a picture, with the interface of a picture.


class RegionPicture(Picture):
    """A view of a rectangle of one level of another picture; pixel (0, 0) is its row `y0`, column `x0`.

    The view has one level; its thumbnail is made from the picture's coarser levels, if there are any.
    """

    def __init__(self, picture: Picture, y0: int, x0: int, height_px: int, width_px: int, level: int) -> None:
        name = f"{picture.name}[{y0}:{y0 + height_px}, {x0}:{x0 + width_px}]" + (f" of level {level}" if level else "")
        microns = picture.microns_per_px and picture.microns_per_px * picture.levels[level].downsample
        super().__init__(name, [Level(height_px, width_px)], microns)
        self.picture, self.box, self.level = picture, (y0, x0, height_px, width_px), level

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of the picture's level."""
        return self.picture.get_decode_block(self.level)

    def thumbnail(self, longest_px: int) -> Pixels:
        """Return the whole region, shrunk until neither side is longer than `longest_px`."""
        return make_thumbnail(self.picture, longest_px, self.box, self.level)

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        # In bands, since `read` returns a new array: a region as large as its picture would be held twice.
        height_px, width_px = out.shape[:2]
        for top, bottom in split_row_bands(0, height_px, width_px * 3):
            corner = self.box[0] + y0 + top, self.box[1] + x0
            out[top:bottom] = self.picture.read(*corner, bottom - top, width_px, self.level)


def crop_picture(picture: Picture, y0: int, x0: int, height_px: int, width_px: int, level: int = 0) -> Picture:
    """Return a rectangle of one level, in pixels of that level, as a picture; pixels outside of `picture` are white.

    The size of a pixel in micrometres stays known. Raises ImageError if the rectangle has no pixels, or none in common
    with the picture.

    >>> from mpi4dl_nb import crop_picture, immunohistochemistry, open_image
    >>> crop_picture(open_image(immunohistochemistry()), 10, 20, 64, 96).shape()
    (64, 96)
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


# A table may name thousands of regions of one slide, which is then opened once. Fully decoded files are not kept.
open_cached: FileCache[Picture] = FileCache(
    open_image, lambda picture: math.inf if isinstance(picture, PillowPicture) else 1
)


def read_shape(path: Path, level: int = 0) -> tuple[int, int]:
    """Return height and width in pixels of one level of a picture; for PNG and JPEG only the header is read.

    Raises ImageError, naming the file, if it cannot be read or has no such level.
    """
    # Opening a PNG or JPEG decodes all of it, and a data set asks for the shape of every image before it starts.
    header = None if level else _read_header(path)
    if header is None:
        return open_cached(path).shape(level)
    image, orientation, stated = header
    choose_conversion(path, image, stated)  # warns, or raises: the pixels that are read later are not the stored ones
    return image.size if orientation in SWAPPED else image.size[::-1]


def _read_header(path: Path) -> tuple[Image.Image, int, str | None] | None:
    """Return the image of a PNG or JPEG file, not decoded and closed, its orientation, and what states its colours.

    Returns None if opening the picture is the way to learn its shape, or the proper error: a damaged header may raise
    anything.
    """
    with (
        suppress(Exception),
        open_regular(path) as file,
        allow_any_size(),
        Image.open(file, formats=("PNG", "JPEG")) as image,
    ):
        check_mode(path, image)
        orientation = find_orientation(image, file)
        file.seek(0)
        if orientation is not None and not is_animated(image) and not is_apple_png(file.read(16)):
            return image, orientation, find_stated_colours(image, file)
    return None
