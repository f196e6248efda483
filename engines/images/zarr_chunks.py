"""Checks of Zarr chunks before they are unpacked: place in the store, codecs, and the size that they unpack to."""

from __future__ import annotations

import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import imagecodecs
import numpy as np

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.images.files import make_damaged_error
from mpi4dl_nb.engines.images.regular_file import is_within, open_regular

# Codecs of Zarr chunks: which ones are supported, and the size of a chunk unpacked, found before unpacking it.


# At most one compressor is allowed: each of several in turn could expand the output of the one before a thousandfold.
# No codec that runs code is allowed, such as numcodecs' `pickle`.
_PACKERS = ("zstd", "blosc", "lz4", "gzip", "zlib")
_OTHERS = ("bytes", "endian", "transpose", "shuffle", "crc32", "crc32c", "adler32", "fletcher32", "sharding_indexed")
_LARGE_BYTES = 1 << 29  # a deflate chunk that could unpack to more than this is measured by a trial
_DEFLATED = 1032  # the highest compression ratio of deflate (RFC 1951: 258 bytes in 2 bits)
_PARTS = 64  # concatenated gzip members in one chunk: programs write only one
_ZSTD = b"\x28\xb5\x2f\xfd"


def _list_codec_names(array: Any) -> Iterator[str]:
    """Yield the names of all codecs of an array's chunks, including those inside shards, but not a shard's index."""
    metadata = array.metadata.to_dict()
    yield from _flatten_codec_names(
        (*(metadata.get("filters") or ()), *(metadata.get("codecs") or ()), metadata.get("compressor"))
    )


def _flatten_codec_names(codecs: Iterable[object]) -> Iterator[str]:
    for codec in codecs:
        if codec is None:
            continue
        fields: Mapping[str, Any] = codec if isinstance(codec, Mapping) else codec.get_config()  # type: ignore[attr-defined]
        yield str(fields.get("name", fields.get("id"))).removeprefix("numcodecs.")
        yield from _flatten_codec_names((fields.get("configuration") or {}).get("codecs") or ())


def _estimate_unpacked_bytes(codec: str | None, stored: BinaryIO, start: int, size: int, most: int) -> int:
    """Estimate how many bytes a chunk of `size` bytes unpacks to, well enough to tell if that exceeds `most`."""
    if codec is None:
        return size
    stored.seek(start)
    head = stored.read(min(18, size))
    if codec == "zstd":
        content = _read_zstd_size(head)
        if content is not None:
            return content
        # A frame written as a stream does not say its size: unpack it into a buffer of `most` bytes.
        try:
            return len(imagecodecs.zstd_decode(head + stored.read(size - len(head)), out=most))
        except imagecodecs.ZstdError as error:
            return most + 1 if "too small" in str(error) else 0  # the reader raises other errors itself
    if codec == "blosc":
        return int.from_bytes(head[4:8], "little")
    if codec == "lz4":
        return int.from_bytes(head[:4], "little")
    # Deflate data do not say their size. Small ones cannot unpack to much, which saves unpacking every chunk twice.
    if size * _DEFLATED <= max(most, _LARGE_BYTES):
        return 0
    return _measure_inflated(head + stored.read(size - len(head)), most)


def _read_zstd_size(head: bytes) -> int | None:
    """Return the content size in a Zstandard frame header (RFC 8878, 3.1.1), None if absent, 0 for other data.

    >>> _read_zstd_size(b"(\\xb5/\\xfd" + bytes([0b1110_0000]) + (1 << 40).to_bytes(8, "little")) == 1 << 40
    True
    """
    #     28 B5 2F FD | flags | window, unless single | dictionary, 0 1 2 or 4 bytes | size, 0 1 2 4 or 8 bytes
    #
    # Bits 7 and 6 of the flags give the width of the size, bit 5 is `single`, bits 1 and 0 the width of the dictionary.
    # A size of one byte exists only in a single segment; one of two bytes counts from 256.
    if not head.startswith(_ZSTD) or len(head) < 6:
        return 0
    flags = head[4]
    size_flag, single = flags >> 6, bool(flags & 0x20)
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    width = (int(single), 2, 4, 8)[size_flag]
    if not width:
        return None
    size = int.from_bytes(head[at : at + width], "little")
    return size + 256 if width == 2 else size


