"""Zarr stores that ask for more than they hold: too many chunks, too much in a chunk, too many levels."""

from __future__ import annotations

import bz2
import json
import os
import pickle
from pathlib import Path

import imagecodecs
import numcodecs
import numpy as np
import pytest
import zarr

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import zarr_chunks
from mpi4dl_nb.engines.images.picture import open_image
from tests.images.made_slides import make_tissue

MILLION = (1 << 20, 1 << 20)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunks", [(1, 1), (16, 16), (1, 512), (3, 300)])
def test_millions_of_tiny_chunks(chunks: tuple[int, int], version: int, tmp_path: Path):
    zarr.create_array(tmp_path / "a", shape=MILLION, chunks=chunks, dtype="uint8", zarr_format=version)
    with pytest.raises(ImageError, match=rf"has [\d,]+ chunks of {chunks[0]} x {chunks[1]}, .* such as 512 x 512"):
        open_image(tmp_path / "a")


def test_a_few_tiny_chunks_are_read(tmp_path: Path):
    zarr.create_array(tmp_path / "a", data=make_tissue(12, 10), chunks=(1, 2, 1))
    assert np.array_equal(open_image(tmp_path / "a").read(0, 0, 12, 10), make_tissue(12, 10))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunks", [(512, 512), (1, 1 << 20), (1000, 1 << 20), (1 << 15, 1 << 15)])
def test_what_is_not_stored_is_not_read(
    chunks: tuple[int, int], version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    array = zarr.create_array(
        tmp_path / "a", shape=MILLION, chunks=chunks, dtype="uint8", zarr_format=version, fill_value=7
    )
    if chunks == (512, 512):
        array[-512:, -512:] = 9
    monkeypatch.setattr(zarr.Array, "__getitem__", lambda *_: pytest.fail("it was read"))
    picture = open_image(tmp_path / "a")
    assert (picture.read(5, 5, 600, 600) == 7).all()
    assert (picture.thumbnail(50)[:40] == 7).all()


def test_a_store_with_levels_without_end(tmp_path: Path):
    group = zarr.open_group(tmp_path / "a", mode="w")
    group.create_array("0", data=make_tissue(8, 8))
    scales = {"axes": [{"name": name} for name in "yxc"], "datasets": [{"path": "0"}] * 1000}
    group.attrs["ome"] = {"multiscales": [scales]}
    with pytest.raises(ImageError, match="it says that it has 1,000 levels, where 32 are many"):
        open_image(tmp_path / "a")
    scales["datasets"] = [{"path": "a/" * 1000}]
    group.attrs["ome"] = {"multiscales": [scales]}
    with pytest.raises(ImageError, match="a level lies 1,000 folders deep"):
        open_image(tmp_path / "a")


def test_json_of_many_megabytes_is_not_parsed(tmp_path: Path):
    zarr.create_array(tmp_path / "a", data=make_tissue(8, 8))
    with (tmp_path / "a" / "zarr.json").open("ab") as file:
        file.write(b" " * zarr_chunks.METADATA_BYTES)
    with pytest.raises(ImageError, match=r"its zarr\.json has 16,\d+,\d+ bytes, and 16,777,216 are the most"):
        open_image(tmp_path / "a")


BOMB = np.zeros(64 << 20, np.uint8)


@pytest.mark.parametrize(
    "codec", [numcodecs.Zstd(), numcodecs.GZip(), numcodecs.Zlib(), numcodecs.Blosc(), numcodecs.LZ4()], ids=repr
)
def test_a_small_chunk_that_unpacks_to_much(codec: numcodecs.abc.Codec, tmp_path: Path, monkeypatch):
    """Its bytes are no more than those of a chunk that hardly shrinks, so that only what is in them tells."""
    array = zarr.create_array(
        tmp_path / "a", data=make_tissue(64, 64), chunks=(64, 64, 3), zarr_format=2, compressors=codec
    )
    assert np.array_equal(open_image(tmp_path / "a").read(0, 0, 64, 64), make_tissue(64, 64))
    (tmp_path / "a" / "0.0.0").write_bytes(codec.encode(BOMB[: 4 << 20]))
    monkeypatch.setattr(zarr_chunks, "_LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(zarr_chunks, "_SLACK_BYTES", 1 << 20)
    with pytest.raises(ImageError, match=r"chunk 0\.0\.0 unpacks to \d+ bytes or more, where 12288 are due"):
        open_image(tmp_path / "a").read(0, 0, 1, 1)
    assert array.shape == (64, 64, 3)


def test_a_frame_that_does_not_say_its_size(tmp_path: Path):
    """Zstandard leaves it out where it is written before the size is known: unpacked into so much room, and no more."""
    zarr.create_array(tmp_path / "a", data=make_tissue(64, 64), chunks=(64, 64, 3), compressors=zarr.codecs.ZstdCodec())
    chunk = tmp_path / "a" / "c" / "0" / "0" / "0"
    chunk.write_bytes(encode_unsized(make_tissue(64, 64).tobytes()))
    assert np.array_equal(open_image(tmp_path / "a").read(0, 0, 64, 64), make_tissue(64, 64))
    chunk.write_bytes(encode_unsized(bytes(BOMB[: 1 << 20])))
    with pytest.raises(ImageError, match=r"chunk 0 unpacks to \d+ bytes or more, where 12288 are due"):
        open_image(tmp_path / "a").read(0, 0, 1, 1)


def encode_unsized(data: bytes) -> bytes:
    """A Zstandard frame of raw and repeated blocks (RFC 8878, 3.1.1.2) with a window, and without a size."""
    blocks = []
    for start in range(0, len(data), 1 << 17):
        piece = data[start : start + (1 << 17)]
        same = piece == piece[:1] * len(piece)
        head = (len(piece) << 3) | (2 if same else 0) | (start + len(piece) >= len(data))
        blocks.append(head.to_bytes(3, "little") + (piece[:1] if same else piece))
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)
    assert imagecodecs.zstd_decode(frame, out=len(data)) == data
    return frame


@pytest.mark.parametrize("place", ["start", "end"])
def test_a_chunk_within_a_shard_that_unpacks_to_much(place: str, tmp_path: Path):
    shards = {"shape": (64, 64, 3), "index_location": place}
    options = {"chunks": (32, 32, 3), "shards": shards, "compressors": zarr.codecs.ZstdCodec()}
    zarr.create_array(tmp_path / "a", data=make_tissue(64, 64), **options)
    file = tmp_path / "a" / "c" / "0" / "0" / "0"
    data = bytearray(file.read_bytes())
    index = np.frombuffer(data, "<u8", 8, 0 if place == "start" else len(data) - 68).reshape(2, 2, 2)
    start, length = (int(number) for number in index[1, 1])
    data[start : start + 13] = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0000]) + (1 << 40).to_bytes(8, "little")
    file.write_bytes(data)
    assert length > 13
    assert np.array_equal(open_image(tmp_path / "a").read(0, 0, 32, 64), make_tissue(64, 64)[:32])
    with pytest.raises(ImageError, match=r"chunk 0 unpacks to 1099511627776 bytes or more, where 3072 are due"):
        open_image(tmp_path / "a").read(40, 40, 1, 1)


