"""Reader of TIFF, BigTIFF and OME-TIFF, including pyramids, with tifffile's parser and imagecodecs' decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tifffile import TiffFile, TiffPage

from engines.errors import ImageError
from engines.images.files import FileReader, make_changed_error, translate_errors
from engines.images.picture_reader import WHITE, DecodeBlock, Level, Pixels, make_levels, split_row_bands
from engines.images.tiff_layout import check_picture, find_picture, list_pages, list_sub_pages
from engines.images.tiff_page import TiffPageReader, check_segment_size, is_plain, open_descriptor, to_rgb

__all__ = ["TiffPicture", "check_segments", "detect_vendor", "find_whole_page"]

Planes = tuple[TiffPageReader, ...]
"""The pages of one level: one with all channels, or one per channel."""


def detect_vendor(path: Path) -> str | None:
    """Return the vendor of a slide in a TIFF file, which OpenSlide reads best; None for a file of no vendor format."""
    with translate_errors(path), TiffFile(path) as file:
        return next((name for name in ("svs", "ndpi", "scn", "bif", "philips") if getattr(file, f"is_{name}")), None)


def check_segments(path: Path) -> None:
    """Raise ImageError if tiles that a TIFF file lists are not in it, because it is truncated or damaged."""
    with translate_errors(path), TiffFile(path) as file:
        for page in list_pages(path, file):
            if page.is_tiled:
                TiffPageReader(path, page)


def find_whole_page(path: Path) -> int | None:
    """Return the index of the page that has to be decoded whole, or None if `TiffPicture` can read the file.

    Raises ImageError if the file is no TIFF, is damaged, or holds anything but one 8-bit picture.
    """
    with translate_errors(path), TiffFile(path) as file:
        layout = find_picture(path, file)
        check_picture(path, layout)
        for page in layout.base:
            check_segment_size(path, page)
        if all(map(is_plain, layout.base)):
            return None
        if layout.number is None or len(layout.base) > 1:
            where = "in a page within a page" if layout.number is None else "one channel to a page"
            raise ImageError(
                f"{path} holds its picture {where}, and in a kind (palette, fax, turned) that is not read there. "
                "Save it as 8-bit RGB or grey."
            )
        return layout.number


class TiffPicture(FileReader[tuple[int, tuple[Planes, ...]]]):
    """The picture of a TIFF file (see `find_picture`), with the levels in its SubIFDs or other pages.

    A read decodes only the tiles or strips that it intersects; of uncompressed data it reads only the wanted bytes.
    Raises ImageError if a file holds a stack of several pictures.
    """

    def _open(self) -> tuple[tuple[int, tuple[Planes, ...]], Sequence[Level], float | None]:
        with translate_errors(self.path), TiffFile(self.path) as file:
            levels, microns = _read_levels(self.path, file)
        # tifffile has parsed the tags; from here on only offsets and a bare descriptor are needed.
        fd = open_descriptor(self.path, levels[0][0])
        return (fd, levels), make_levels([planes[0].shape for planes in levels]), microns

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of a level: a tile or strip, or single pixels if it is uncompressed."""
        return self.handle[1][level][0].decode_block

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        (fd, levels), (height_px, width_px) = self.handle, out.shape[:2]
        planes = levels[level]
        with translate_errors(self.path):
            if [page.channels for page in planes] == [3]:  # red, green and blue: straight into the result
                planes[0].fill(fd, out, y0, x0)
                return
            channels = sum(page.channels for page in planes)
            for top, bottom in split_row_bands(y0, y0 + height_px, width_px * channels, planes[0].segment_rows):
                band = np.full((bottom - top, width_px, channels), WHITE, np.uint8)
                for number, page in enumerate(planes):
                    page.fill(fd, band[..., number : number + page.channels], top, x0)
                out[top - y0 : bottom - y0] = to_rgb(band, planes[0].alpha)


def _read_levels(path: Path, file: TiffFile) -> tuple[tuple[Planes, ...], float | None]:
    """Return the pages of each level, finest first, and the size of a pixel in micrometres."""
    layout = find_picture(path, file)
    check_picture(path, layout)
    base = layout.base
    if not all(map(is_plain, base)):
        raise make_changed_error(path)
    # The levels are the SubIFDs of the base page, or other pages of the file that look like copies of it.
    #
    #     page 0  base -- SubIFD 0  1/2          page 0  base        page 1  label, another aspect ratio: no level
    #                  -- SubIFD 1  1/4          page 2  1/4         page 3  1/16
    #
    # A level has as many pages as the base: with a page per channel, each of them lists its own SubIFDs.
    named = [list_sub_pages(path, page) for page in base]  # one list of levels for each channel's page
    coarser = [group for group in zip(*named, strict=False) if group] or [(page,) for page in layout.others]
    chosen = [tuple(TiffPageReader(path, page) for page in base)]
    for group in sorted(coarser, key=lambda group: -group[0].imagewidth):
        if all(map(_is_reduced_copy, group, base)) and group[0].imagewidth < chosen[-1][0].shape[1]:
            chosen.append(tuple(TiffPageReader(path, page) for page in group))
    return tuple(chosen), layout.microns_per_px


def _is_reduced_copy(page: TiffPage, base: TiffPage) -> bool:
    """Return whether a page is a reduced copy of the base: the same channels, and the same aspect ratio up to rounding.

    The label and macro images that slides contain have other aspect ratios.
    """
    alike = is_plain(page) and not page.is_mask and page.samplesperpixel == base.samplesperpixel
    if not alike or page.imagewidth >= base.imagewidth:
        return False
    scale = base.imagewidth / page.imagewidth
    return bool(page.is_tiled or page.is_reduced) and abs(base.imagelength / scale - page.imagelength) <= 2
