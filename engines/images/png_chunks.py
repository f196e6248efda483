"""Chunks of a PNG file that say what its stored numbers mean, read without decoding the pixels (PNG, third edition)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_SRGB_PRIMARIES = (31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)  # cHRM: white, red, green, blue, times 100000
_SRGB_GAMMA = 45455  # gAMA: 1 / 2.2, times 100000
_NEAR_PRIMARIES, _NEAR_GAMMA = 1000, 4000  # differences that do not count as other colours
_SRGB_CODES = (1, 13, 0, 1)  # cICP: primaries, transfer function, no matrix, full range (ITU-T H.273)
_MOST_BYTES = 1 << 10  # of a chunk that is read here


def list_chunks(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name of each chunk and its data: at most `_MOST_BYTES` of them, and none of pixels (IDAT)."""
    #     signature, 8 bytes | length, name, data, checksum | length, name, data, checksum | ... | IEND
    at = 8
    while True:
        file.seek(at)
        if len(head := file.read(8)) < 8:
            return
        length, name = struct.unpack(">I4s", head)
        yield name, b"" if name == b"IDAT" else file.read(min(length, _MOST_BYTES))
        if name == b"IEND":
            return
        at += 12 + length


def has_late_text(file: BinaryIO) -> bool:
    """Return whether chunks after the pixels of a PNG file may hold its orientation."""
    names = [name for name, _ in list_chunks(file)]
    after = names[names.index(b"IDAT") :] if b"IDAT" in names else []
    return any(name in (b"eXIf", b"iTXt", b"tEXt", b"zTXt") for name in after)


def find_other_colours(file: BinaryIO) -> str | None:
    """Return which chunk says that the numbers have other colours than those of sRGB; None if none does.

    An iCCP chunk is for `find_conversion`.
    """
    # The first of these chunks that is there counts, and the ones after it do not: cICP, iCCP, sRGB, gAMA and cHRM.
    chunks: dict[bytes, bytes] = {}
    for name, data in list_chunks(file):
        if name == b"IDAT":
            break
        chunks.setdefault(name, data)
    if len(codes := chunks.get(b"cICP", b"")) == 4:
        return None if tuple(codes) == _SRGB_CODES else f"its cICP chunk ({', '.join(map(str, codes))})"
    if b"iCCP" in chunks or b"sRGB" in chunks:
        return None
    if len(data := chunks.get(b"gAMA", b"")) == 4:
        (gamma,) = struct.unpack(">I", data)
        if abs(gamma - _SRGB_GAMMA) > _NEAR_GAMMA:
            return f"its gAMA chunk ({gamma / 100_000:g}, where sRGB has 0.45455)"
    if len(data := chunks.get(b"cHRM", b"")) == 32:
        points = struct.unpack(">8I", data)
        if any(abs(point - due) > _NEAR_PRIMARIES for point, due in zip(points, _SRGB_PRIMARIES, strict=True)):
            return f"its cHRM chunk ({', '.join(f'{point / 100_000:g}' for point in points)})"
    return None


def find_transparent_shade(file: BinaryIO, bits: int) -> int | None:
    """Return the 8-bit shade that the tRNS chunk of a grey image names in its own number of bits; None without one."""
    data, most = next((data for name, data in list_chunks(file) if name == b"tRNS"), b""), (1 << bits) - 1
    return (int.from_bytes(data, "big") & most) * 255 // most if len(data) == 2 else None