def _measure_inflated(data: bytes, most: int) -> int:
    """Measure deflate data by unpacking them in pieces, none of which is kept."""
    # A gzip file may consist of several members, one after the other, which unpack to their concatenation.
    count, left = 0, data
    for _ in range(_PARTS):
        engine = zlib.decompressobj(wbits=47)  # 32 + 15: detects gzip or zlib headers
        while not engine.eof and count <= most:
            try:
                piece = engine.decompress(left, 1 << 24)
            except zlib.error:
                return count  # the reader raises the error itself
            count, left = count + len(piece), engine.unconsumed_tail
            if not piece and not left:
                return count
        left = engine.unused_data
        if not left or count > most:
            return count
    return most + 1


METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
"""The files that describe a group or array in a folder."""

METADATA_BYTES = 1 << 24  # parsed, JSON of nested lists takes twenty times as much memory
_LARGEST_BYTES = 1 << 30  # a chunk is unpacked whole, on every rank that reads a pixel of it
_SMALLEST_PX, _MOST_SMALL = 1 << 10, 1 << 16  # pixels of a small chunk, and how many such chunks are allowed
_MOST_IN_SHARD = 1 << 20  # chunks per shard, whose index is read at once
_SLACK_BYTES = 1 << 16
_NO_CHUNK = (1 << 64) - 1
_CHUNK_NAME = re.compile(r"c|(c\.)?[0-9]+(\.[0-9]+)*")

Wanted = Sequence[slice | int]
ChunkIndex = tuple[int, ...]


def check_metadata(path: Path, within: str = "") -> None:
    """Raise ImageError if a metadata file of a store, or of its group or array `within`, is huge or leads out of it."""
    for name in METADATA:
        file = Path(path, within, name)
        if os.path.lexists(file) and (size := _get_file_size(path, file)) > METADATA_BYTES:
            fault = f"its {Path(within, name)} has {size:,} bytes, and {METADATA_BYTES:,} are the most that are parsed"
            raise make_damaged_error(path, fault)


def _get_file_size(path: Path, file: Path) -> int:
    """Return the size of a store's file. Raises ImageError for a link out of the store, a pipe or a device."""
    name = os.path.relpath(file, path)
    if not is_within(file, path):
        raise ImageError(f"{path} is no store of its own: a link leads out of it, at {name}. Copy the store whole.")
    state = file.stat()
    if not stat.S_ISREG(state.st_mode):
        raise make_damaged_error(path, f"its {name} is no regular file")
    return state.st_size


