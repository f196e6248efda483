"""Which pages of a TIFF file are its picture, and what of that is refused whichever reader would decode it.

A file says of each page what it is (NewSubfileType, TIFF 6.0, p. 36): 1 is a reduced copy of another page, and 4 a
transparency mask for another page. The first page may be either, so that the picture is the first page that is neither.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tifffile import COMPRESSION, PHOTOMETRIC, TiffFile, TiffPage

from engines.errors import ImageError
from engines.images.files import make_damaged_error
from engines.images.ome import OmeImage
from engines.images.tiff_page import DECODED, find_alpha_channel

__all__ = ["TiffLayout", "check_picture", "find_picture", "list_pages", "list_sub_pages"]

MOST_PAGES = 64  # that are looked at: a pyramid has ten, and a time series thousands
MOST_SUB_PAGES = 16  # of each: one for each halving
MOST_TAGS = 1000  # of a page: makers of microscopes add dozens
TEXT_BYTES = 1 << 26  # of a description: what a large screen writes into it is a tenth of that
_TEXTS = (270, 700)  # what the picture is, by the maker's words or OME-XML; and Adobe's XMP
WIDEST_UM = 50.0  # of a pixel: a resolution as of a screen or printer (72 ... 300 dots per inch) is no measure
_MICRONS = {2: 25_400.0, 3: 10_000.0}  # in an inch, in a centimetre
_BY_PILLOW = (2, 3, 4, 6, 32771, 34925)  # compressions: of a fax, old JPEG, none in words of 16 bits, LZMA
_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_NO_COLOURS = {
    4: "a transparency mask for another picture",
    5: "printing inks (CMYK)",
    8: "CIE L*a*b* colours",
    9: "ICC L*a*b* colours",
    32803: "what a camera's sensor saw (CFA)",
    34892: "what a camera's sensor saw (LinearRaw)",
}
_OTHER_NUMBERS = {2: "signed integers", 3: "floating-point numbers", 5: "complex integers", 6: "complex numbers"}


@dataclass(frozen=True)
class TiffLayout:
    """The picture's pages at full size (`base`: one, or one for each channel), and pages that may be smaller copies.

    `number` is the place of the first among the pages of the file; None where it is a SubIFD, a page within a page.
    """

    base: tuple[TiffPage, ...]
    number: int | None
    others: tuple[TiffPage, ...]
    is_ome: bool
    microns_per_px: float | None


def find_picture(path: Path, file: TiffFile) -> TiffLayout:
    """Raises ImageError where the file is damaged, or holds several pictures or a stack."""
    pages = list_pages(path, file)
    if file.is_ome:
        ome = OmeImage.parse(path, file.ome_metadata or "")
        start, stop = ome.first_page, ome.first_page + ome.planes
        base = tuple(pages[start:stop])
        if len(base) < ome.planes:
            raise make_damaged_error(
                path, f"its OME-XML speaks of pages {start} to {stop - 1}, but there are {len(pages)}"
            )
        if len({page.shape for page in base}) > 1:
            raise make_damaged_error(path, f"pages {start} to {stop - 1} are not the channels of one picture")
        return TiffLayout(base, start, (), True, ome.microns_per_px)
    full = _find_full_size(path, pages)
    others = tuple(page for page in pages if page is not full[0] and not page.is_mask)
    _check_single(path, file, full, others)
    number = next((number for number, page in enumerate(pages) if page is full[0]), None)
    return TiffLayout((full[0],), number, others, False, _read_resolution(full[0]))


def check_picture(path: Path, layout: TiffLayout) -> None:
    """Raises ImageError where the pages hold something else than 8-bit grey or colours, or cannot be decoded."""
    page = layout.base[0]
    _check_depth(path, page)
    if page.imagedepth != 1:
        raise ImageError(f"{path} holds a stack of {page.imagedepth} planes in one page. Save one plane by itself.")
    if page.compression not in (*DECODED, *_BY_PILLOW):
        raise ImageError(
            f"{path} is compressed by {_get_name(COMPRESSION, page.compression)}, which is not read here. Save it "
            "without compression, or with LZW, deflate, JPEG, JPEG 2000 or Zstandard."
        )
    _check_channels(path, layout)


def list_pages(path: Path, file: TiffFile) -> list[TiffPage]:
    """The first pages, if all are there: one that was cut off is left out by the parser without a word."""
    file.filehandle.seek(file.pages.next_page_offset or 0)
    if any(file.filehandle.read(file.tiff.offsetsize)):
        raise make_damaged_error(path, f"its list of pages breaks off after page {len(file.pages)}")
    pages = _collect_pages(path, file.pages, MOST_PAGES)
    if not pages:
        raise make_damaged_error(path, "it has no pages")
    return pages


def list_sub_pages(path: Path, page: TiffPage) -> list[TiffPage]:
    """The pages that a page names as its own (SubIFDs)."""
    return _collect_pages(path, page.pages, MOST_SUB_PAGES) if page.subifds else []


def _collect_pages(path: Path, pages: Iterable[object], most: int) -> list[TiffPage]:
    """Each is looked at before the next one is parsed: thousands of them may be one, with all the tags there can be."""
    found = []
    for page in islice(pages, most):
        if isinstance(page, TiffPage):
            _check_tags(path, page)
            found.append(page)
    return found


def _find_full_size(path: Path, pages: Sequence[TiffPage]) -> list[TiffPage]:
    """The pages that are neither a smaller copy nor a mask; if all of them are, the largest copy, or else the first."""
    inner = (each for page in pages for each in list_sub_pages(path, page))
    for group in (pages, inner):  # camera files have the preview as their page, and the picture within it
        if found := [page for page in group if not page.is_reduced and not page.is_mask]:
            return found
    copies = [page for page in pages if not page.is_mask]
    return sorted(copies, key=_count_pixels, reverse=True)[:1] or list(pages[:1])


def _check_single(path: Path, file: TiffFile, full: Sequence[TiffPage], others: Sequence[TiffPage]) -> None:
    base, sides = full[0], _get_sides(full[0])
    alike = any(_get_sides(page) == sides for page in full[1:])
    if alike or (base is file.pages.first and _has_more_planes(file, base)):
        raise ImageError(f"{path} holds several pictures of one size, a stack. Save the one you want by itself.")
    for page in others:
        if _count_pixels(page) > _count_pixels(base):
            raise ImageError(
                f"{path} holds several pictures: one of {sides[0]} x {sides[1]} px comes first, and a larger one of "
                f"{page.imagelength} x {page.imagewidth} px later, and it does not say that the first is its preview. "
                "Save the one you want by itself."
            )


def _get_sides(page: TiffPage) -> tuple[int, int]:
    return int(page.imagelength), int(page.imagewidth)


def _count_pixels(page: TiffPage) -> int:
    return math.prod(_get_sides(page))


def _has_more_planes(file: TiffFile, first: TiffPage) -> bool:
    """Whether ImageJ or tifffile says that more planes follow the first page's pixels, without pages of their own."""
    shaped = file.shaped_metadata or ()
    values = max((math.prod(each.get("shape", ())) for each in shaped[:1]), default=0)
    return (file.imagej_metadata or {}).get("images", 1) > 1 or values > first.size


