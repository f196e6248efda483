"""TIFF, BigTIFF and OME-TIFF, pyramids included, through tifffile's parser and imagecodecs' decoders."""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tifffile import TiffFile, TiffPage

from engines.errors import ImageError
from engines.images.files import FileReader, damaged, reasons
from engines.images.ome import OmeImage
from engines.images.reader import WHITE, Level, Pixels, bands
from engines.images.tiff_page import Page, check_segment_size, in_colours, is_plain

__all__ = ["TiffPicture", "check_segments", "is_segmented", "vendor"]

MOST_PAGES = 64  # that are looked at: a pyramid has ten, and a time series thousands
WIDEST_UM = 50.0  # of a pixel: a resolution as of a screen or printer (72 ... 300 dots per inch) is no measure
_VENDORS = ("svs", "ndpi", "scn", "bif", "philips")
_MICRONS = {2: 25_400.0, 3: 10_000.0}  # in an inch, in a centimetre

_Planes = tuple[Page, ...]
"""One page with all channels, or one for each."""


@dataclass
class _Handle:
    fd: int
    levels: tuple[_Planes, ...]
    microns: float | None


def vendor(path: Path) -> str | None:
    """The maker of a slide in a TIFF file, which OpenSlide knows best; None for files of no maker's own kind."""
    with reasons(path), TiffFile(path) as file:
        return next((name for name in _VENDORS if getattr(file, f"is_{name}")), None)


def check_segments(path: Path) -> None:
    """Raises ImageError where tiles that a TIFF file lists do not lie in it: it was cut off, or is damaged."""
    with reasons(path), TiffFile(path) as file:
        for page in _pages(path, file):
            if page.is_tiled:
                Page(path, page)


def is_segmented(path: Path) -> bool:
    """Whether `TiffPicture` reads this file. Raises ImageError where it is no TIFF, or damaged."""
    with reasons(path), TiffFile(path) as file:
        first, *_ = _pages(path, file)
        _refuse_deep(path, first)
        check_segment_size(path, first)
        return is_plain(first)


class TiffPicture(FileReader[_Handle]):
    """The first picture of a TIFF file, with its levels, from SubIFDs or from the pages that follow.

    A read decodes the tiles or strips that it touches; of what is not compressed it reads the bytes that it wants.
    Raises ImageError where a file holds a stack of several pictures.
    """

    def _open(self) -> _Handle:
        with reasons(self.path), TiffFile(self.path) as file:
            levels, microns = _levels(self.path, file)
        with reasons(self.path):
            fd = os.open(self.path, os.O_RDONLY)
        handle = _Handle(fd, levels, microns)
        weakref.finalize(handle, os.close, fd)
        return handle

    def _levels(self, handle: _Handle) -> Sequence[Level]:
        finest = handle.levels[0][0].shape
        shapes = [planes[0].shape for planes in handle.levels]
        return [Level(*shape, (finest[0] / shape[0] + finest[1] / shape[1]) / 2) for shape in shapes]

    def _microns(self, handle: _Handle) -> float | None:
        return handle.microns

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        handle = self.handle
        planes, (height_px, width_px) = handle.levels[level], out.shape[:2]
        with reasons(self.path):
            if [page.channels for page in planes] == [3]:
                planes[0].fill(handle.fd, out, y0, x0)
                return
            channels = sum(page.channels for page in planes)
            for top, bottom in bands(y0, y0 + height_px, width_px * channels, planes[0].segment_rows):
                band = np.full((bottom - top, width_px, channels), WHITE, np.uint8)
                for number, page in enumerate(planes):
                    page.fill(handle.fd, band[..., number : number + page.channels], top, x0)
                out[top - y0 : bottom - y0] = in_colours(band, planes[0].alpha)


def _refuse_deep(path: Path, page: TiffPage) -> None:
    """More than 8 bits of an integer can be scaled to 8 in many ways, and none is right for all."""
    bits = page.bitspersample
    if (bits if isinstance(bits, int) else max(bits)) > 8:
        kind = "floating-point numbers" if page.sampleformat == 3 else f"{bits} bits per channel"
        raise ImageError(
            f"{path} has {kind}, and pictures here have 8 bits. Scale it to 0 ... 255 first, "
            "for instance by skimage.util.img_as_ubyte or skimage.exposure.rescale_intensity, and pass the array."
        )


