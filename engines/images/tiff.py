"""Reader of TIFF, BigTIFF and OME-TIFF, including pyramids, with tifffile's parser and imagecodecs' decoders.

Only the tiles or strips (segments) that intersect a rectangle are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tifffile import TiffFile, TiffPage

from mpi4dl_nb.engines.images.colour_profile import check_stored_colours
from mpi4dl_nb.engines.images.files import FileReader, make_changed_error, translate_errors
from mpi4dl_nb.engines.images.orientation import ORIENTATION
from mpi4dl_nb.engines.images.picture_reader import DecodeBlock, Level, Pixels, make_levels, split_row_bands
from mpi4dl_nb.engines.images.tiff_colours import ColourRule
from mpi4dl_nb.engines.images.tiff_directory import list_pages, list_sub_pages
from mpi4dl_nb.engines.images.tiff_layout import (
    DECODED,
    JPEG,
    JPEG_2000,
    PALETTE,
    PLAIN,
    YCBCR,
    TiffLayout,
    check_decoded_whole,
    check_picture,
    get_colour_count,
    open_layout,
)
from mpi4dl_nb.engines.images.tiff_page import (
    GDAL_NODATA,
    Descriptor,
    TiffPageReader,
    check_segment_size,
    find_empty_segments,
    get_segment_shape,
)

_SOFTWARE, _ICC_PROFILE = 305, 34675
MOST_BYTES = 1 << 26  # of one decoded segment; with larger ones, decoding the whole picture once is no worse


def is_decoded_by_segment(page: TiffPage) -> bool:
    """Return whether the segments of a page are decoded one by one.

    Fax pages, YCbCr without JPEG, and pages in one huge segment are decoded whole, by Pillow.
    """
    rows, cols = get_segment_shape(page)
    small = rows * cols * int(page.samplesperpixel) <= MOST_BYTES
    return (
        page.compression in DECODED
        and (page.photometric != YCBCR or page.compression in (JPEG, *JPEG_2000))
        and (page.compression == PLAIN or small or bool(find_empty_segments(page).any()))
    )


TiffHandle = list[tuple[tuple[TiffPageReader, ...], ColourRule]]
"""For each level, its pages (one with all channels, or one per channel), and how their numbers become colours."""


def detect_vendor(path: Path) -> str | None:
    """Return the vendor of a slide in a TIFF file, which OpenSlide reads best; None for a file of no vendor format.

    A file that leaves out blank tiles and has a NODATA number was written anew by GDAL: of a vendor's file, OpenSlide
    fills such tiles from coarser levels, or with white.
    Raises ImageError if tiles that an Aperio file lists are not in it, because it is truncated or damaged: OpenSlide
    would allocate whatever its header asks for.
    """
    with translate_errors(path), TiffFile(path) as file:
        maker = next((name for name in ("svs", "ndpi", "scn", "bif", "philips") if getattr(file, f"is_{name}")), None)
        if maker is None and str(file.pages.first.tags.valueof(_SOFTWARE, "")).startswith("MedScan"):
            maker = "trestle"  # neighbouring tiles overlap, by as many pixels as only its description says
        pages = list_pages(path, file) if maker in ("svs", "trestle") else []
        for page in pages:
            if page.is_tiled:
                TiffPageReader(path, page)
        if any(GDAL_NODATA in page.tags and find_empty_segments(page).any() for page in pages):
            return None
        return maker


def find_whole_page(path: Path) -> int | None:
    """Return the index of the page that has to be decoded whole, or None if `TiffPicture` can read the file.

    Raises ImageError if the file is no TIFF, is damaged, or holds anything but one 8-bit picture.
    """
    with open_layout(path) as layout:
        check_picture(path, layout)
        for page in layout.base:
            check_segment_size(path, page)
        if all(map(is_decoded_by_segment, layout.base)):
            return None
        return check_decoded_whole(path, layout)


class TiffPicture(FileReader[TiffHandle]):
    """The picture of a TIFF file (see `open_layout`), with the levels in its SubIFDs or other pages.

    A read decodes only the tiles or strips that it intersects; of uncompressed data it reads only the wanted bytes.
    Raises ImageError if a file holds a stack of several pictures.
    """

    def _open(self) -> tuple[TiffHandle, Sequence[Level], float | None]:
        with open_layout(self.path) as layout:
            check_picture(self.path, layout)
            base = layout.base[0]
            is_grey = base.photometric != PALETTE and len(layout.base) == get_colour_count(base) == 1
            check_stored_colours(self.path, base.tags.valueof(_ICC_PROFILE), "L" if is_grey else "RGB")
            if not all(map(is_decoded_by_segment, layout.base)):
                raise make_changed_error(self.path)
            # tifffile has parsed the tags; from here on only offsets and bare descriptors are needed.
            files = {path: Descriptor(path) for path in set(layout.paths)}
            levels = []
            for group in _list_levels(self.path, layout):
                readers = [
                    TiffPageReader(path, page, files[path], base)
                    for path, page, base in zip(layout.paths, group, layout.base, strict=True)
                ]
                levels.append((tuple(readers), ColourRule.of(group)))
            microns = layout.microns_per_px
        return levels, make_levels([pages[0].shape for pages, _ in levels]), microns

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of a level: a tile or strip, or single pixels if it is uncompressed."""
        return self.handle[level][0][0].decode_block

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        (pages, rule), (height_px, width_px) = self.handle[level], out.shape[:2]
        with translate_errors(self.path):
            if rule.is_plain and [page.channels for page in pages] == [3]:  # straight into the result
                pages[0].fill(out, y0, x0)
                return
            channels, step = sum(page.channels for page in pages), pages[0].decode_block.rows
            for top, bottom in split_row_bands(y0, y0 + height_px, width_px * channels, step):
                band = np.empty((bottom - top, width_px, channels), pages[0].dtype)
                first = 0
                for page in pages:
                    page.fill(band[..., first : first + page.channels], top, x0)
                    first += page.channels
                out[top - y0 : bottom - y0] = rule.convert(band)