def _check_tags(path: Path, page: TiffPage) -> None:
    """A tag of more values than the file has bytes: the parser leaves it out, but libtiff makes room for them."""
    handle, form = page.parent.filehandle, page.parent.tiff
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    if count > MOST_TAGS:
        raise make_damaged_error(path, f"page {page.index} says that it has {count} tags, where {MOST_TAGS} are many")
    entries = handle.read(count * form.tagsize)
    entry = struct.Struct(form.byteorder + ("HHQ8x" if form.is_bigtiff else "HHI4x"))
    for code, _, values in entry.iter_unpack(entries) if form.tagsize == entry.size else ():
        if values > handle.size:
            raise make_damaged_error(path, f"tag {code} of page {page.index} says that it has {values} values")
        if code in _TEXTS and values > TEXT_BYTES:
            raise make_damaged_error(path, f"the text in tag {code} of page {page.index} has {values} bytes")


def _check_depth(path: Path, page: TiffPage) -> None:
    """More than 8 bits of an integer can be scaled to 8 in many ways, and none is right for all."""
    bits = page.bitspersample if isinstance(page.bitspersample, int) else max(page.bitspersample)
    scale = (
        "Scale it to 0 ... 255 first, "
        "for instance by skimage.util.img_as_ubyte or skimage.exposure.rescale_intensity, and pass the array."
    )
    if page.sampleformat != 1:
        kind = _OTHER_NUMBERS.get(page.sampleformat, "numbers of an unknown kind")
        raise ImageError(f"{path} has {kind} of {bits} bits, and pictures here have 8 bits without a sign. {scale}")
    if bits not in (1, 2, 4, 8) or page.dtype is None:
        raise ImageError(f"{path} has {bits} bits per channel, and pictures here have 8 bits. {scale}")


def _check_channels(path: Path, layout: TiffLayout) -> None:
    page = layout.base[0]
    samples, photometric = int(page.samplesperpixel), int(page.photometric)
    if photometric not in (_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _YCBCR):
        kind = _NO_COLOURS.get(photometric, f"values of the kind {_get_name(PHOTOMETRIC, photometric)}")
        raise ImageError(f"{path} holds {kind}. Convert it to 8-bit RGB or grey and save it again.")
    colours = 3 if photometric in (_RGB, _YCBCR) else 1
    extra = samples - colours
    # Of an RGB page the first three are the colours, whatever else was measured. In OME all channels are equals.
    ignorable = photometric == _RGB and not layout.is_ome
    if extra < 0 or (extra > 0 and not ignorable and not (extra == 1 and find_alpha_channel(page) == colours)):
        raise ImageError(
            f"{path} has {samples} channels, and the file does not say that one of them is transparency. "
            "A picture is grey, or red, green and blue: save the channels you want by themselves."
        )


def _get_name(names: type, number: int) -> str:
    try:
        return str(names(number).name)
    except ValueError:
        return f"number {number}"


def _read_resolution(page: TiffPage) -> float | None:
    """Micrometres per pixel, where a microscope rather than a printer wrote it."""
    unit, (pixels, units) = page.tags.valueof(296, 2), page.tags.valueof(282, (0, 1))
    if unit not in _MICRONS or not pixels or not units:
        return None
    microns = _MICRONS[unit] * units / pixels
    return microns if 0 < microns < WIDEST_UM else None
