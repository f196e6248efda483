"""Pictures from files, arrays and tensors; and what is refused, by name and reason."""

from __future__ import annotations

import doctest
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import picture, picture_reader, pillow
from mpi4dl_nb.engines.images.files import FileCache
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Picture, Pixels
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREY = COLOURS[..., 0]


def read_whole(source: object) -> Pixels:
    opened = open_image(source)
    return opened.read(0, 0, *opened.shape())


def save_image(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def write_png_16_bit_colour(path: Path) -> Path:
    """Pillow reads such a file but cannot write one."""

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(12)) * 2)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", header) + make_chunk(b"IDAT", pixels) + make_chunk(b"IEND", b"")
    )
    return path


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.tiff"])
def test_a_lossless_file_gives_its_pixels(tmp_path, name):
    path = save_image(tmp_path / name, Image.fromarray(COLOURS))
    opened = open_image(str(path))
    assert (opened.name, opened.shape()) == (name, (6, 9))
    assert np.array_equal(read_whole(path), COLOURS)


def test_a_jpeg_file_gives_nearly_its_pixels(tmp_path):
    tissue = immunohistochemistry()[:64, :48]
    pixels = read_whole(save_image(tmp_path / "a.jpg", Image.fromarray(tissue), quality=95))
    assert pixels.shape == tissue.shape
    assert np.abs(pixels.astype(int) - tissue).mean() < 8


def test_grey_becomes_three_equal_channels(tmp_path):
    grey = np.repeat(GREY[..., None], 3, axis=2)
    assert np.array_equal(read_whole(save_image(tmp_path / "a.png", Image.fromarray(GREY))), grey)
    assert np.array_equal(read_whole(GREY), grey)
    assert np.array_equal(read_whole(GREY[..., None]), grey)
    assert np.array_equal(read_whole(torch.from_numpy(GREY[None])), grey)


def test_black_and_white_and_palettes_are_colours(tmp_path):
    two = Image.fromarray(GREY > 127)
    assert set(np.unique(read_whole(save_image(tmp_path / "two.png", two)))) == {0, 255}
    few = Image.fromarray(COLOURS).quantize(8)
    assert np.array_equal(read_whole(save_image(tmp_path / "few.png", few)), np.array(few.convert("RGB")))


@pytest.mark.parametrize(("alpha", "expected"), [(0, 255), (255, 0), (102, 153)])
def test_what_is_transparent_is_laid_on_white(tmp_path, alpha, expected):
    black = np.zeros((2, 3, 4), np.uint8)
    black[..., 3] = alpha
    file, tensor = save_image(tmp_path / "a.png", Image.fromarray(black)), torch.from_numpy(black).permute(2, 0, 1)
    for source in (black, file, tensor):
        assert np.array_equal(read_whole(source), np.full((2, 3, 3), expected))


def test_a_transparent_colour_of_a_palette_is_laid_on_white(tmp_path):
    path = save_image(tmp_path / "a.png", Image.fromarray(np.zeros((2, 2), np.uint8)).convert("P"), transparency=0)
    assert np.array_equal(read_whole(path), np.full((2, 2, 3), 255))


def test_a_photograph_stands_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the first row of the file is the right-hand column
    path = save_image(tmp_path / "a.tif", Image.fromarray(COLOURS), exif=exif)
    assert np.array_equal(read_whole(path), np.rot90(COLOURS, -1))


def test_floats_from_0_to_1_are_scaled():
    assert np.array_equal(read_whole(COLOURS / 255), COLOURS)
    assert np.array_equal(read_whole(torch.from_numpy(COLOURS / 255).permute(2, 0, 1)), COLOURS)


def test_a_picture_passes_through():
    opened = open_image(COLOURS)
    assert isinstance(opened, Picture)
    assert open_image(opened) is opened


def test_pictures_larger_than_pillow_expects_are_read(tmp_path, monkeypatch):
    """Pillow warns above 90 million pixels and refuses above 180: a 16384 x 16384 picture has 268."""
    path = save_image(tmp_path / "a.png", Image.fromarray(COLOURS))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    monkeypatch.setattr(picture_reader, "BAND_BYTES", 1)  # a row at a time: Pillow before 13 also looks at each band
    assert np.array_equal(read_whole(path), COLOURS)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_a_rectangle_is_read():
    rectangle = open_image(COLOURS).read(1, 2, 4, 5)
    assert np.array_equal(rectangle, COLOURS[1:5, 2:7])
    rectangle[:] = 0
    assert np.array_equal(read_whole(COLOURS), COLOURS), "a rectangle is a copy"