def _levels(path: Path, file: TiffFile) -> tuple[tuple[_Planes, ...], float | None]:
    """The pages of each level, finest first, and the size of a pixel in micrometres."""
    first = file.pages.first
    ome = OmeImage.parse(path, file.ome_metadata) if file.is_ome else None
    pages = _pages(path, file)
    start = ome.first_page if ome else 0
    planes = ome.planes if ome else 1
    base = pages[start : start + planes]
    if len(base) < planes:
        raise damaged(path, f"its OME-XML speaks of pages {start} to {start + planes - 1}, but there are {len(pages)}")
    if ome is None and (_declares_more(file, first) or any(page.shape == first.shape for page in pages[1:])):
        raise ImageError(f"{path} holds several pictures of one size, a stack. Save the one you want by itself.")
    if len({page.shape for page in base}) > 1 or not all(map(is_plain, base)):
        raise damaged(path, f"pages {start} to {start + planes - 1} are not the channels of one 8-bit picture")
    coarser = _sub_pages(file, base) or [(page,) for page in pages[start + planes :] if planes == 1 and not ome]
    chosen = [tuple(Page(path, page) for page in base)]
    for group in sorted(coarser, key=lambda group: -group[0].imagewidth):
        if all(map(_continues, group, base)) and group[0].imagewidth < chosen[-1][0].shape[1]:
            chosen.append(tuple(Page(path, page) for page in group))
    return tuple(chosen), ome.microns_per_px if ome else _resolution(first)


def _declares_more(file: TiffFile, first: TiffPage) -> bool:
    """Whether ImageJ or tifffile says that more planes follow the first page's pixels, without pages of their own."""
    shaped = file.shaped_metadata or ()
    values = max((math.prod(each.get("shape", ())) for each in shaped[:1]), default=0)
    return (file.imagej_metadata or {}).get("images", 1) > 1 or values > first.size


def _pages(path: Path, file: TiffFile) -> list[TiffPage]:
    """The first pages, if all are there: one that was cut off is left out by the parser without a word."""
    file.filehandle.seek(file.pages.next_page_offset or 0)
    if any(file.filehandle.read(file.tiff.offsetsize)):
        raise damaged(path, f"its list of pages breaks off after page {len(file.pages)}")
    pages = [page for page in islice(file.pages, MOST_PAGES) if isinstance(page, TiffPage)]
    for page in pages:
        _check_tags(path, file, page)
    return pages


def _check_tags(path: Path, file: TiffFile, page: TiffPage) -> None:
    """A tag of more values than the file has bytes: the parser leaves it out, but libtiff makes room for them."""
    handle, form = file.filehandle, file.tiff
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    entries = handle.read(count * form.tagsize)
    entry = struct.Struct(form.byteorder + ("HHQ8x" if form.is_bigtiff else "HHI4x"))
    for code, _, values in entry.iter_unpack(entries) if form.tagsize == entry.size else ():
        if values > handle.size:
            raise damaged(path, f"tag {code} of page {page.index} says that it has {values} values")


def _sub_pages(file: TiffFile, base: Sequence[TiffPage]) -> list[tuple[TiffPage, ...]]:
    """Level by level, the pages that the base's pages name as their own."""
    named = [list(page.pages)[:MOST_PAGES] if page.subifds else [] for page in base]
    return [tuple(group) for group in zip(*named, strict=False)]


def _continues(page: TiffPage, base: TiffPage) -> bool:
    """Whether a page is the base made smaller: the same colours, and sides in the same ratio but for rounding.

    Labels and photographs of the whole glass, which slides carry along, have other sides.
    """
    if not is_plain(page) or page.samplesperpixel != base.samplesperpixel or page.imagewidth >= base.imagewidth:
        return False
    scale = base.imagewidth / page.imagewidth
    return bool(page.is_tiled or page.is_reduced) and abs(base.imagelength / scale - page.imagelength) <= 2


def _resolution(page: TiffPage) -> float | None:
    """Micrometres per pixel, where a microscope rather than a printer wrote it."""
    unit, (pixels, units) = page.tags.valueof(296, 2), page.tags.valueof(282, (0, 1))
    if unit not in _MICRONS or not pixels or not units:
        return None
    microns = _MICRONS[unit] * units / pixels
    return microns if 0 < microns < WIDEST_UM else None
