"""A TIFF file from any tags and encoded segments, for what no program writes on request."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TYPES = {"B": 1, "s": 2, "H": 3, "I": 4, "2I": 5, "d": 12, "f": 11}
"""struct's letter of a value -> TIFF's number of the type; `2I` is a rational number."""
TILE_WIDTH, TILE_LENGTH = 322, 323
Tags = Mapping[int, tuple[str, Sequence[float] | str]]


def write_tiff(
    path: Path, shape: tuple[int, ...], segments: Sequence[bytes | None], tags: Tags, order: str = "<"
) -> Path:
    """Write one page of (H, W) or (H, W, samples) 8-bit numbers, uncompressed and in one strip unless tags say else.

    A segment of None has offset and byte count 0. Values in `tags` replace the usual ones: {274: ("H", [3])}.
    """
    samples = shape[2] if len(shape) == 3 else 1
    tiled = TILE_WIDTH in tags
    offsets, data = [], b""
    for segment in segments:
        offsets.append(8 + len(data) if segment is not None else 0)
        data += segment or b""
    places = (324, 325) if tiled else (273, 279)
    every: dict[int, tuple[str, Sequence[float] | str]] = {
        256: ("I", [shape[1]]),
        257: ("I", [shape[0]]),
        258: ("H", [8] * samples),
        259: ("H", [1]),
        262: ("H", [2 if samples > 2 else 1]),
        277: ("H", [samples]),
        **({} if tiled else {278: ("I", [-(-shape[0] // len(segments))])}),
        places[0]: ("I", offsets),
        places[1]: ("I", [len(segment or b"") for segment in segments]),
        **tags,
    }
    data += b"\0" * (len(data) % 2)
    start, entries, outside = 8 + len(data), [], b""
    beyond = start + 2 + 12 * len(every) + 4
    for code, (letter, values) in sorted(every.items()):
        if letter == "s":
            packed = str(values).encode() + b"\0"
            count = len(packed)
        else:
            packed = struct.pack(f"{order}{len(values)}{letter[-1]}", *values)
            count = len(values) // len(letter)
        field = packed.ljust(4, b"\0")
        if len(packed) > 4:
            field = struct.pack(order + "I", beyond + len(outside))
            outside += packed + b"\0" * (len(packed) % 2)
        entries.append(struct.pack(order + "HHI", code, TYPES[letter], count) + field)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start)
    page = struct.pack(order + "H", len(entries)) + b"".join(entries) + b"\0" * 4
    path.write_bytes(head + data + page + outside)
    return path


def split_tiles(pixels: NDArray[np.generic], side: int) -> list[bytes]:
    """The bytes of the square tiles of (H, W, ...) numbers, whose sides are multiples of `side`."""
    rows, cols = (range(0, length, side) for length in pixels.shape[:2])
    return [pixels[y : y + side, x : x + side].tobytes() for y in rows for x in cols]


def make_tile_tags(side: int) -> dict[int, tuple[str, Sequence[float] | str]]:
    """The tags of square tiles."""
    return {TILE_WIDTH: ("I", [side]), TILE_LENGTH: ("I", [side])}