def test_codecs_that_nothing_bounds_are_not_taken(tmp_path: Path):
    zarr.create_array(tmp_path / "a", data=make_tissue(8, 8), zarr_format=2, compressors=numcodecs.BZ2())
    assert len(bz2.compress(bytes(1 << 20))) < 100, "ten thousand times as much"
    with pytest.raises(ImageError, match=r"is packed by bz2, which is not read here\. Save it with Zstandard"):
        open_image(tmp_path / "a")


def test_nothing_is_packed_twice(tmp_path: Path):
    codecs = (zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec())
    for name, options in {"plain": {}, "shards": {"shards": (16, 16, 3)}}.items():
        zarr.create_array(tmp_path / name, data=make_tissue(16, 16), chunks=(8, 8, 3), compressors=codecs, **options)
        with pytest.raises(ImageError, match=r"is packed several times, by gzip and zstd"):
            open_image(tmp_path / name)


@pytest.mark.parametrize("kind", ["filters", "compressor"])
def test_no_codec_runs_code(kind: str, tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    zarr.create_array(tmp_path / "a", data=make_tissue(8, 8), chunks=(8, 8, 3), zarr_format=2, compressors=None)
    told = json.loads((tmp_path / "a" / ".zarray").read_text())
    told[kind] = [{"id": "pickle"}] if kind == "filters" else {"id": "pickle"}
    (tmp_path / "a" / ".zarray").write_text(json.dumps(told))
    (tmp_path / "a" / "0.0.0").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ImageError):
        open_image(tmp_path / "a").read(0, 0, 8, 8)
    assert not (tmp_path / "sprung").exists()


def test_shards_of_too_many_chunks(tmp_path: Path):
    zarr.create_array(tmp_path / "a", shape=(4096, 4096), chunks=(1, 1), shards=(4096, 4096), dtype="uint8")
    with pytest.raises(ImageError, match=r"chunks of 1 x 1|with 16,777,216 chunks in each"):
        open_image(tmp_path / "a")
