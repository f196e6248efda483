"""Checks of Zarr chunks before they are unpacked: place in the store, codecs, and the size that they unpack to."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engines.errors import ImageError
from engines.images.files import make_damaged_error
from engines.images.zarr_codecs import check_codecs, estimate_unpacked_bytes, find_compressor
from engines.regular_file import is_within, open_regular

__all__ = ["check_array", "check_metadata", "check_stored"]

METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
"""The files that describe a group or array in a folder."""

METADATA_BYTES = 1 << 24  # parsed, JSON of nested lists takes twenty times as much memory
_LARGEST_BYTES = 1 << 30  # a chunk is unpacked whole, on every rank that reads a pixel of it
_SMALLEST_PX, _MOST_SMALL = 1 << 10, 1 << 16  # pixels of a small chunk, and how many such chunks are allowed
_MOST_IN_SHARD = 1 << 20  # chunks per shard, whose index is read at once
_SLACK_BYTES = 1 << 16
_NO_CHUNK = (1 << 64) - 1

Wanted = Sequence[slice | int]
ChunkIndex = tuple[int, ...]


def check_metadata(path: Path, within: str = "") -> None:
    """Raise ImageError if a metadata file of a store, or of its group or array `within`, is huge or leads out of it."""
    for name in METADATA:
        file = Path(path, within, name)
        if os.path.lexists(file) and (size := _get_file_size(path, file)) > METADATA_BYTES:
            told = f"its {Path(within, name)} has {size:,} bytes, and {METADATA_BYTES:,} are the most that are parsed"
            raise make_damaged_error(path, told)


def _get_file_size(path: Path, file: Path) -> int:
    """Return the size of a store's file. Raises ImageError for a link out of the store, a pipe or a device."""
    name = os.path.relpath(file, path)
    if not is_within(file, path):
        raise ImageError(f"{path} is no store of its own: a link leads out of it, at {name}. Copy the store whole.")
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise make_damaged_error(path, f"its {name} is no regular file")
    return found.st_size