@pytest.mark.parametrize("corner", [(-1, 0), (0, -1), (-2, -3), (5, 0), (0, 8), (5, 8)], ids=str)
def test_what_lies_outside_is_white(corner):
    around = np.pad(COLOURS, ((9, 9), (9, 9), (0, 0)), constant_values=255)
    y, x = corner
    assert np.array_equal(open_image(COLOURS).read(y, x, 4, 5), around[y + 9 : y + 13, x + 9 : x + 14])


@pytest.mark.parametrize("corner", [(-4, 0), (6, 0), (0, 9), (100, -100)], ids=str)
def test_a_rectangle_wholly_outside_is_white(corner):
    assert np.array_equal(open_image(COLOURS).read(*corner, 4, 5), np.full((4, 5, 3), 255))


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((0, 0, 0, 5), "0 x 5 px of picture, from row 0, column 0, has no pixels"),
        ((1, 2, 3, -1), "3 x -1 px .* has no pixels"),
        ((0, 0, 1 << 40, 1 << 40), "do not fit into memory"),
        ((0.5, 0, 2, 2), "whole pixels, not as .0.5, 0, 2, 2."),
        ((0, 0, 2, 2, 1), r"picture has no level 1: its levels are 0 to 0 \(6 x 9 px\)"),
        ((0, 0, 2, 2, -1), "no level -1"),
        ((0, 0, 2, 2, 0.5), "no level 0.5"),
    ],
    ids=str,
)
def test_a_rectangle_that_makes_no_sense_is_refused(box, reason):
    with pytest.raises(ImageError, match=reason):
        open_image(COLOURS).read(*box)


def test_what_is_read_is_counted():
    opened = open_image(COLOURS)
    opened.read(0, 0, 2, 3)
    opened.read(-1, -1, 2, 3)  # one row of two pixels lies inside
    assert opened.bytes_read == (6 + 2) * 3
    assert pickle.loads(pickle.dumps(opened)).bytes_read == 0


def test_a_thumbnail_shrinks_and_keeps_the_sides_ratio():
    wide = ArrayPicture("wide", np.full((100, 400, 3), 7, np.uint8))
    assert wide.thumbnail(200).shape == (50, 200, 3)
    assert wide.thumbnail(1000).shape == (100, 400, 3)


def write_broken(path: Path) -> Path:
    save_image(path, Image.fromarray(immunohistochemistry()[:64, :64]))
    path.write_bytes(path.read_bytes()[:1500])
    return path


def write_empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def write_false_size(path: Path) -> Path:
    """A damaged TIFF header: it ended the process, by the memory that its size asks for."""
    save_image(path, Image.fromarray(GREY), tiffinfo={})
    directory = path.read_bytes()
    width = struct.pack("<HHII", 256, 4, 1, 9)
    assert width in directory
    path.write_bytes(directory.replace(width, struct.pack("<HHII", 256, 4, 1, 1 << 30)))
    return path


