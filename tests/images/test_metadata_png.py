"""A made file for each row of the section PNG of the table of metadata."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_files import (
    SECTIONS,
    MadeFile,
    check_row,
    list_rows_without_files,
    read_by_gdal,
    read_by_pillow,
    read_picture,
)
from made_profiles import DISPLAY_P3, OPPONENTS, SWAPPED, convert_by_imagecodecs
from PIL import Image, ImageCms

from mpi4dl_nb.engines.images import colour_profile
from mpi4dl_nb.engines.images.colour_profile import find_effect
from mpi4dl_nb.engines.images.picture import open_image, read_shape

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 32, 3), np.uint8)
GREY = PIXELS[..., 0]
EQUAL = np.repeat(GREY[..., None], 3, 2)
INDICES = GREY % 4
COLOURS = np.array([[250, 10, 20], [0, 200, 3], [7, 70, 170], [255, 255, 0]], np.uint8)
_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def make_chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def make(
    pixels: np.ndarray, *chunks: bytes, bits: int = 8, palette: bool = False, before: bytes = b"", after: bytes = b""
) -> Callable[[Path], Path]:
    """How to write a PNG file, by hand, with chunks between its header and its pixels."""
    pixels = np.atleast_3d(pixels)
    rows, cols, channels = pixels.shape
    header = struct.pack(">IIBBBBB", cols, rows, bits, 3 if palette else _TYPES[channels], 0, 0, 0)
    if bits == 16:
        lines = pixels.astype(">u2").tobytes()
    else:
        spread = np.unpackbits(pixels.astype(np.uint8)[..., None], axis=3)[..., 8 - bits :].reshape(rows, -1)
        lines = np.packbits(spread, axis=1).tobytes()
    length = len(lines) // rows
    data = zlib.compress(b"".join(b"\0" + lines[row * length : (row + 1) * length] for row in range(rows)))

    def write(folder: Path) -> Path:
        parts = [before, make_chunk(b"IHDR", header), *chunks, make_chunk(b"IDAT", data), after, make_chunk(b"IEND")]
        (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
        return folder / "a.png"

    return write


def save(pixels: np.ndarray, **options: object) -> Callable[[Path], Path]:
    """How to write a PNG file by Pillow."""

    def write(folder: Path) -> Path:
        Image.fromarray(pixels).save(folder / "a.png", **options)
        return folder / "a.png"

    return write


def write_interlaced(folder: Path) -> Path:
    """Seven passes, each a small image (PNG, 8.1); Pillow does not write them."""
    lines = b""
    for y0, x0, down, right in (
        (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1),
    ):  # fmt: skip
        lines += b"".join(b"\0" + row.tobytes() for row in GREY[y0::down, x0::right] if row.size)
    header = struct.pack(">IIBBBBB", GREY.shape[1], GREY.shape[0], 8, 0, 0, 0, 1)
    body = make_chunk(b"IHDR", header) + make_chunk(b"IDAT", zlib.compress(lines)) + make_chunk(b"IEND")
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return folder / "a.png"


def write_animated(folder: Path) -> Path:
    Image.fromarray(GREY).save(folder / "a.png", save_all=True, append_images=[Image.fromarray(255 - GREY)])
    return folder / "a.png"


def make_profile_chunk(data: bytes) -> bytes:
    return make_chunk(b"iCCP", b"p\0\0" + zlib.compress(data))


def fill_with_white(pixels: np.ndarray, transparent: np.ndarray) -> np.ndarray:
    return np.where(
        transparent[..., None], 255, np.broadcast_to(np.atleast_3d(pixels), (*transparent.shape, 3))
    ).astype(np.uint8)


PLTE = make_chunk(b"PLTE", COLOURS.tobytes())
EXIF = Image.Exif()
EXIF[0x0112] = 6
TURNED = EXIF.tobytes().removeprefix(b"Exif\0\0")
OTHERS = b"".join(
    [
        make_chunk(b"pHYs", struct.pack(">IIB", 10, 20, 0)),
        make_chunk(b"oFFs", struct.pack(">iiB", 5, 6, 0)),
        make_chunk(b"sCAL", b"\x010.5\x000.5"),
        make_chunk(b"tIME", bytes([7, 234, 1, 1, 0, 0, 0])),
    ]
)
P3_CODES = make_chunk(b"cICP", bytes([12, 13, 0, 1]))
WIDE = make_chunk(b"cHRM", struct.pack(">8I", 31270, 32900, 70800, 29200, 17000, 79700, 13100, 4600))
CONVERTED = np.array(find_effect(OPPONENTS, "RGB").transform.apply(Image.fromarray(EQUAL)))
KEY = struct.pack(">3H", *EQUAL[0, 0])

MADE: dict[str, MadeFile] = {
    "bit depth": MadeFile(make(INDICES, bits=2), INDICES * 85, INDICES, others={read_by_pillow: None}),
    "bit depth 16": MadeFile(
        make(GREY.astype(int) * 257, bits=16), "has 16 bits", GREY.astype(int) * 257, options={"classes": 65536}
    ),
    "interlace": MadeFile(write_interlaced, GREY, GREY, others={read_by_pillow: None, read_by_gdal: None}),
    "PLTE": MadeFile(
        make(INDICES, PLTE, bits=2, palette=True),
        COLOURS[INDICES],
        INDICES,
        naive=INDICES,
        others={read_by_pillow: None},
    ),
    "PLTE, too short": MadeFile(
        make(INDICES, make_chunk(b"PLTE", COLOURS[:3].tobytes()), bits=2, palette=True),
        "damaged: a pixel has colour 3 of a palette of 3",
        INDICES,
    ),
    "tRNS of a palette": MadeFile(
        make(INDICES, PLTE, make_chunk(b"tRNS", b"\xff\xff\0"), bits=4, palette=True),
        fill_with_white(COLOURS[INDICES], INDICES == 2),
        INDICES,
        naive=COLOURS[INDICES],
    ),
    "tRNS of grey": MadeFile(
        make(INDICES, make_chunk(b"tRNS", b"\0\1"), bits=2),
        fill_with_white(INDICES * 85, INDICES == 1),
        INDICES,
        naive=INDICES * 85,
    ),
    "tRNS of colours": MadeFile(
        make(EQUAL, make_chunk(b"tRNS", KEY)), fill_with_white(GREY, GREY[0, 0] == GREY), GREY, naive=GREY
    ),
    "alpha": MadeFile(
        make(np.dstack([PIXELS, np.where(GREY > 127, 255, 0)])),
        fill_with_white(PIXELS, GREY <= 127),
        "is transparent",
        naive=PIXELS,
    ),
    "bKGD": MadeFile(
        make(GREY, make_chunk(b"tRNS", struct.pack(">H", GREY[0, 0])), make_chunk(b"bKGD", b"\0\7")),
        fill_with_white(GREY, GREY[0, 0] == GREY),
        GREY,
        naive=fill_with_white(GREY, GREY[0, 0] == GREY),
    ),
    "sBIT": MadeFile(
        make(GREY, make_chunk(b"sBIT", b"\5")),
        GREY,
        GREY,
        naive=GREY,
        others={read_by_pillow: None, read_by_gdal: None},
    ),
    "hIST, sPLT, pHYs, oFFs, sCAL, tIME": MadeFile(
        make(GREY, OTHERS), GREY, GREY, naive=GREY, others={read_by_gdal: None}
    ),
    "iCCP": MadeFile(
        make(EQUAL, make_profile_chunk(DISPLAY_P3)), GREY, GREY, naive=GREY, others={read_by_pillow: None}
    ),
    "iCCP of no red, green and blue": MadeFile(make(EQUAL, make_profile_chunk(OPPONENTS)), CONVERTED, GREY, naive=GREY),
    "sRGB": MadeFile(make(EQUAL, make_chunk(b"sRGB", b"\0")), GREY, GREY, naive=GREY),
    "gAMA": MadeFile(
        make(GREY, make_chunk(b"gAMA", struct.pack(">I", 100_000))),
        GREY,
        GREY,
        naive=GREY,
        others={read_by_pillow: None},
    ),
    "cHRM": MadeFile(make(GREY, WIDE), GREY, GREY, naive=GREY, others={read_by_pillow: None}),
    "cICP": MadeFile(make(GREY, P3_CODES), GREY, GREY, naive=GREY, others={read_by_pillow: None}),
    "mDCV, cLLI": MadeFile(make(GREY, make_chunk(b"cLLI", bytes(8))), GREY, GREY, naive=GREY),
    "eXIf": MadeFile(
        make(GREY, make_chunk(b"eXIf", TURNED)),
        np.rot90(GREY, -1),
        np.rot90(GREY, -1),
        naive=GREY,
        others={read_by_pillow: None},
    ),
    "acTL, fcTL, fdAT": MadeFile(write_animated, "is an animation", "is an animation"),
    "CgBI": MadeFile(
        make(PIXELS, before=make_chunk(b"CgBI", b"\0\0\0\0")), r"Apple's variant of PNG", r"Apple's variant of PNG"
    ),
}


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr(colour_profile, "_SAID", set())


def test_every_row_has_a_made_file():
    assert list_rows_without_files(SECTIONS["PNG"], MADE) == []


WARNED = {
    "iCCP": "colour profile 'RGB built-in'",
    "gAMA": "gAMA chunk .1,",
    "cHRM": "cHRM",
    "cICP": "cICP chunk .12, 13, 0, 1",
}


@pytest.mark.parametrize("row", SECTIONS["PNG"], ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_row(row, MADE[row.name], tmp_path)
    told = [
        str(warning.message) for warning in caught if "says that its numbers have other colours" in str(warning.message)
    ]
    assert len(told) == (row.name in WARNED)


@pytest.mark.parametrize("name", WARNED)
def test_other_colours_are_said_once(tmp_path: Path, name: str):
    path = MADE[name].write(tmp_path)
    with pytest.warns(
        UserWarning, match=rf"a\.png: its {WARNED[name]}.* says that its numbers have other colours .*sRGB"
    ):
        read_shape(path)  # as the check of a table does, in the notebook
    open_image(path)  # a second warning would be an error


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_before_and_after_the_pixels(tmp_path: Path, orientation: int, late: bool):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = make_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    path = make(PIXELS, after=data)(tmp_path) if late else make(PIXELS, data)(tmp_path)
    assert np.array_equal(read_picture(path), read_by_pillow(path))
    assert read_shape(path) == open_image(path).shape()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_transparent_shade_counts_in_the_bits_of_the_file(tmp_path: Path, bits: int):
    most = (1 << bits) - 1
    stored = GREY & most
    for key in {0, 1, most}:
        # Higher bits than those of the image do not count (PNG, 11.3.1.1).
        path = make(stored, make_chunk(b"tRNS", struct.pack(">H", key | 0x100)), bits=bits)(tmp_path)
        expected = fill_with_white(stored.astype(int) * 255 // most, stored == key)
        assert np.array_equal(read_picture(path), expected), key


def test_a_profile_that_changes_nothing_is_not_spoken_of(tmp_path: Path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(read_picture(make(PIXELS, make_profile_chunk(srgb))(tmp_path)), PIXELS)
    damaged = make(PIXELS, make_profile_chunk(b"no profile" * 50))(tmp_path)
    assert np.array_equal(read_picture(damaged), PIXELS)


def test_numbers_that_are_no_colours_are_converted_as_by_another_program(tmp_path: Path):
    alpha = np.dstack([PIXELS, np.where(GREY > 127, 255, 0)]).astype(np.uint8)
    for data, stored, transparent in (
        (OPPONENTS, PIXELS, GREY < 0),
        (OPPONENTS, alpha, GREY <= 127),
        (SWAPPED, PIXELS, GREY < 0),
    ):
        found = read_picture(make(stored, make_profile_chunk(data))(tmp_path)).astype(int)
        expected = fill_with_white(convert_by_imagecodecs(PIXELS, data), transparent)
        assert np.abs(found - expected).max() <= 1  # another program rounds otherwise