def check_array(path: Path, array: Any) -> None:
    """Raise ImageError if an array declares chunks that are too large or too many, or have unsupported codecs."""
    sides, pixels = " x ".join(map(str, array.chunks)), math.prod(array.chunks)
    size = pixels * array.dtype.itemsize
    if size > _LARGEST_BYTES:
        raise ImageError(
            f"{path} has chunks of {sides}, {size / (1 << 30):.1f} GiB each, and a chunk "
            f"is read whole: {_LARGEST_BYTES >> 30} GiB is the most. Save it in smaller chunks, such as 512 x 512."
        )
    count = math.prod(-(-side // part) for side, part in zip(array.shape, array.chunks, strict=True))
    if pixels < _SMALLEST_PX and count > _MOST_SMALL:
        raise ImageError(
            f"{path} has {count:,} chunks of {sides}, each of them a file or a search: a look at the picture would "
            "never end. Save it in larger chunks, such as 512 x 512."
        )
    if array.shards and math.prod(_get_shard_grid(array)) > _MOST_IN_SHARD:
        raise ImageError(
            f"{path} has shards of {' x '.join(map(str, array.shards))}, with {math.prod(_get_shard_grid(array)):,} "
            f"chunks in each: {_MOST_IN_SHARD:,} are the most. Save it in larger chunks, such as 512 x 512."
        )
    check_codecs(path, array)


def check_stored(path: Path, array: Any, wanted: Wanted) -> bool:
    """Return whether any chunk of the `wanted` part is stored; missing chunks are blank.

    A stored chunk is hardly larger than its unpacked size. The unpacked size is taken from the compressor's header, or
    measured by a trial. Only stores in folders are checked; for others the result is True.
    Raises ImageError if a chunk is outside of the store, or unpacks to more than declared.
    """
    # zarr would read and unpack a chunk whatever its size. Each wanted chunk is therefore looked at first:
    #
    #     missing                       blank, not read at all
    #     larger than its pixels        refused: nothing that is packed grows
    #     in a shard                    the shard's index says where in the file it lies
    #     packed                        its unpacked size is estimated, and compared with its pixels
    root = getattr(array.store_path.store, "root", None)
    if root is None:
        return True
    found = False
    sides = array.shards or array.chunks
    most = math.prod(sides) * array.dtype.itemsize
    for place in product(*map(_find_chunks, wanted, array.shape, sides)):
        file = Path(root, array.store_path.path, array.metadata.encode_chunk_key(place))
        if not os.path.lexists(file):  # a blank chunk
            continue
        found = True
        size = _get_file_size(path, file)
        if size > most + _SLACK_BYTES:
            raise _make_bomb_error(path, file, size - _SLACK_BYTES, most)
        with open_regular(file) as stored:
            for start, length in _locate_chunks(path, array, file, stored, size, place, wanted):
                _check_unpacked(path, array, file, stored, start, length)
    return found


def _check_unpacked(path: Path, array: Any, file: Path, stored: BinaryIO, start: int, length: int) -> None:
    """Check the unpacked size of one chunk, which may be a part of a file."""
    most = math.prod(array.chunks) * array.dtype.itemsize

    def read(offset: int, count: int) -> bytes:
        stored.seek(start + offset)
        return stored.read(min(count, length - offset))

    holds = max(length - _SLACK_BYTES, estimate_unpacked_bytes(find_compressor(array), length, read, most))
    if holds > most + (0 if find_compressor(array) else _SLACK_BYTES):
        raise _make_bomb_error(path, file, holds, most)


def _make_bomb_error(path: Path, file: Path, holds: int, most: int) -> ImageError:
    return make_damaged_error(path, f"its chunk {file.name} unpacks to {holds} bytes or more, where {most} are due")


def _find_chunks(part: slice | int, size: int, side: int) -> range:
    """Return the indices of the chunks along one axis that a part of it intersects."""
    start, stop = (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
    return range(start // side, -(-stop // side))


# ---- shards: files with several chunks and an index of their offsets


def _get_shard_grid(array: Any) -> ChunkIndex:
    return tuple(-(-shard // chunk) for shard, chunk in zip(array.shards, array.chunks, strict=True))


def _locate_chunks(
    path: Path, array: Any, file: Path, stored: BinaryIO, size: int, place: ChunkIndex, wanted: Wanted
) -> Iterator[tuple[int, int]]:
    """Yield the offset and length in bytes of each wanted chunk in a file."""
    if not array.shards:
        yield 0, size
        return
    index = _read_shard_index(path, array, file, stored, size)
    for inner in product(*map(_find_inner_chunks, wanted, array.shape, array.shards, array.chunks, place)):
        start, length = (int(number) for number in index[inner])
        if start == length == _NO_CHUNK:
            continue
        if start + length > size:
            raise make_damaged_error(path, f"its chunk {file.name} has a part that lies beyond its end")
        yield start, length


def _read_shard_index(path: Path, array: Any, file: Path, stored: BinaryIO, size: int) -> Any:
    """Return the offset and length in bytes of each chunk in a shard, (..., 2) (Zarr 3, sharding codec)."""
    #     shard:  chunk | chunk | ... | index: (offset, length) of each chunk, 16 bytes | crc32c, 4 bytes
    #
    # or the index comes first. Chunks lie in any order; one that is blank has offset and length 2**64 - 1.
    codec = next(each for each in array.metadata.to_dict()["codecs"] if each["name"] == "sharding_indexed")
    told, count = codec["configuration"], math.prod(_get_shard_grid(array))
    names = [each["name"] for each in told["index_codecs"]]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        raise ImageError(f"{path} has shards whose index is packed ({', '.join(names)}). Save it without.")
    length = 16 * count + (4 if len(names) > 1 else 0)
    if size < length:
        raise make_damaged_error(path, f"its chunk {file.name} has {size} bytes, and an index of {length}")
    stored.seek(0 if str(told.get("index_location", "end")) == "start" else size - length)
    return np.frombuffer(stored.read(16 * count), "<u8").reshape(*_get_shard_grid(array), 2)


def _find_inner_chunks(part: slice | int, size: int, shard: int, chunk: int, place: int) -> range:
    """Return the indices of the chunks of one shard that a part intersects along one axis."""
    #     shard `place`        |      .      .      |      .      .      |      its chunks are counted from its start
    #     part                          start |=============| stop
    #     first, last                   first |=====| last                    (clipped to this shard)
    start, stop = (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
    first, last = max(start, place * shard), min(stop, (place + 1) * shard)
    return range((first - place * shard) // chunk, -(-(last - place * shard) // chunk))
