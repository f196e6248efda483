"""The image size in the headers of compressed data. Decoders trust it, so it is checked before decoding."""

from __future__ import annotations

import re
import struct

__all__ = ["MOST_SCANS", "count_jpeg_scans", "read_jpeg_2000_size", "read_jpeg_size"]

MOST_SCANS = 32  # of a progressive picture: programs write about 10, and a decoder visits every block in every scan
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # a marker that ends a scan: no stuffed 0, restart or padding
_SCAN, _END = 0xDA, 0xD9


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return rows and columns from the frame header of JPEG data (ITU T.81, B.2.2), or None if there is none."""
    #     FFD8 | FFE0 length ... | FFDB length ... | FFC0 length, precision, rows, columns, ... | FFDA length ... | data
    #
    # FFC0 to FFCF begin a frame, except C4 (Huffman tables), C8 (reserved) and CC (arithmetic coding tables). A marker
    # may be preceded by any number of FF.
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            rows, cols = struct.unpack_from(">HH", data, at + 5)
            return rows, cols
        at += 1 if marker == 0xFF else 2 + length
    return None


def count_jpeg_scans(data: bytes) -> int:
    """Count the scans of JPEG data (ITU T.81, B.2.3), at most up to `MOST_SCANS` + 1."""
    # Data of a scan have no length: its end is the next marker. FF in data is followed by a stuffed 0, or by a restart
    # marker (D0 to D7), neither of which ends it.
    at, scans = 2, 0
    while scans <= MOST_SCANS and (found := _MARKER.search(data, at)) and found.end() + 2 <= len(data):
        marker, at = data[found.end() - 1], found.end()
        if marker == _END:
            break
        scans += marker == _SCAN
        (length,) = struct.unpack_from(">H", data, at)
        at += length
    return scans


def read_jpeg_2000_size(data: bytes) -> tuple[int, int] | None:
    """Return rows and columns of a JPEG 2000 code stream (ITU T.800, A.5.1), with or without enclosing boxes."""
    at = data.find(b"\xff\x4f\xff\x51")
    if at < 0 or at + 24 > len(data):
        return None
    right, bottom, left, top = struct.unpack_from(">4I", data, at + 8)
    return bottom - top, right - left