def _list_levels(path: Path, layout: TiffLayout) -> list[tuple[TiffPage, ...]]:
    """Return the pages of each level, finest first."""
    # The levels are the SubIFDs of the base page, or other pages of the file that look like copies of it.
    #
    #     page 0  base -- SubIFD 0  1/2          page 0  base        page 1  label, other aspect ratio: no level
    #                  -- SubIFD 1  1/4          page 2  1/4         page 3  1/16
    #
    # A level has as many pages as the base: with a page per channel, each of them lists its own SubIFDs.
    named = [list_sub_pages(page_path, page) for page_path, page in zip(layout.paths, layout.base, strict=True)]
    coarser = [group for group in zip(*named, strict=False) if group] or [(page,) for page in layout.others]
    levels = [layout.base]
    for group in sorted(coarser, key=lambda group: -group[0].imagewidth):
        if all(map(_is_reduced_copy, group, layout.base)) and group[0].imagewidth < levels[-1][0].imagewidth:
            levels.append(group)
    return levels


def _is_reduced_copy(page: TiffPage, base: TiffPage) -> bool:
    """Return whether a page is a reduced copy of the base: the same channels, and the same aspect ratio up to rounding.

    The label and macro images that slides contain have other aspect ratios.
    """
    shared = ("samplesperpixel", "bitspersample", "sampleformat", "imagedepth", "extrasamples")
    alike = all(getattr(page, name) == getattr(base, name) for name in shared) and not page.is_mask
    turned = page.tags.valueof(ORIENTATION, base.tags.valueof(ORIENTATION, 1)) != base.tags.valueof(ORIENTATION, 1)
    if not alike or turned or not is_decoded_by_segment(page) or page.imagewidth >= base.imagewidth:
        return False
    scale = base.imagewidth / page.imagewidth
    return bool(page.is_tiled or page.is_reduced) and abs(base.imagelength / scale - page.imagelength) <= 2