def make_pipe(path: Path) -> Path:
    """Whoever opens one waits until somebody writes to it."""
    os.mkfifo(path)
    return path


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing.png": (lambda path: path, "does not exist"),
    "folder.png": (make_folder, "is a folder"),
    "pipe.png": (make_pipe, "is no regular file"),
    "empty.png": (write_empty, "is not a PNG, JPEG or TIFF picture"),
    "text.tif": (lambda path: path.write_text("no picture") and path, "is not a PNG, JPEG or TIFF picture"),
    "bitmap.bmp": (lambda path: save_image(path, Image.fromarray(GREY)), "is not a PNG, JPEG or TIFF picture"),
    "cut.png": (write_broken, "is damaged"),
    "cut.jpg": (write_broken, "is damaged"),
    "cut.tif": (write_broken, "is not a PNG, JPEG or TIFF picture|is damaged"),
    "boast.tif": (write_false_size, r"is damaged: it says that it holds 6 x 1073741824 pixels"),
    "grey16.png": (lambda path: save_image(path, Image.fromarray(GREY.astype(np.uint16))), "16 bits per channel"),
    "grey16.tif": (lambda path: save_image(path, Image.fromarray(GREY.astype(np.uint16))), "16 bits per channel"),
    "colour16.png": (write_png_16_bit_colour, "16 bits per channel"),
    "float.tif": (
        lambda path: save_image(path, Image.fromarray(GREY.astype(np.float32))),
        "floating-point numbers",
    ),
    "print.jpg": (lambda path: save_image(path, Image.new("CMYK", (4, 4))), "mode CMYK .printing inks"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_picture_of_ours_is_refused_by_name_and_reason(tmp_path, name):
    make, reason = BAD_FILES[name]
    path = make(tmp_path / name)
    with pytest.raises(ImageError, match=reason) as caught:
        open_image(path)
    assert str(path) in str(caught.value)


def test_a_file_that_may_not_be_read_is_reported(tmp_path, monkeypatch):
    path = save_image(tmp_path / "a.png", Image.fromarray(COLOURS))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # root, as whom tests may run, may read everything

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ImageError, match=r"a\.png may not be read by this user"):
        open_image(path)


def test_a_file_is_decoded_once_for_all_who_open_it(tmp_path, monkeypatch):
    path, decoded = save_image(tmp_path / "a.png", Image.fromarray(COLOURS)), []
    monkeypatch.setattr(pillow._DECODED, "_make", lambda path, page: decoded.append(path) or COLOURS.copy())
    for _ in range(3):
        open_image(path).read(0, 0, 2, 2)
    pickle.loads(pickle.dumps(open_image(path))).read(0, 0, 2, 2)
    assert len(decoded) == 1
    save_image(path, Image.fromarray(COLOURS[:4]))
    open_image(path)
    assert len(decoded) == 2, "another file of the same name"


def test_what_nobody_uses_is_forgotten(tmp_path):
    cache = FileCache(pillow._decode, lambda pixels: pixels.nbytes, 2 * COLOURS.nbytes)
    paths = [save_image(tmp_path / f"{number}.png", Image.fromarray(COLOURS)) for number in range(4)]
    for path in paths:
        cache(path, 0)
    assert len(cache._kept) == 2
    assert len(cache._in_use) == 2


def test_a_picture_that_changed_under_a_copy_is_reported(tmp_path):
    sent = pickle.dumps(open_image(save_image(tmp_path / "a.png", Image.fromarray(COLOURS))))
    assert len(sent) < 1000, "the path, not the pixels"
    assert np.array_equal(pickle.loads(sent).read(0, 0, 6, 9), COLOURS)
    save_image(tmp_path / "a.png", Image.fromarray(COLOURS[:4]))
    with pytest.raises(ImageError, match=r"a\.png has changed"):
        pickle.loads(sent).read(0, 0, 2, 2)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (COLOURS.astype(np.uint16), "holds uint16 numbers"),
        (COLOURS.astype(np.float64), "from 0 to 25"),
        (GREY > 127, "holds bool numbers"),
        (COLOURS.transpose(2, 0, 1), r"shape \(3, 6, 9\).*\(H, W, C\) as an array"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \(0, 4, 3\)"),
        (np.full((4, 4, 3), np.nan), "floats from 0 to 1"),
        (torch.zeros(1, 3, 4, 4), r"shape \(1, 3, 4, 4\), but a picture is \(C, H, W\)"),
        (torch.from_numpy(COLOURS), r"1, 3 or 4 channels"),
        (42, "a value of type int"),
    ],
    ids=str,
)
def test_numbers_that_are_no_picture_are_refused(source, reason):
    with pytest.raises(ImageError, match=reason):
        open_image(source)


@pytest.mark.parametrize("module", [picture, picture_reader], ids=lambda module: module.__name__)
def test_the_examples_run(module):
    assert doctest.testmod(module).failed == 0


def test_a_notebook_shows_what_a_picture_is():
    opened = open_image(COLOURS)
    assert repr(opened) == "<picture: 6 rows × 9 columns>"
    html = opened._repr_html_()
    assert ">6 rows × 9 columns<" in html
    assert 'alt="picture, all of it"' in html
    assert "data:image/png;base64," in html
