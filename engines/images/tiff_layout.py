"""The pages of a TIFF file that make up its picture, and checks that apply whichever reader decodes them.

NewSubfileType (TIFF 6.0, p. 36) gives the kind of each page: 1 is a reduced copy of another page, 4 a transparency mask
for another page. The first page may be either, so the picture is the first page that is neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tifffile import COMPRESSION, PHOTOMETRIC, TiffFile, TiffPage

from mpi4dl_nb.engines.errors import AS_TENSORS, ImageError
from mpi4dl_nb.engines.images.files import translate_errors
from mpi4dl_nb.engines.images.ome_tiff import OmeFiles
from mpi4dl_nb.engines.images.tiff_directory import list_pages, list_sub_pages

PLAIN, JPEG = 1, 7
JPEG_2000 = (33005, 34712)
DECODED = (PLAIN, 5, JPEG, 8, 32773, 32946, 50000, *JPEG_2000)  # none, LZW, JPEG, deflate, PackBits, Zstandard
MULTIPLIED, ALPHA = 1, 2
WIDEST_UM = 50.0  # of a pixel: above that, a resolution is that of a screen or printer (72 ... 300 dots per inch)
_MICRONS = {2: 25_400.0, 3: 10_000.0}  # micrometres per inch and per centimetre
_BY_PILLOW = (2, 3, 4, 6, 32771, 34925)  # compressions: fax, old JPEG, uncompressed 16-bit words, LZMA
WHITE_IS_ZERO, GREY, RGB, PALETTE, YCBCR = 0, 1, 2, 3, 6
_NO_COLOURS = {
    4: "a transparency mask for another picture",
    5: "printing inks (CMYK)",
    8: "CIE L*a*b* colours",
    9: "ICC L*a*b* colours",
    32803: "what a camera's sensor saw (CFA)",
    34892: "what a camera's sensor saw (LinearRaw)",
}
CONVERT = "Convert it: gdal_translate -co COMPRESS=DEFLATE -co TILED=YES IN OUT.tif, or tiffcp -c zip IN OUT.tif."
_UNSIGNED = (1, 4)  # 4 is "undefined": readers take it for unsigned numbers
_INDEXED = 346
_METAMORPH = 33629  # UIC2Tag of MetaMorph's stacks (STK): six numbers for each plane
_COEFFICIENTS = (0.299, 0.587, 0.114)  # of red, green and blue in luminance (CCIR 601-1)
_OTHER_NUMBERS = {2: "signed integers", 3: "floating-point numbers", 5: "complex integers", 6: "complex numbers"}


@dataclass(frozen=True)
class TiffLayout:
    """The picture's full-size pages (`base`: one, or one per channel), and other pages that may be reduced copies.

    `paths` are the files of the base pages. `number` is the index of the first base page in the file, or None if that
    page is a SubIFD, a page within a page, or in another file. `validity` is a transparency mask of the same size,
    whose pixels are 0 where the picture has none.
    """

    base: tuple[TiffPage, ...]
    paths: tuple[Path, ...]
    number: int | None
    others: tuple[TiffPage, ...]
    is_ome: bool
    microns_per_px: float | None
    validity: TiffPage | None = None


@contextmanager
def open_layout(path: Path) -> Iterator[TiffLayout]:
    """Open a TIFF file, and the other files of its set, for its layout: tags can be read inside of the `with`.

    Raises ImageError if the file is damaged, or holds several pictures or a stack.
    """
    with translate_errors(path), ExitStack() as opened:
        yield _find_picture(path, opened.enter_context(TiffFile(path)), opened)


def _find_picture(path: Path, file: TiffFile, opened: ExitStack) -> TiffLayout:
    # In OME-TIFF the XML says which pages are the picture; in any other file, the pages themselves:
    #
    #     OME      pages of the image that is the scan: one, or one per channel; levels are their SubIFDs
    #     others   the first page that is neither a reduced copy nor a mask; levels are SubIFDs or other pages
    if file.is_ome:
        files = OmeFiles(path, file, opened)
        scan_pages, microns = files.find_pages()
        paths, base = zip(*scan_pages, strict=True)
        index = next((index for index, page in enumerate(files.pages.get(path, ())) if page is base[0]), None)
        return TiffLayout(base, paths, index, (), True, microns)
    pages = list_pages(path, file)
    # The pages that are neither a reduced copy nor a mask, or else the largest copy, or else the first page. (Camera
    # files store the preview as the page and the picture as its SubIFD.)
    inner = (sub_page for page in pages for sub_page in list_sub_pages(path, page))
    copies = sorted((page for page in pages if not page.is_mask), key=_count_pixels, reverse=True)
    groups = ([page for page in group if not page.is_reduced and not page.is_mask] for group in (pages, inner))
    full = next((group for group in (*groups, copies[:1]) if group), pages[:1])
    others = tuple(page for page in pages if page is not full[0] and not page.is_mask)
    _check_single(path, file, full, others)
    index = next((index for index, page in enumerate(pages) if page is full[0]), None)
    # A resolution is also what programs write for a screen or printer, so that a coarse one means nothing.
    tags, microns = full[0].tags, None
    unit, (pixels, units) = tags.valueof(296, 2), tags.valueof(282, (0, 1))
    if unit in _MICRONS and pixels and units and 0 < _MICRONS[unit] * units / pixels < WIDEST_UM:
        microns = _MICRONS[unit] * units / pixels
    sides = _get_sides(full[0])
    validity = (page for page in pages if page.is_mask and page is not full[0] and _get_sides(page) == sides)
    return TiffLayout((full[0],), (path,), index, others, False, microns, next(validity, None))


def check_picture(path: Path, layout: TiffLayout) -> None:
    """Raise ImageError if the pages hold anything but 8-bit grey or colours, or cannot be decoded."""
    for page in layout.base:
        _check_numbers(path, page)
        _check_colours(path, page, layout.is_ome)
    alike = {(page.photometric, page.bitspersample, page.samplesperpixel) for page in layout.base}
    if len(alike) > 1 or (len(layout.base) > 1 and layout.base[0].photometric not in (WHITE_IS_ZERO, GREY)):
        raise ImageError(
            f"{path} has its channels in pages of their own, which are no plain grey of one kind: it is not known "
            "which colours they are. Save them as one page of red, green and blue."
        )


def _check_numbers(path: Path, page: TiffPage) -> None:
    depths = set(np.atleast_1d(page.bitspersample).tolist())  # tifffile has several if the channels differ
    bits = " or ".join(map(str, sorted(depths)))
    # No single way of scaling deeper samples to 8 bits is right for all pictures.
    scale = (
        "Scale it to 0 ... 255 first, "
        "for instance by skimage.util.img_as_ubyte or skimage.exposure.rescale_intensity, and pass the array. "
        + AS_TENSORS
    )
    if page.sampleformat not in _UNSIGNED:
        kind = _OTHER_NUMBERS.get(page.sampleformat, "numbers of an unknown kind")
        raise ImageError(f"{path} has {kind} of {bits} bits, and pictures here have 8 bits without a sign. {scale}")
    if not depths <= {1, 2, 4, 8} or len(depths) > 1 or page.dtype is None:
        raise ImageError(f"{path} has {bits} bits per channel, and pictures here have 8 bits. {scale}")
    if page.imagedepth != 1:
        raise ImageError(
            f"{path} holds a stack of {page.imagedepth} planes in one page. Save one plane by itself. {AS_TENSORS}"
        )
    if page.compression not in (*DECODED, *_BY_PILLOW):
        raise ImageError(
            f"{path} is compressed by {_get_name(COMPRESSION, page.compression)}, which is not read here. Save it "
            f"without compression, or with LZW, deflate, JPEG, JPEG 2000 or Zstandard. {CONVERT}"
        )
    check_predictor(path, page)


def check_predictor(path: Path, page: TiffPage) -> None:
    """Raise ImageError if pixels are stored as differences of a kind that programs decode differently."""
    bits = page.bitspersample
    if page.predictor not in (1, 2, 3) or (page.predictor == 2 and bits not in (8, 16, 32, 64)):
        raise ImageError(
            f"{path} has pixels of {bits} bits that are stored as differences of kind {int(page.predictor)} "
            f"(Predictor), which programs decode differently. {CONVERT}"
        )


def _check_colours(path: Path, page: TiffPage, is_ome: bool) -> None:
    samples, photometric = int(page.samplesperpixel), int(page.photometric)
    if photometric not in (WHITE_IS_ZERO, GREY, RGB, PALETTE, YCBCR):
        kind = _NO_COLOURS.get(photometric, f"values of the kind {_get_name(PHOTOMETRIC, photometric)}")
        raise ImageError(f"{path} holds {kind}. Convert it to 8-bit RGB or grey and save it again.")
    if page.tags.valueof(_INDEXED, 0) == 1 and photometric != PALETTE:
        raise ImageError(f"{path} holds indices into a palette of another kind (tag 346). {CONVERT}")
    colours = get_colour_count(page)
    extra = samples - colours
    # The first three samples of an RGB page are its colours; further ones are ignored. In OME all channels are equal.
    ignorable = photometric == RGB and not is_ome
    alpha = find_alpha_channel(page)
    if extra < 0 or (extra > 0 and not ignorable and not (extra == 1 and alpha == colours)):
        raise ImageError(
            f"{path} has {samples} channels, and the file does not say that one of them is transparency. "
            f"A picture is grey, or red, green and blue: save the channels you want by themselves. {AS_TENSORS}"
        )
    if photometric in (WHITE_IS_ZERO, PALETTE) and alpha is not None and MULTIPLIED in page.extrasamples:
        raise ImageError(
            f"{path} has premultiplied alpha (ExtraSamples 1) on a palette or on grey whose white is 0, where it is "
            f"not defined what is multiplied. Save it as RGB or grey. {CONVERT}"
        )


def check_decoded_whole(path: Path, layout: TiffLayout) -> int:
    """Return the index of a page that Pillow decodes whole. Raises ImageError if it would not be read rightly."""
    page = layout.base[0]
    kind = "YCbCr colours without JPEG" if page.photometric == YCBCR else _get_name(COMPRESSION, page.compression)
    if layout.number is None or len(layout.base) > 1:
        where = "one channel to a page" if len(layout.base) > 1 else "in a page within a page"
        raise ImageError(f"{path} holds its picture {where}, and in a kind ({kind}) that is not read there. {CONVERT}")
    if not all(page.databytecounts) or not all(page.dataoffsets):
        raise ImageError(
            f"{path} leaves out blank tiles or strips, in a kind ({kind}) that is decoded whole. {CONVERT}"
        )
    if page.photometric == YCBCR:
        _check_ycbcr(path, page)
    return layout.number


def _check_ycbcr(path: Path, page: TiffPage) -> None:
    """Raise ImageError for YCbCr numbers (not JPEG, which defines its own) that Pillow does not read by their tags."""
    defaults = {529: _COEFFICIENTS, 532: (0, 255, 128, 255, 128, 255)}
    stated = {code: page.tags.valueof(code) for code in defaults}
    # Fractions, as pairs of whole numbers.
    values = {code: np.divide(pair[::2], pair[1::2]) for code, pair in stated.items() if pair is not None}
    other = [str(code) for code, numbers in values.items() if not np.allclose(numbers, defaults[code], atol=1e-3)]
    subsampled = page.compression == PLAIN and tuple(page.tags.valueof(530, (2, 2))) != (1, 1)
    if other or subsampled:
        what = f"tags {' and '.join(other)}" if other else "reduced colours (YCbCrSubSampling)"
        raise ImageError(f"{path} has YCbCr colours without JPEG, with {what}, which is not read here. {CONVERT}")


def _check_single(path: Path, file: TiffFile, full: Sequence[TiffPage], others: Sequence[TiffPage]) -> None:
    base, sides = full[0], _get_sides(full[0])
    stack = any(_get_sides(page) == sides for page in full[1:])
    if not stack and base is file.pages.first:
        # ImageJ and tifffile write a stack as one page, whose data further planes without pages follow. Only their
        # metadata shows that.
        shaped = file.shaped_metadata or ()
        values = max((math.prod(metadata.get("shape", ())) for metadata in shaped[:1]), default=0)
        stack = (file.imagej_metadata or {}).get("images", 1) > 1 or values > base.size
        stack |= int(getattr(base.tags.get(_METAMORPH), "count", 1)) > 1
    if stack:
        raise ImageError(
            f"{path} holds several pictures of one size, a stack. Save the one you want by itself. {AS_TENSORS}"
        )
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


def get_colour_count(page: TiffPage) -> int:
    """Return how many of a page's first channels are shades or colours."""
    return 3 if page.photometric in (RGB, YCBCR) else 1


def find_alpha_channel(page: TiffPage) -> int | None:
    """Return the index of the alpha channel (ExtraSamples 1 or 2: TIFF 6.0, p. 31), or None if there is none."""
    extras = [int(extra) for extra in page.extrasamples]
    first = get_colour_count(page)
    return next((first + index for index, extra in enumerate(extras) if extra in (MULTIPLIED, ALPHA)), None)
