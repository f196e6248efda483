"""Masks in files of all kinds: the same classes, or an error that names what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.examples import Example, ExampleImages
from mpi4dl_nb.engines.images.mask_file import MaskFile
from tests.images.example_files import CLASSES, FRAMES, PIXELS, save_image


@pytest.mark.parametrize("ending", ["png", "tiff", "npy", "palette.png", "wide.tiff", "float.tiff"])
def test_masks_of_many_kinds_say_the_same(ending: str, tmp_path: Path):
    path = tmp_path / f"mask.{ending}"
    if ending == "npy":
        np.save(path, CLASSES.astype(np.float64))
    elif ending == "palette.png":
        image = Image.fromarray(CLASSES)
        image.putpalette([0, 0, 0, 250, 10, 10, 20, 240, 20])
        image.save(path)
    else:
        kind = {"wide.tiff": np.uint16, "float.tiff": np.float32}.get(ending, np.uint8)
        Image.fromarray(CLASSES.astype(kind)).save(path)
    mask = MaskFile(path, 3)
    assert mask.shape == (60, 80)
    tile = Tile(Span(7, 31), Span(11, 50))
    assert np.array_equal(mask.read(tile), CLASSES[7:31, 11:50])


@pytest.mark.parametrize(("ending", "compression"), [("png", None), ("tif", "tiff_adobe_deflate"), ("tif", "zstd")])
def test_an_empty_mask_of_one_bit_is_as_small_as_it_packs(ending: str, compression: str | None, tmp_path: Path):
    path = tmp_path / f"empty.{ending}"
    Image.new("1", (4000, 4000)).save(path, compression=compression)
    mask = MaskFile(path, 2)
    assert mask.shape == (4000, 4000)
    assert not mask.read(Tile(Span(3900, 4000), Span(3900, 4000))).any()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_jpeg_needs_a_threshold(mode: str, tmp_path: Path):
    discs = np.zeros((64, 64), np.uint8)
    discs[16:48, 16:48] = 255
    path = save_image(tmp_path / "mask.jpg", discs, mode)
    read = MaskFile(path, 2, threshold=127).read(Tile.whole(64, 64))
    assert np.array_equal(read, discs == 255)
    tifffile.imwrite(tmp_path / "mask.tif", discs, compression="jpeg", tile=(64, 64))
    for mask in (path, tmp_path / "mask.tif"):
        for threshold, ignore in ((None, None), (127, 255)):
            with pytest.raises(ImageError, match=r"mask\.(jpg|tif) is compressed as JPEG .*give threshold=127 and no"):
                MaskFile(mask, 256, threshold, ignore)


def with_one(value: float, kind: type[np.generic]) -> NDArray[np.generic]:
    values = CLASSES.astype(kind)
    values[20, 30] = value
    return values


BAD_VALUES = {
    "NaN": (with_one(np.nan, np.float32), "nan"),
    "infinite": (with_one(np.inf, np.float64), "inf"),
    "a fraction": (with_one(1.5, np.float32), r"1\.5"),
    "below zero": (with_one(-1, np.int16), "-1"),
    "no class": (with_one(3, np.uint8), "3"),
}


@pytest.mark.parametrize("threshold", [None, 1])
@pytest.mark.parametrize(("values", "said"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_number_that_is_no_class_is_named_with_its_pixel(values, said: str, threshold: int | None, tmp_path: Path):
    path = tmp_path / "mask.npy"
    np.save(path, values)
    mask = MaskFile(path, 3, threshold)
    if threshold is not None and said != "nan":
        assert mask.read(Tile.whole(60, 80)).max() == 1
        return
    with pytest.raises(
        ImageError, match=rf"mask\.npy holds {said} at row 20, column 30, which is no class: there are 3"
    ):
        mask.read(Tile(Span(15, 60), Span(30, 80)))
    assert mask.read(Tile(Span(0, 20), Span(0, 80))).shape == (20, 80)


def test_masks_that_cannot_be_read(tmp_path: Path, files):
    coloured = save_image(tmp_path / "coloured.png", PIXELS)
    with pytest.raises(ImageError, match=r"coloured\.png is coloured, .* which class a colour is"):
        MaskFile(coloured, 3).read(Tile.whole(60, 80))
    np.save(tmp_path / "three.npy", np.zeros((4, 4, 3)))
    with pytest.raises(ImageError, match=r"three\.npy holds float64 of shape \(4, 4, 3\), but a mask is \(H, W\)"):
        MaskFile(tmp_path / "three.npy", 3)
    np.save(tmp_path / "objects.npy", np.array([[object()]]), allow_pickle=True)
    with pytest.raises(ImageError, match=r"objects\.npy is damaged: .*Python objects"):
        MaskFile(tmp_path / "objects.npy", 3)
    (tmp_path / "text.png").write_text("no mask")
    with pytest.raises(ImageError, match=r"text\.png"):
        MaskFile(tmp_path / "text.png", 3)
    with pytest.raises(ImageError, match=r"none\.png does not exist"):
        MaskFile(tmp_path / "none.png", 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ending", ["png", "jpg", "tiff", "npy", "palette.png", "wide.png", "bool.tif", "floats.tif"])
def test_a_spoiled_mask_is_read_or_refused(ending: str, tmp_path: Path):
    sound, random = tmp_path / f"sound.{ending}", np.random.default_rng(0)
    if ending == "npy":
        np.save(sound, CLASSES.astype(np.float32))
    elif ending.endswith(".tif"):
        values = CLASSES > 0 if ending == "bool.tif" else CLASSES.astype(np.float32)
        tifffile.imwrite(sound, values, tile=(32, 32), compression="deflate", predictor=ending == "floats.tif")
    else:
        image = Image.fromarray(CLASSES.astype(np.uint16) if ending == "wide.png" else CLASSES)
        (image.convert("P") if ending == "palette.png" else image).save(sound)
    data, path, read = sound.read_bytes(), tmp_path / f"spoiled.{ending}", 0
    for number in range(150):
        spoiled = bytearray(data if number % 3 else data[: random.integers(len(data))])
        for place in random.integers(0, max(1, min(len(spoiled), 40 if number % 2 else 10**6)), 1 + number % 4):
            spoiled[place : place + 1] = bytes([random.integers(256)])
        path.write_bytes(bytes(spoiled))
        try:
            rows, cols = MaskFile(path, 3, threshold=1).shape
            read += MaskFile(path, 3, threshold=1).read(Tile.whole(min(rows, 99), min(cols, 99))).max() <= 1
        except ImageError as error:
            assert path.name in str(error)  # noqa: PT017 (either outcome is right)
    assert read < 150


@pytest.mark.parametrize("region", FRAMES.values(), ids=FRAMES)
def test_a_mask_of_another_size_is_named(region: Tile | None, files, tmp_path: Path):
    mask = save_image(tmp_path / "other.png", CLASSES[:-1])
    images = ExampleImages([Example(files[0], 0, mask, region)], ["a"], (60, 80), mask_classes=3)
    with pytest.raises(ImageError, match=r"mask .*other\.png has 59 x 80 pixels, but .*picture\.png has 60 x 80"):
        images.mask(0, Tile.whole(60, 80))
