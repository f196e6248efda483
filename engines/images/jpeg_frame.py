"""The frame header of JPEG data, which says how they are coded (ITU T.81, B.2.2)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MODES = {
    0xC0: "baseline",
    0xC1: "extended",
    0xC2: "progressive",
    0xC3: "lossless",
    0xC9: "arithmetic",
    0xCA: "progressive arithmetic",
    0xCB: "lossless arithmetic",
    0xF7: "JPEG-LS",
}


@dataclass(frozen=True)
class JpegFrame:
    """A frame: `bits` per channel, `rows` and `cols` in pixels (0 rows: given after the scan), number of `channels`."""

    mode: str
    bits: int
    rows: int
    cols: int
    channels: int


def read_frame(data: bytes) -> JpegFrame | None:
    """Return the first frame of JPEG data, or None if there is none.

    >>> read_frame(bytes.fromhex("ffd8 ffc0 0011 08 0003 0004 03 011100 021101 031101"))
    JpegFrame(mode='baseline', bits=8, rows=3, cols=4, channels=3)
    """
    #     FFD8 | FFE0 length ... | FFDB length ... | FFC0 length, bits, rows, columns, channels, ... | FFDA length ...
    #
    # FFC0 to FFCF begin a frame, except C4 (Huffman tables), C8 (reserved) and CC (arithmetic coding tables). A marker
    # may be preceded by any number of FF.
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            return JpegFrame(_MODES.get(marker, "hierarchical"), *struct.unpack_from(">BHHB", data, at + 4))
        at += 1 if marker == 0xFF else 2 + length
    return None
