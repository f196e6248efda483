"""The size that compressed data say they have: a decoder believes it, so it is looked at first."""

from __future__ import annotations

import struct

__all__ = ["jpeg_2000_size", "jpeg_size"]


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Rows and columns that the frame header of JPEG data speaks of (ITU T.81, B.2.2); None where there is none."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            rows, cols = struct.unpack_from(">HH", data, at + 5)
            return rows, cols
        at += 1 if marker == 0xFF else 2 + length
    return None


def jpeg_2000_size(data: bytes) -> tuple[int, int] | None:
    """The same, of a JPEG 2000 code stream (ITU T.800, A.5.1), which may lie in a file of boxes."""
    at = data.find(b"\xff\x4f\xff\x51")
    if at < 0 or at + 24 > len(data):
        return None
    right, bottom, left, top = struct.unpack_from(">4I", data, at + 8)
    return bottom - top, right - left
