"""How the chunks of a Zarr array are packed: which codecs are taken, and how much a chunk holds, before it is unpacked.

One codec packs, at most: of several in turn, each could make a thousand times as much of what the one before has made.
And none runs code, as numcodecs' `pickle` does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import imagecodecs

from engines.errors import ImageError

__all__ = ["check_codecs", "estimate_unpacked_bytes", "find_compressor"]

_PACKERS = ("zstd", "blosc", "lz4", "gzip", "zlib")
_OTHERS = ("bytes", "endian", "transpose", "shuffle", "crc32", "crc32c", "adler32", "fletcher32", "sharding_indexed")
_LARGE_BYTES = 1 << 29  # what a chunk of deflate may hold before it is tried out
_DEFLATED = 1032  # times as much at most (RFC 1951: 258 bytes in 2 bits)
_PARTS = 64  # of gzip, one after another in one chunk: nobody writes more than one
_ZSTD = b"\x28\xb5\x2f\xfd"

Read = Callable[[int, int], bytes]
"""Bytes of a chunk: from where, and how many."""


def check_codecs(path: Path, array: Any) -> None:
    """Raises ImageError where an array is packed in a way that is not taken."""
    names = list(_list_codec_names(array))
    if unknown := sorted({name for name in names if name not in (*_PACKERS, *_OTHERS)}):
        raise ImageError(
            f"{path} is packed by {', '.join(unknown)}, which is not read here. Save it with Zstandard, Blosc or gzip."
        )
    if len(twice := [name for name in names if name in _PACKERS]) > 1:
        raise ImageError(f"{path} is packed several times, by {' and '.join(twice)}. Save it with one of them.")


def find_compressor(array: Any) -> str | None:
    """The codec that makes an array's chunks smaller; None where none does."""
    return next((name for name in _list_codec_names(array) if name in _PACKERS), None)


def _list_codec_names(array: Any) -> Iterator[str]:
    """Of all codecs of its chunks, those within shards too, but not of the index of a shard."""
    told = array.metadata.to_dict()
    yield from _flatten_codec_names((*(told.get("filters") or ()), *(told.get("codecs") or ()), told.get("compressor")))


def _flatten_codec_names(codecs: Iterable[object]) -> Iterator[str]:
    for codec in codecs:
        if codec is None:
            continue
        fields: Mapping[str, Any] = codec if isinstance(codec, Mapping) else codec.get_config()  # type: ignore[attr-defined]
        yield str(fields.get("name", fields.get("id"))).removeprefix("numcodecs.")
        yield from _flatten_codec_names((fields.get("configuration") or {}).get("codecs") or ())


def estimate_unpacked_bytes(codec: str | None, size: int, read: Read, most: int) -> int:
    """How many bytes a chunk of `size` unpacks to, as far as that need be known: whether there are more than `most`."""
    if codec is None:
        return size
    head = read(0, 18)
    if codec == "zstd":
        told = _read_zstd_size(head)
        return _measure_zstd(read(0, size), most) if told is None else told
    if codec == "blosc":
        return int.from_bytes(head[4:8], "little")
    if codec == "lz4":
        return int.from_bytes(head[:4], "little")
    if size * _DEFLATED <= max(most, _LARGE_BYTES):
        return 0
    return _measure_inflated(read(0, size), most)


def _read_zstd_size(head: bytes) -> int | None:
    """How many bytes a Zstandard frame says that it holds (RFC 8878, 3.1.1); None if it doesn't say, 0 for others.

    >>> _read_zstd_size(b"(\\xb5/\\xfd" + bytes([0b1110_0000]) + (1 << 40).to_bytes(8, "little")) == 1 << 40
    True
    """
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


def _measure_zstd(data: bytes, most: int) -> int:
    """Of a frame that was written before its size was known: it is unpacked into so much room and no more."""
    try:
        return len(imagecodecs.zstd_decode(data, out=most))
    except imagecodecs.ZstdError as error:
        return most + 1 if "too small" in str(error) else 0  # others are for the reader to tell


def _measure_inflated(data: bytes, most: int) -> int:
    """By unpacking it piece by piece, none of which is kept."""
    count, left = 0, data
    for _ in range(_PARTS):
        engine = zlib.decompressobj(wbits=47)  # gzip or zlib, whichever it is
        while not engine.eof and count <= most:
            try:
                piece = engine.decompress(left, 1 << 24)
            except zlib.error:
                return count  # which the reader will tell
            count, left = count + len(piece), engine.unconsumed_tail
            if not piece and not left:
                return count
        left = engine.unused_data
        if not left or count > most:
            return count
    return most + 1
