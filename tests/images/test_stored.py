"""The numbers of mask files against what was written, and against independent readers: no colour touches a class."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image, ImageCms, PngImagePlugin

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.dataset import IGNORED
from mpi4dl_nb.engines.images.mask_file import MaskFile, read_mask_shape
from mpi4dl_nb.engines.images.picture import open_image
from tests.images.example_files import CLASSES
from tests.images.made_files import write_packed_tiff

BITS = CLASSES > 1
RAMP = [each for number in range(256) for each in (255 - number, number, number // 2)]
TILE = Tile(Span(7, 31), Span(11, 50))
Write = Callable[[Path], object]


def make_tiff_writer(values: np.ndarray, **options: object) -> Write:
    return lambda path: tifffile.imwrite(path, values, **options)


def make_png_writer(image: Image.Image, **options: object) -> Write:
    return lambda path: image.save(path, format="png", **options)


def make_indexed(values: np.ndarray) -> Image.Image:
    image = Image.fromarray(values.astype(np.uint8), "P")
    image.putpalette(RAMP)
    return image


def make_colours(values: np.ndarray, alpha: int | None = None) -> Image.Image:
    channels = [values.astype(np.uint8)] * 3
    return Image.fromarray(np.dstack(channels if alpha is None else [*channels, np.full_like(channels[0], alpha)]))


def write_preview_first(path: Path) -> None:
    with tifffile.TiffWriter(path) as file:
        file.write(CLASSES[::4, ::4].copy(), photometric="minisblack", subfiletype=1, metadata=None)
        file.write(CLASSES, photometric="minisblack", metadata=None)


def make_raw_png_writer(bits: int, colour_type: int, rows: np.ndarray) -> Write:
    """A PNG file of whole bytes for each row, written by hand: Pillow writes not all that it reads."""

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def write(path: Path) -> None:
        samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
        width = rows.shape[1] * 8 // (bits * samples)
        header = struct.pack(">IIBBBBB", width, len(rows), bits, colour_type, 0, 0, 0)
        data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", header) + make_chunk(b"IDAT", data) + make_chunk(b"IEND", b"")
        )

    return write


def pack_classes(bits: int) -> np.ndarray:
    """The classes, several to a byte, the first in its highest bits."""
    shifts = np.arange(8 - bits, -1, -bits)
    return (CLASSES.reshape(len(CLASSES), -1, 8 // bits) << shifts).sum(2).astype(np.uint8)


def make_text(**entries: str) -> PngImagePlugin.PngInfo:
    found = PngImagePlugin.PngInfo()
    for name, value in entries.items():
        found.add_text(name, value)
    return found


PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

TRUE_OR_FALSE: dict[str, Write] = {
    "boolean TIFF": make_tiff_writer(BITS),
    "boolean TIFF, tiles": make_tiff_writer(BITS, tile=(16, 32)),
    "boolean TIFF, deflate": make_tiff_writer(BITS, compression="deflate"),
    "boolean TIFF, black is 0": make_tiff_writer(BITS, photometric="minisblack"),
    "transparency mask": make_tiff_writer(BITS, photometric="mask"),
    "1-bit PNG": make_png_writer(Image.fromarray(BITS)),
    "1-bit TIFF": lambda path: Image.fromarray(BITS).save(path, format="tiff"),
    "palette PNG of 1 bit": make_png_writer(make_indexed(BITS), bits=1),
    "boolean array": lambda path: np.save(path, BITS),
}
OF_CLASSES: dict[str, Write] = {
    "white is 0": make_tiff_writer(CLASSES, photometric="miniswhite"),
    "white is 0, tiles": make_tiff_writer(CLASSES, photometric="miniswhite", tile=(16, 32), compression="deflate"),
    "palette TIFF": make_tiff_writer(
        CLASSES, photometric="palette", colormap=np.arange(768, dtype=np.uint16).reshape(3, 256)
    ),
    "16 bits, big-endian": make_tiff_writer(CLASSES.astype(np.uint16), byteorder=">"),
    "16 bits, predictor": make_tiff_writer(CLASSES.astype(np.uint16), compression="deflate", predictor=True),
    "signed": make_tiff_writer(CLASSES.astype(np.int8)),
    "32 bits, big-endian strips": make_tiff_writer(CLASSES.astype(np.int32), byteorder=">", rowsperstrip=7),
    "floats": make_tiff_writer(CLASSES.astype(np.float32), compression="deflate", predictor=True),
    "doubles": make_tiff_writer(CLASSES.astype(np.float64)),
    "4-bit TIFF": partial(write_packed_tiff, numbers=CLASSES, bits=4),
    "three equal channels": make_tiff_writer(np.dstack([CLASSES] * 3), photometric="rgb", tile=(16, 32)),
    "three equal planes": make_tiff_writer(np.stack([CLASSES] * 3), photometric="rgb", planarconfig="separate"),
    "opaque TIFF": make_tiff_writer(np.dstack([CLASSES, np.full_like(CLASSES, 255)]), extrasamples=["unassalpha"]),
    "a preview comes first": write_preview_first,
    "2-bit PNG": make_raw_png_writer(2, 0, pack_classes(2)),
    "4-bit PNG": make_raw_png_writer(4, 0, pack_classes(4)),
    "16-bit PNG": make_png_writer(Image.fromarray(CLASSES.astype(np.uint16))),
    "palette PNG": make_png_writer(make_indexed(CLASSES)),
    "palette PNG of 2 bits": make_png_writer(make_indexed(CLASSES), bits=2),
    "palette PNG, 0 transparent": make_png_writer(make_indexed(CLASSES), transparency=0),
    "palette PNG, half transparent": make_png_writer(make_indexed(CLASSES), transparency=bytes([0, 128, 255])),
    "grey PNG, 0 transparent": make_png_writer(Image.fromarray(CLASSES), transparency=0),
    "opaque RGBA": make_png_writer(make_colours(CLASSES, alpha=255)),
    "opaque LA": make_png_writer(Image.fromarray(CLASSES).convert("LA")),
    "equal RGB": make_png_writer(make_colours(CLASSES)),
    "a colour profile": make_png_writer(Image.fromarray(CLASSES), icc_profile=PROFILE),
    "a gamma in words": make_png_writer(Image.fromarray(CLASSES), pnginfo=make_text(Gamma="0.45")),
}


def write_file(folder: Path, name: str, write: Write) -> Path:
    path = folder / ("mask.npy" if "array" in name else "mask")
    write(path)
    return path


@pytest.mark.parametrize("name", TRUE_OR_FALSE)
def test_true_is_class_1(tmp_path: Path, name: str):
    path = write_file(tmp_path, name, TRUE_OR_FALSE[name])
    assert read_mask_shape(path) == BITS.shape
    assert np.array_equal(MaskFile(path, 2).read(Tile.whole(*BITS.shape)), BITS)
    assert np.array_equal(MaskFile(path, 2).read(TILE), BITS[7:31, 11:50])
    if "palette" not in name:  # a threshold for shades of 0 ... 255 means the same of two shades
        assert np.array_equal(MaskFile(path, 2, threshold=127).read(TILE), BITS[7:31, 11:50])


@pytest.mark.parametrize("name", OF_CLASSES)
def test_the_stored_number_is_the_class(tmp_path: Path, name: str):
    path = write_file(tmp_path, name, OF_CLASSES[name])
    assert read_mask_shape(path) == CLASSES.shape
    assert np.array_equal(MaskFile(path, 3).read(Tile.whole(*CLASSES.shape)), CLASSES)
    assert np.array_equal(MaskFile(path, 3).read(TILE), CLASSES[7:31, 11:50])


@pytest.mark.parametrize(("bits", "scale"), [(2, 85), (4, 17)])
def test_few_bits_are_spread_before_a_threshold(tmp_path: Path, bits: int, scale: int):
    """As Pillow shows them: an optimiser has made 2 bits of the shades 0, 85, 170 and 255."""
    path = tmp_path / "mask.png"
    make_raw_png_writer(bits, 0, pack_classes(bits))(path)
    shades = np.array(Image.open(path))
    assert np.array_equal(shades, CLASSES * scale)
    threshold = int(1.5 * scale)
    assert np.array_equal(MaskFile(path, 2, threshold=threshold).read(Tile.whole(60, 80)), shades > threshold)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_a_turned_mask_lies_on_its_turned_picture(tmp_path: Path, orientation: int, ending: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shades = (CLASSES > 0).astype(np.uint8).repeat(8, 0).repeat(8, 1) * 255  # blocks that JPEG keeps
    picture, mask = tmp_path / f"picture.{ending}", tmp_path / f"mask.{ending}"
    for path in (picture, mask):
        Image.fromarray(shades).save(path, exif=exif)
    pixels = open_image(picture)
    assert read_mask_shape(mask) == pixels.shape()
    seen = pixels.read(5, 9, 300, 330)[..., 0] > 127
    assert np.array_equal(MaskFile(mask, 2, threshold=127).read(Tile(Span(5, 305), Span(9, 339))), seen)


def test_of_a_large_mask_only_the_touched_tiles_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, large = tmp_path / "mask.tif", np.tile(CLASSES, (10, 10))
    tifffile.imwrite(path, large > 1, tile=(64, 64), compression="deflate")
    mask, read, pread = MaskFile(path, 2), [], os.pread
    monkeypatch.setattr(os, "pread", lambda *place: read.append(place) or pread(*place))
    assert np.array_equal(MaskFile(path, 2).read(Tile(Span(70, 120), Span(130, 190))), large[70:120, 130:190] > 1)
    assert len(read) == 1
    assert mask.shape == (600, 800)


# ---- refused


def make_four_channels() -> np.ndarray:
    return np.dstack([CLASSES] * 4)


def clear(name: str) -> Image.Image:
    """A shape of one colour on a transparent background."""
    pixels = np.zeros((60, 80, 4), np.uint8)
    pixels[BITS] = (255, 0, 0, 255)
    return Image.fromarray(pixels).convert(name)


REFUSED: dict[str, tuple[Write, int | None, str]] = {
    "transparent RGBA": (
        make_png_writer(clear("RGBA")),
        127,
        r"is transparent at row 7, column 11, .*getchannel\('A'\)",
    ),
    "transparent LA": (make_png_writer(clear("LA")), None, "is transparent at row 7, column 11"),
    "transparent TIFF": (
        make_tiff_writer(np.dstack([CLASSES] * 4), photometric="rgb", extrasamples=["assocalpha"]),
        None,
        "is transparent at row 7",
    ),
    "colours": (
        make_png_writer(make_indexed(CLASSES).convert("RGB")),
        None,
        r"is coloured, \(25\d, \d, \d\) at row 7, column 11,",
    ),
    "colours on both sides": (
        make_png_writer(make_indexed(CLASSES).convert("RGB")),
        127,
        "is coloured, .* which class a colour is",
    ),
    "palette and threshold": (
        make_png_writer(make_indexed(CLASSES)),
        127,
        r"has a palette: .*Leave the threshold away.*\(classes=\)",
    ),
    "four channels": (
        make_tiff_writer(make_four_channels(), photometric="rgb", extrasamples=["unspecified"]),
        None,
        "has 4 channels",
    ),
    "two channels": (
        make_tiff_writer(make_four_channels()[..., :2], photometric="minisblack", planarconfig="contig"),
        None,
        "has 2 channels",
    ),
    "fax": (lambda path: Image.fromarray(BITS).save(path, format="tiff", compression="group4"), None, "as a fax is"),
    "WebP": (
        make_tiff_writer(np.dstack([CLASSES] * 3), photometric="rgb", compression="webp"),
        None,
        r"not read here \(50001\)",
    ),
    "16-bit grey and alpha": (
        make_raw_png_writer(16, 4, np.zeros((60, 320), np.uint8)),
        None,
        "several channels of 16 bits",
    ),
    "16-bit colours": (make_raw_png_writer(16, 2, np.zeros((60, 480), np.uint8)), None, "several channels of 16 bits"),
    "inks": (lambda path: Image.new("CMYK", (80, 60)).save(path, format="jpeg"), None, "is of mode CMYK"),
    "a stack": (
        make_tiff_writer(np.stack([CLASSES] * 4), photometric="minisblack"),
        None,
        "several pictures of one size",
    ),
    "a volume": (
        make_tiff_writer(np.zeros((16, 60, 80), np.uint8), volumetric=True, tile=(16, 16, 16)),
        None,
        "no plain numbers",
    ),
    "a GIF": (lambda path: Image.fromarray(CLASSES).save(path, format="gif"), None, "is not a PNG, JPEG or TIFF file"),
    "a Zarr store": (lambda path: zarr.create_array(path, data=CLASSES), None, "is a Zarr store, and masks are not"),
    "a folder": (Path.mkdir, None, "is a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_number_for_a_class_is_refused_by_name(tmp_path: Path, name: str):
    write, threshold, reason = REFUSED[name]
    write(tmp_path / "mask.x")
    with pytest.raises(ImageError, match=rf"mask\.x .*{reason}") as caught:
        MaskFile(tmp_path / "mask.x", 3, threshold).read(TILE)
    assert any(word in str(caught.value) for word in ("Save", "save", "Give the path")), "a way out"


def test_shades_of_a_coloured_jpeg_may_differ_a_little(tmp_path: Path):
    shades = np.full((64, 64, 3), (250, 244, 247), np.uint8)
    shades[16:48, 16:48] = (3, 9, 6)
    Image.fromarray(shades).save(tmp_path / "mask.jpg", quality=95)
    assert np.array_equal(MaskFile(tmp_path / "mask.jpg", 2, 127).read(Tile.whole(64, 64)), shades[..., 0] > 127)


# ---- numbers that are no class


@pytest.mark.parametrize("kind", ["grey PNG", "palette PNG", "TIFF", "signed TIFF", "array"])
def test_ignored_numbers_have_no_class(tmp_path: Path, kind: str):
    void, rim = (-1, -2) if kind == "signed TIFF" else (255, 254)
    values = CLASSES.astype(np.int64)
    values[::7], values[:, 3] = void, rim
    expected = np.where((values == void) | (values == rim), IGNORED, values)
    path = tmp_path / {"array": "mask.npy"}.get(kind, "mask")
    if kind == "array":
        np.save(path, values)
    elif "TIFF" in kind:
        tifffile.imwrite(path, values.astype(np.int8 if kind == "signed TIFF" else np.uint8))
    else:
        (make_indexed(values) if kind == "palette PNG" else Image.fromarray(values.astype(np.uint8))).save(path, "png")
    assert np.array_equal(MaskFile(path, 3, ignore=(void, rim)).read(Tile.whole(60, 80)), expected)
    with pytest.raises(ImageError, match=rf"holds {rim} at row 0, column 3, which is no class: .*\(ignore=\)"):
        MaskFile(path, 3, ignore=void).read(Tile.whole(60, 80))
    if kind in ("grey PNG", "array"):
        above = np.where(expected == IGNORED, IGNORED, values > 1)
        assert np.array_equal(MaskFile(path, 2, threshold=1, ignore=(void, rim)).read(Tile.whole(60, 80)), above)


@pytest.mark.parametrize("ignore", ["void", 1.5, ["255"]], ids=str)
def test_ignored_numbers_are_whole(tmp_path: Path, ignore: object):
    np.save(tmp_path / "mask.npy", CLASSES)
    with pytest.raises(ImageError, match="must be a whole number of the masks, such as 255"):
        MaskFile(tmp_path / "mask.npy", 3, ignore=ignore)
