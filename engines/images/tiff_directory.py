"""The pages of a TIFF file, each checked before the next is parsed: sizes in a file's header cannot be trusted."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tifffile import TiffFile, TiffPage

from mpi4dl_nb.engines.images.files import make_damaged_error

MOST_PAGES = 64  # pages that are inspected: a pyramid has about ten, a time series thousands
MOST_SUB_PAGES = 16  # SubIFDs per page: one for each halving
MOST_TAGS = 1000  # tags per page: microscope vendors add dozens
TEXT_BYTES = 1 << 26  # of a description: a large high-content screen writes a tenth of that
_TEXTS = (270, 700)  # ImageDescription (vendor text or OME-XML) and Adobe XMP


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
    return _collect_pages(path, page.pages or (), MOST_SUB_PAGES) if page.subifds else []


def _collect_pages(path: Path, pages: Iterable[object], most: int) -> list[TiffPage]:
    """Return up to `most` pages, checking each before the next is parsed.

    A crafted file may list the same page thousands of times, with as many tags as a page can have. Raises ImageError if
    a page has too many tags, or a tag more values than the file has bytes: tifffile skips such a tag, but libtiff
    allocates memory for all its values.
    """
    #     a page:    count | tag tag tag ... | offset of the next page
    #     each tag:  code, type, number of values, value or its offset    (12 bytes; in BigTIFF 20)
    checked = []
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
        checked.append(page)
    return checked
