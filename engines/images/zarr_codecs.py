"""Codecs of Zarr chunks: which ones are supported, and the size of a chunk unpacked, found before unpacking it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import imagecodecs

from engines.errors import ImageError

__all__ = ["check_codecs", "estimate_unpacked_bytes", "find_compressor"]

# At most one compressor is allowed: each of several in turn could expand the output of the one before a thousandfold.
# No codec that runs code is allowed, such as numcodecs' `pickle`.
_PACKERS = ("zstd", "blosc", "lz4", "gzip", "zlib")
_OTHERS = ("bytes", "endian", "transpose", "shuffle", "crc32", "crc32c", "adler32", "fletcher32", "sharding_indexed")
_LARGE_BYTES = 1 << 29  # a deflate chunk that could unpack to more than this is measured by a trial
_DEFLATED = 1032  # the highest compression ratio of deflate (RFC 1951: 258 bytes in 2 bits)
_PARTS = 64  # concatenated gzip members in one chunk: programs write only one
_ZSTD = b"\x28\xb5\x2f\xfd"


def check_codecs(path: Path, array: Any) -> None:
    """Raise ImageError if an array has unsupported codecs or more than one compressor."""
    names = list(_list_codec_names(array))
    if unknown := sorted({name for name in names if name not in (*_PACKERS, *_OTHERS)}):
        raise ImageError(
            f"{path} is packed by {', '.join(unknown)}, which is not read here. Save it with Zstandard, Blosc or gzip."
        )
    if len(twice := [name for name in names if name in _PACKERS]) > 1:
        raise ImageError(f"{path} is packed several times, by {' and '.join(twice)}. Save it with one of them.")


def find_compressor(array: Any) -> str | None:
    """Return the compressor of an array's chunks, or None if they are not compressed."""
    return next((name for name in _list_codec_names(array) if name in _PACKERS), None)


def _list_codec_names(array: Any) -> Iterator[str]:
    """Yield the names of all codecs of an array's chunks, including those inside shards, but not a shard's index."""
    told = array.metadata.to_dict()
    yield from _flatten_codec_names((*(told.get("filters") or ()), *(told.get("codecs") or ()), told.get("compressor")))


def _flatten_codec_names(codecs: Iterable[object]) -> Iterator[str]:
    for codec in codecs:
        if codec is None:
            continue
        fields: Mapping[str, Any] = codec if isinstance(codec, Mapping) else codec.get_config()  # type: ignore[attr-defined]
        yield str(fields.get("name", fields.get("id"))).removeprefix("numcodecs.")
        yield from _flatten_codec_names((fields.get("configuration") or {}).get("codecs") or ())


def estimate_unpacked_bytes(codec: str | None, size: int, read: Callable[[int, int], bytes], most: int) -> int:
    """Estimate how many bytes a chunk of `size` bytes unpacks to, well enough to tell if that exceeds `most`.

    `read(offset, count)` returns bytes of the chunk.
    """
    if codec is None:
        return size
    head = read(0, 18)
    if codec == "zstd":
        told = _read_zstd_size(head)
        if told is not None:
            return told
        # A frame written as a stream does not say its size: unpack it into a buffer of `most` bytes.
        try:
            return len(imagecodecs.zstd_decode(read(0, size), out=most))
        except imagecodecs.ZstdError as error:
            return most + 1 if "too small" in str(error) else 0  # the reader raises other errors itself
    if codec == "blosc":
        return int.from_bytes(head[4:8], "little")
    if codec == "lz4":
        return int.from_bytes(head[:4], "little")
    # Deflate data do not say their size. Small ones cannot unpack to much, which saves unpacking every chunk twice.
    if size * _DEFLATED <= max(most, _LARGE_BYTES):
        return 0
    return _measure_inflated(read(0, size), most)


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
