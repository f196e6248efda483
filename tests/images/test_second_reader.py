"""A file is called damaged if two decoders fail or bytes are missing; a kind that is not read is called that."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from made_files import check_refused, read_mask, read_picture
from PIL import Image
from raw_tiff import write_tiff

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import second_reader
from mpi4dl_nb.engines.images.second_reader import find_decoder

GREY = np.random.default_rng(0).integers(0, 256, (32, 48), np.uint8)


def write_long_strip(folder: Path) -> Path:
    """A file whose strip has more bytes than its pixels, which libtiff passes over."""
    return write_tiff(folder / "a.tif", GREY.shape, [GREY.tobytes() * 2], {})


def write_damaged_strip(folder: Path) -> Path:
    strips = [zlib.compress(GREY[:16].tobytes()), b"no deflate at all"]
    return write_tiff(folder / "a.tif", GREY.shape, strips, {278: ("I", [16]), 259: ("H", [8])})


def test_a_file_that_another_library_decodes_is_of_a_rare_kind(tmp_path: Path):
    path = write_long_strip(tmp_path)
    for read in (read_picture, read_mask):
        check_refused(lambda read=read: read(path), "bytes cannot lie in 1536.*Pillow decodes it: save")


def test_a_file_that_two_libraries_do_not_decode_is_damaged(tmp_path: Path):
    path = write_damaged_strip(tmp_path)
    for read in (read_picture, read_mask):
        check_refused(lambda read=read: read(path), r"is damaged: .*Copy or export it again")


def write_picture(folder: Path, name: str) -> Path:
    Image.fromarray(GREY).save(folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif"])
def test_a_whole_file_is_decoded_and_a_part_of_it_is_not(tmp_path: Path, name: str):
    path = write_picture(tmp_path, name)
    assert find_decoder(path) == "Pillow"
    path.write_bytes(path.read_bytes()[:-700])
    assert find_decoder(path) == ""
    check_refused(lambda: read_picture(path), "is damaged")


def test_pages_within_pages_and_large_files_have_no_second_opinion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(GREY, subifds=1, metadata=None)
        file.write(GREY[::2, ::2].copy(), metadata=None)
    assert find_decoder(tmp_path / "a.tif") is None
    path = write_damaged_strip(tmp_path)
    monkeypatch.setattr(second_reader, "MOST_PX", 100)
    assert find_decoder(path) is None
    with pytest.raises(ImageError, match=r"cannot be read: .* of a kind that is not read here, or it is damaged"):
        read_picture(path)


def test_a_kind_that_is_not_read_is_named_with_what_converts_it(tmp_path: Path):
    """OME-TIFF whose channels are LZMA: each page is decoded whole, so that several cannot be one picture."""
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        file.write(
            np.stack([GREY] * 3),
            photometric="minisblack",
            metadata={"axes": "CYX"},
            compression="lzma",
            rowsperstrip=32,
        )
    check_refused(
        lambda: read_picture(tmp_path / "a.ome.tif"), r"one channel to a page, and in a kind \(LZMA\).*gdal_translate"
    )


def test_empty_strips_of_a_kind_that_is_decoded_whole_are_refused(tmp_path: Path):
    strips = [b"\0" * 10, None]
    path = write_tiff(tmp_path / "a.tif", GREY.shape, strips, {278: ("I", [16]), 259: ("H", [4]), 258: ("H", [1])})
    check_refused(lambda: read_picture(path), r"leaves out blank tiles or strips, in a kind \(CCITT(FAX4|_T6)\)")
