"""The pages of a TIFF file that make up its picture, and checks that apply whichever reader decodes them.

NewSubfileType (TIFF 6.0, p. 36) gives the kind of each page: 1 is a reduced copy of another page, 4 a transparency mask
for another page. The first page may be either, so the picture is the first page that is neither.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from xml.parsers import expat

from tifffile import COMPRESSION, PHOTOMETRIC, TiffFile, TiffPage

from engines.errors import ImageError
from engines.images.files import make_damaged_error
from engines.images.regular_file import refuse_doctype

PLAIN, JPEG = 1, 7
JPEG_2000 = (33005, 34712)
DECODED = (PLAIN, 5, JPEG, 8, 32773, 32946, 50000, *JPEG_2000)  # none, LZW, JPEG, deflate, PackBits, Zstandard
MULTIPLIED, ALPHA = 1, 2
MOST_PAGES = 64  # pages that are inspected: a pyramid has about ten, a time series thousands
MOST_SUB_PAGES = 16  # SubIFDs per page: one for each halving
MOST_TAGS = 1000  # tags per page: microscope vendors add dozens
TEXT_BYTES = 1 << 26  # of a description: a large high-content screen writes a tenth of that
_TEXTS = (270, 700)  # ImageDescription (vendor text or OME-XML) and Adobe XMP
WIDEST_UM = 50.0  # of a pixel: above that, a resolution is that of a screen or printer (72 ... 300 dots per inch)
_MICRONS = {2: 25_400.0, 3: 10_000.0}  # micrometres per inch and per centimetre
_BY_PILLOW = (2, 3, 4, 6, 32771, 34925)  # compressions: fax, old JPEG, uncompressed 16-bit words, LZMA
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
    """The picture's full-size pages (`base`: one, or one per channel), and other pages that may be reduced copies.

    `number` is the index of the first base page in the file, or None if that page is a SubIFD, a page within a page.
    """

    base: tuple[TiffPage, ...]
    number: int | None
    others: tuple[TiffPage, ...]
    is_ome: bool
    microns_per_px: float | None


def find_picture(path: Path, file: TiffFile) -> TiffLayout:
    """Return the layout of a TIFF file. Raises ImageError if it is damaged, or holds several pictures or a stack."""
    # In OME-TIFF the XML says which pages are the picture; in any other file, the pages themselves:
    #
    #     OME      page first_page .. + planes: one, or one per channel; levels are their SubIFDs
    #     others   the first page that is neither a reduced copy nor a mask; levels are SubIFDs or other pages
    pages = list_pages(path, file)
    if file.is_ome:
        planes, start, microns = parse_ome(path, file.ome_metadata or "")
        stop = start + planes
        base = tuple(pages[start:stop])
        if len(base) < planes:
            raise make_damaged_error(
                path, f"its OME-XML speaks of pages {start} to {stop - 1}, but there are {len(pages)}"
            )
        if len({page.shape for page in base}) > 1:
            raise make_damaged_error(path, f"pages {start} to {stop - 1} are not the channels of one picture")
        return TiffLayout(base, start, (), True, microns)
    # The pages that are neither a reduced copy nor a mask, or else the largest copy, or else the first page. (Camera
    # files store the preview as the page and the picture as its SubIFD.)
    inner = (each for page in pages for each in list_sub_pages(path, page))
    copies = sorted((page for page in pages if not page.is_mask), key=_count_pixels, reverse=True)
    groups = ([page for page in group if not page.is_reduced and not page.is_mask] for group in (pages, inner))
    full = next((group for group in (*groups, copies[:1]) if group), pages[:1])
    others = tuple(page for page in pages if page is not full[0] and not page.is_mask)
    _check_single(path, file, full, others)
    number = next((number for number, page in enumerate(pages) if page is full[0]), None)
    # A resolution is also what programs write for a screen or printer, so that a coarse one means nothing.
    tags, microns = full[0].tags, None
    unit, (pixels, units) = tags.valueof(296, 2), tags.valueof(282, (0, 1))
    if unit in _MICRONS and pixels and units and 0 < _MICRONS[unit] * units / pixels < WIDEST_UM:
        microns = _MICRONS[unit] * units / pixels
    return TiffLayout((full[0],), number, others, False, microns)


def check_picture(path: Path, layout: TiffLayout) -> None:
    """Raise ImageError if the pages hold anything but 8-bit grey or colours, or cannot be decoded."""
    page = layout.base[0]
    bits = page.bitspersample if isinstance(page.bitspersample, int) else max(page.bitspersample)
    # No single way of scaling deeper samples to 8 bits is right for all pictures.
    scale = (
        "Scale it to 0 ... 255 first, "
        "for instance by skimage.util.img_as_ubyte or skimage.exposure.rescale_intensity, and pass the array."
    )
    if page.sampleformat != 1:
        kind = _OTHER_NUMBERS.get(page.sampleformat, "numbers of an unknown kind")
        raise ImageError(f"{path} has {kind} of {bits} bits, and pictures here have 8 bits without a sign. {scale}")
    if bits not in (1, 2, 4, 8) or page.dtype is None:
        raise ImageError(f"{path} has {bits} bits per channel, and pictures here have 8 bits. {scale}")
    if page.imagedepth != 1:
        raise ImageError(f"{path} holds a stack of {page.imagedepth} planes in one page. Save one plane by itself.")
    if page.compression not in (*DECODED, *_BY_PILLOW):
        raise ImageError(
            f"{path} is compressed by {_get_name(COMPRESSION, page.compression)}, which is not read here. Save it "
            "without compression, or with LZW, deflate, JPEG, JPEG 2000 or Zstandard."
        )
    samples, photometric = int(page.samplesperpixel), int(page.photometric)
    if photometric not in (_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _YCBCR):
        kind = _NO_COLOURS.get(photometric, f"values of the kind {_get_name(PHOTOMETRIC, photometric)}")
        raise ImageError(f"{path} holds {kind}. Convert it to 8-bit RGB or grey and save it again.")
    colours = 3 if photometric in (_RGB, _YCBCR) else 1
    extra = samples - colours
    # The first three samples of an RGB page are its colours; further ones are ignored. In OME all channels are equal.
    ignorable = photometric == _RGB and not layout.is_ome
    if extra < 0 or (extra > 0 and not ignorable and not (extra == 1 and find_alpha_channel(page) == colours)):
        raise ImageError(
            f"{path} has {samples} channels, and the file does not say that one of them is transparency. "
            "A picture is grey, or red, green and blue: save the channels you want by themselves."
        )


def list_pages(path: Path, file: TiffFile) -> list[TiffPage]:
    """Return the first `MOST_PAGES` pages. Raises ImageError if the page list is truncated.

    tifffile silently omits pages after a truncation, so the offset that follows its last page must be 0.
    """
    file.filehandle.seek(file.pages.next_page_offset or 0)
    if any(file.filehandle.read(file.tiff.offsetsize)):
        raise make_damaged_error(path, f"its list of pages breaks off after page {len(file.pages)}")
    pages = _collect_pages(path, file.pages, MOST_PAGES)
    if not pages:
        raise make_damaged_error(path, "it has no pages")
    return pages


def list_sub_pages(path: Path, page: TiffPage) -> list[TiffPage]:
    """Return the SubIFDs of a page."""
    return _collect_pages(path, page.pages, MOST_SUB_PAGES) if page.subifds else []


def _collect_pages(path: Path, pages: Iterable[object], most: int) -> list[TiffPage]:
    """Return up to `most` pages, checking each before the next is parsed.

    A crafted file may list the same page thousands of times, with as many tags as a page can have. Raises ImageError if
    a page has too many tags, or a tag more values than the file has bytes: tifffile skips such a tag, but libtiff
    allocates memory for all its values.
    """
    #     a page:    count | tag tag tag ... | offset of the next page
    #     each tag:  code, type, number of values, value or its offset    (12 bytes; in BigTIFF 20)
    found = []
    for page in islice(pages, most):
        if not isinstance(page, TiffPage):
            continue
        handle, form = page.parent.filehandle, page.parent.tiff
        handle.seek(page.offset)
        (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
        if count > MOST_TAGS:
            raise make_damaged_error(
                path, f"page {page.index} says that it has {count} tags, where {MOST_TAGS} are many"
            )
        entries = handle.read(count * form.tagsize)
        entry = struct.Struct(form.byteorder + ("HHQ8x" if form.is_bigtiff else "HHI4x"))
        for code, _, values in entry.iter_unpack(entries) if form.tagsize == entry.size else ():
            if values > handle.size:
                raise make_damaged_error(path, f"tag {code} of page {page.index} says that it has {values} values")
            if code in _TEXTS and values > TEXT_BYTES:
                raise make_damaged_error(path, f"the text in tag {code} of page {page.index} has {values} bytes")
        found.append(page)
    return found


def _check_single(path: Path, file: TiffFile, full: Sequence[TiffPage], others: Sequence[TiffPage]) -> None:
    base, sides = full[0], _get_sides(full[0])
    stack = any(_get_sides(page) == sides for page in full[1:])
    if not stack and base is file.pages.first:
        # ImageJ and tifffile write a stack as one page, whose data further planes without pages follow. Only their
        # metadata shows that.
        shaped = file.shaped_metadata or ()
        values = max((math.prod(each.get("shape", ())) for each in shaped[:1]), default=0)
        stack = (file.imagej_metadata or {}).get("images", 1) > 1 or values > base.size
    if stack:
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


def _get_name(names: type, number: int) -> str:
    try:
        return str(names(number).name)
    except ValueError:
        return f"number {number}"


def find_alpha_channel(page: TiffPage) -> int | None:
    """Return the index of the alpha channel (ExtraSamples 1 or 2: TIFF 6.0, p. 31), or None if there is none."""
    extras = [int(each) for each in page.extrasamples]
    first = int(page.samplesperpixel) - len(extras)
    return next((first + place for place, each in enumerate(extras) if each in (MULTIPLIED, ALPHA)), None)


# The OME-XML of an OME-TIFF file, of which only the first picture is read (OME data model, Pixels).


_OME_MICRONS = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}


def parse_ome(path: Path, text: str) -> tuple[int, int, float | None]:
    """Return how many pages the picture in OME-XML has, its first page, and micrometres per pixel (None: unknown).

    Raises ImageError if the text is damaged, or describes a stack or channels that are no colours.
    """
    try:
        #     <OME><Image><Pixels SizeZ SizeT SizeC PhysicalSizeX ...>
        #         <Channel SamplesPerPixel/> ... <TiffData IFD/> ...
        #
        # RGB is either one channel of three samples, in one page, or three channels of one sample, a page each.
        found = _find_attributes(text, "Pixels", ("Channel", "TiffData"))
        pixels = found["Pixels"]
        depth, times, channels = (int(pixels[f"Size{axis}"]) for axis in "ZTC")
        samples = int(found.get("Channel", {}).get("SamplesPerPixel", 1))
        first = int(found.get("TiffData", {}).get("IFD", 0))
        planes = channels // max(1, samples)
    except (expat.ExpatError, LookupError, ValueError, OverflowError) as error:
        raise make_damaged_error(path, f"its OME-XML cannot be read ({type(error).__name__}: {error})") from error
    if (depth, times) != (1, 1) or (planes, samples) not in ((1, 1), (1, 2), (1, 3), (1, 4), (3, 1)):
        raise ImageError(
            f"{path} holds a stack: {depth} focal planes, {times} times, {channels} channels of {samples}. "
            "A picture is one plane of grey, or of red, green and blue: save that by itself."
        )
    if first < 0:
        raise make_damaged_error(path, f"its OME-XML speaks of page {first}")
    sides = []  # of a pixel, in micrometres, as far as they are given
    for axis in "XY":
        with suppress(KeyError, ValueError):
            unit = _OME_MICRONS.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"), 0)
            sides.append(float(pixels[f"PhysicalSize{axis}"]) * unit)
    return planes, first, sum(sides) / 2 if len(sides) == 2 and min(sides) > 0 else None


def _find_attributes(text: str | bytes, outer: str, inner: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the attributes of the first element `outer`, and of its first direct child of each name in `inner`.

    Names are given without namespaces. No tree is built, and parsing stops after these elements, since the document may
    have megabytes of other content. Raises ExpatError, and ValueError for a document type.

    >>> _find_attributes("<a><n:b c='1'><d e='2'/><d e='3'/></n:b><b/></a>", "b", ["d", "f"])
    {'b': {'c': '1'}, 'd': {'e': '2'}}
    """
    # Two states: until `outer` is met, only its name is looked for; from then on, the depth tells its direct children
    # from deeper elements, and its own end from theirs.
    parser, found, depth = expat.ParserCreate(), dict[str, dict[str, str]](), 0

    def find_outer(name: str, attributes: dict[str, str]) -> None:
        if name.endswith(outer) and name.rpartition(":")[2] == outer:
            found[outer] = attributes
            parser.StartElementHandler, parser.EndElementHandler = find_inner, end_element

    def find_inner(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        plain = name.rpartition(":")[2]
        if depth == 1 and plain in inner:
            found.setdefault(plain, attributes)
        if len(found) == 1 + len(inner):
            raise _FoundAllError

    def end_element(_name: str) -> None:
        nonlocal depth
        depth -= 1
        if depth < 0:
            raise _FoundAllError

    parser.StartDoctypeDeclHandler, parser.StartElementHandler = refuse_doctype, find_outer
    with suppress(_FoundAllError):
        parser.Parse(text, True)
    return found


class _FoundAllError(Exception):
    """Raised to stop the parser once all wanted elements are found."""