def check_array(path: Path, array: Any) -> None:
    """Raise ImageError if an array declares chunks that are too large or too many, or have unsupported codecs."""
    sides, pixels = " x ".join(map(str, array.chunks)), math.prod(array.chunks)
    size = pixels * array.dtype.itemsize
    if size > _LARGEST_BYTES:
        raise ImageError(
            f"{path} has chunks of {sides}, {format_bytes(size)} each, and a chunk "
            f"is read whole: {format_bytes(_LARGEST_BYTES)} is the most. Save it in smaller chunks, such as 512 x 512."
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
    names = list(_list_codec_names(array))
    if unknown := sorted({name for name in names if name not in (*_PACKERS, *_OTHERS)}):
        raise ImageError(
            f"{path} is packed by {', '.join(unknown)}, which is not read here. Save it with Zstandard, Blosc or gzip."
        )
    if len(twice := [name for name in names if name in _PACKERS]) > 1:
        raise ImageError(f"{path} is packed several times, by {' and '.join(twice)}. Save it with one of them.")


def check_chunk_names(path: Path, array: Any) -> None:
    """Raise ImageError if the chunks of an array have other names than its metadata say.

    All of them would count as missing, and so the picture as blank: writers have left out the separator of folders.
    """
    #     dimension_separator "."    a.zarr/0.0    a.zarr/0.1 ...        Zarr 3 also: c/0/0, c.0.0
    #                         "/"    a.zarr/0/0    a.zarr/0/1 ...
    folder = Path(array.store_path.store.root, array.store_path.path)
    with os.scandir(folder) as entries:
        first = next((entry.name for entry in entries if _CHUNK_NAME.fullmatch(entry.name)), "")
    key = str(array.metadata.encode_chunk_key((0,) * len(array.shape)))
    due = re.sub("[0-9]+", "[0-9]+", re.escape(key.partition("/")[0]))
    if first and not re.fullmatch(due, first):
        raise make_damaged_error(path, f"its first chunk is {first}, and by its metadata chunks have names as {key}")


def check_stored(path: Path, array: Any, wanted: Wanted) -> bool:
    """Return whether any chunk of the `wanted` part is stored; missing chunks are blank.

    A stored chunk is hardly larger than its unpacked size. The unpacked size is taken from the compressor's header, or
    measured by a trial.
    Raises ImageError if a chunk is outside of the store, or unpacks to more than declared.
    """
    # zarr would read and unpack a chunk whatever its size. Each wanted chunk is therefore looked at first:
    #
    #     missing                       blank, not read at all
    #     larger than its pixels        refused: nothing that is packed grows
    #     in a shard                    the shard's index says where in the file it lies
    #     packed                        its unpacked size is estimated, and compared with its pixels
    is_stored, root = False, array.store_path.store.root
    sides = array.shards or array.chunks
    most, most_unpacked = (math.prod(part) * array.dtype.itemsize for part in (sides, array.chunks))
    packer = next((name for name in _list_codec_names(array) if name in _PACKERS), None)
    for chunk_index in product(*map(_find_chunks, wanted, array.shape, sides)):
        file = Path(root, array.store_path.path, array.metadata.encode_chunk_key(chunk_index))
        if not os.path.lexists(file):  # a blank chunk
            continue
        is_stored = True
        size = _get_file_size(path, file)
        if size > most + _SLACK_BYTES:
            raise _make_bomb_error(path, file, size - _SLACK_BYTES, most)
        with open_regular(file) as stored:
            for start, length in _locate_chunks(path, array, file, stored, size, chunk_index, wanted):
                unpacked = _estimate_unpacked_bytes(packer, stored, start, length, most_unpacked)
                holds = max(length - _SLACK_BYTES, unpacked)
                if holds > most_unpacked + (0 if packer else _SLACK_BYTES):
                    raise _make_bomb_error(path, file, holds, most_unpacked)
    return is_stored


def _make_bomb_error(path: Path, file: Path, holds: int, most: int) -> ImageError:
    return make_damaged_error(path, f"its chunk {file.name} unpacks to {holds} bytes or more, where {most} are due")


# ---- shards: files with several chunks and an index of their offsets


def _get_shard_grid(array: Any) -> ChunkIndex:
    return tuple(-(-shard // chunk) for shard, chunk in zip(array.shards, array.chunks, strict=True))


def _locate_chunks(
    path: Path, array: Any, file: Path, stored: BinaryIO, size: int, chunk_index: ChunkIndex, wanted: Wanted
) -> Iterator[tuple[int, int]]:
    """Yield the offset and length in bytes of each wanted chunk in a file (Zarr 3, sharding codec)."""
    if not array.shards:
        yield 0, size
        return
    #     shard:  chunk | chunk | ... | index: (offset, length) of each chunk, 16 bytes | crc32c, 4 bytes
    #
    # or the index comes first. Chunks lie in any order; one that is blank has offset and length 2**64 - 1.
    codec = next(codec for codec in array.metadata.to_dict()["codecs"] if codec["name"] == "sharding_indexed")
    settings, count = codec["configuration"], math.prod(_get_shard_grid(array))
    names = [index_codec["name"] for index_codec in settings["index_codecs"]]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        raise ImageError(f"{path} has shards whose index is packed ({', '.join(names)}). Save it without.")
    length = 16 * count + (4 if len(names) > 1 else 0)
    if size < length:
        raise make_damaged_error(path, f"its chunk {file.name} has {size} bytes, and an index of {length}")
    stored.seek(0 if str(settings.get("index_location", "end")) == "start" else size - length)
    index = np.frombuffer(stored.read(16 * count), "<u8").reshape(*_get_shard_grid(array), 2)
    for inner in product(*map(_find_chunks, wanted, array.shape, array.chunks, array.shards, chunk_index)):
        start, length = map(int, index[inner])
        if start == length == _NO_CHUNK:
            continue
        if start + length > size:
            raise make_damaged_error(path, f"its chunk {file.name} has a part that lies beyond its end")
        yield start, length


def _find_chunks(part: slice | int, size: int, chunk: int, shard: int | None = None, place: int = 0) -> range:
    """Return the indices of the chunks along one axis (of a shard, if given) that a part of it intersects."""
    #     shard `place`        |      .      .      |      .      .      |      its chunks are counted from its start
    #     part                          start |=============| stop
    #     first, last                   first |=====| last                    (clipped to this shard)
    start, stop = (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
    begin = place * (shard or size)
    first, last = max(start, begin), min(stop, begin + (shard or size))
    return range((first - begin) // chunk, -(-(last - begin) // chunk))
