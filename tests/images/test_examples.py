"""Images in files: folders by class and slide, regions, sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Grid, Span, Tile
from mpi4dl_nb.engines.images.dataset import IGNORED
from mpi4dl_nb.engines.images.examples import Example, ExampleImages
from mpi4dl_nb.engines.images.folder import folder_images
from mpi4dl_nb.engines.images.picture import open_image, read_shape
from tests.images.example_files import CLASSES, FRAMES, PIXELS, REGION, save_image
from tests.sampling import set_trials


def convert_to_bytes(part: torch.Tensor) -> NDArray[np.uint8]:
    """(3, h, w) from -1 to 1 -> (h, w, 3)."""
    return ((part + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()


def cut_tile(array: NDArray[np.generic], tile: Tile, outside: int) -> NDArray[np.generic]:
    """Its pixels, of which those that lie outside are as said."""
    made = np.full((*tile.shape, *array.shape[2:]), outside, np.int64)
    for row in range(*_clip_span(tile.rows, len(array))):
        for col in range(*_clip_span(tile.cols, array.shape[1])):
            made[row - tile.rows.start, col - tile.cols.start] = array[row, col]
    return made


def _clip_span(span: Span, size: int) -> tuple[int, int]:
    return max(span.start, 0), min(span.stop, size)


# ---- sizes and regions


@pytest.mark.sampled(3)
@set_trials(60)
@given(st.data())
@pytest.mark.parametrize("region", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("fit", ["scale", "crop", "own size"])
def test_parts_and_masks_are_those_of_the_whole(fit: str, region: Tile | None, files, data):
    side = st.integers(1, 100)
    size = None if fit == "own size" else (data.draw(side), data.draw(side))
    example = Example(files[0], 1, files[1], region)
    images = ExampleImages([example], ["a", "b"], size, "crop" if fit == "crop" else "scale", mask_classes=3)
    shape = images.shape(0)
    whole = Tile.whole(*shape)
    pixels, mask = images.part(0, whole), images.mask(0, whole)
    assert (pixels.shape, mask.shape) == ((3, *shape), shape)
    grid = Grid(*(data.draw(st.integers(1, min(3, side))) for side in shape))
    for tile in grid.cut(*shape):
        assert torch.equal(images.part(0, tile), pixels[(slice(None), *tile.to_slices(whole))])
        assert torch.equal(images.mask(0, tile), mask[tile.to_slices(whole)])


@pytest.mark.parametrize("region", FRAMES.values(), ids=FRAMES)
def test_an_own_size_keeps_every_pixel(region: Tile | None, files):
    images = ExampleImages([Example(files[0], 1, files[1], region)], ["a", "b"], None, mask_classes=3)
    frame = region or Tile.whole(60, 80)
    assert images.shape(0) == frame.shape
    whole = Tile.whole(*frame.shape)
    assert np.array_equal(convert_to_bytes(images.part(0, whole)), cut_tile(PIXELS, frame, 255))
    assert np.array_equal(images.mask(0, whole), cut_tile(CLASSES, frame, IGNORED))


def test_a_crop_is_the_middle_with_white_around_what_is_small(files):
    images = ExampleImages([Example(files[0], 1, files[1])], ["a", "b"], (20, 100), "crop", mask_classes=3)
    frame, whole = Tile(Span(20, 40), Span(-10, 90)), Tile.whole(20, 100)
    assert np.array_equal(convert_to_bytes(images.part(0, whole)), cut_tile(PIXELS, frame, 255))
    assert np.array_equal(images.mask(0, whole), cut_tile(CLASSES, frame, IGNORED))


def test_what_lies_around_an_image_without_a_mask_has_no_class(files):
    examples = [Example(files[0], 1), Example(files[0], 0, files[1])]
    images = ExampleImages(examples, ["a", "b"], (64, 90), "crop", mask_classes=3)
    whole, frame = Tile.whole(64, 90), Tile(Span(-2, 62), Span(-5, 85))
    expected = cut_tile(np.ones_like(CLASSES), frame, IGNORED)
    assert np.array_equal(images.mask(0, whole), expected)
    assert np.array_equal(images.mask(0, Tile(Span(60, 64), Span(80, 90))), expected[60:, 80:])
    scaled = ExampleImages(examples, ["a", "b"], (64, 90), mask_classes=3)
    assert scaled.mask(0, whole).unique().tolist() == [1]


def test_what_lies_around_a_region_is_not_of_its_image(files):
    region = Tile(Span(20, 30), Span(30, 40))
    images = ExampleImages([Example(files[0], 1, files[1], region)], ["a", "b"], (14, 10), "crop", mask_classes=3)
    whole = Tile.whole(14, 10)
    pixels, mask = convert_to_bytes(images.part(0, whole)), images.mask(0, whole)
    for edge in (slice(0, 2), slice(12, 14)):
        assert (pixels[edge] == 255).all()
        assert (mask[edge] == IGNORED).all()
    assert np.array_equal(pixels[2:12], PIXELS[20:30, 30:40])
    assert np.array_equal(mask[2:12], CLASSES[20:30, 30:40])


def test_a_mask_is_scaled_to_its_nearest_pixels(files):
    images = ExampleImages([Example(files[0], 1, files[1])], ["a", "b"], (20, 40), mask_classes=3)
    assert np.array_equal(images.mask(0, Tile.whole(20, 40)), CLASSES[1::3, 1::2])


def test_a_mask_of_the_region_alone(files, tmp_path: Path):
    region = Tile(Span(10, 30), Span(40, 70))
    small = save_image(tmp_path / "small.png", CLASSES[10:30, 40:70])
    large, own = (Example(files[0], 1, mask, region) for mask in (files[1], small))
    images = ExampleImages([large, own], ["a", "b"], (11, 17), mask_classes=3)
    assert torch.equal(images.mask(0, Tile.whole(11, 17)), images.mask(1, Tile.whole(11, 17)))


def test_of_a_large_picture_only_the_part_is_read(monkeypatch: pytest.MonkeyPatch, files):
    picture, asked = open_image(files[0]), []

    class Spied:
        def __getattr__(self, name: str) -> object:
            return getattr(picture, name)

        def read(self, *box: int) -> NDArray[np.uint8]:
            asked.append(box)
            return picture.read(*box)

    monkeypatch.setattr("mpi4dl_nb.engines.images.examples.open_cached", lambda path: Spied())
    tile = Tile(Span(30, 45), Span(20, 40))
    ExampleImages([Example(files[0], 1)], ["a", "b"], (60, 80)).part(0, tile)
    ExampleImages([Example(files[0], 1)], ["a", "b"], (30, 160)).part(0, Tile(Span(10, 20), Span(40, 80)))
    assert asked[0] == (30, 20, 15, 20)
    assert asked[1][0] >= 18
    assert asked[1][2] <= 24
    assert asked[1][1] >= 19
    assert asked[1][3] <= 22


def test_names_slides_and_labels(files):
    images = ExampleImages(
        [Example(files[0], 1, None, REGION, slide="s7"), Example(files[0], 0, files[1])], ["a", "b"], (5, 5)
    )
    assert images.name(0).endswith("picture.png[-5:41, 50:90]")
    assert images.name(1).endswith("picture.png")
    assert (images.slide(0), images.slide(1)) == ("s7", str(files[0]))
    assert [images.label(index) for index in range(2)] == [1, 0]
    assert images.mask(0, Tile.whole(5, 5)).tolist() == [[1] * 5] * 5
    with pytest.raises(ImageError, match=r"fit='stretch' is unknown\. Choose one of scale, crop"):
        ExampleImages([], ["a"], (5, 5), "stretch")


def test_a_mask_says_nothing_of_the_whole_image(files):
    images = ExampleImages([Example(files[0], None, files[1])], [], (60, 80), mask_classes=3)
    assert images.classes == 3
    with pytest.raises(ImageError, match=r"picture\.png has a mask but no label"):
        images.label(0)


def test_a_region_that_has_nothing_of_its_picture_is_named(files):
    images = ExampleImages([Example(files[0], 0, None, Tile(Span(60, 70), Span(0, 5)))], ["a"], (5, 5))
    with pytest.raises(ImageError, match=r"region of 10 x 5 px from row 60, column 0 lies outside of picture\.png"):
        images.part(0, Tile.whole(5, 5))


# ---- folders


def make_folder(folder: Path) -> Path:
    for name in ("tumour/s1/1.png", "tumour/s1/2.png", "tumour/s2/1.png", "normal/s1/1.png", "normal/9.png"):
        save_image(folder / name, PIXELS[:8, :9])
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("no class")
    return folder


def test_pictures_by_class_and_slide(tmp_path: Path):
    images = folder_images(make_folder(tmp_path), (8, 9))
    assert images.names == ("normal", "tumour")
    found = [(images.examples[i].path.relative_to(tmp_path).as_posix(), images.label(i)) for i in range(len(images))]
    assert found == [
        ("normal/9.png", 0),
        ("normal/s1/1.png", 0),
        ("tumour/s1/1.png", 1),
        ("tumour/s1/2.png", 1),
        ("tumour/s2/1.png", 1),
    ]
    assert [images.slide(i) for i in range(1, 5)] == ["s1", "s1", "s1", "s2"]
    assert images.slide(0) == str(tmp_path / "normal" / "9.png")


def test_one_slide_in_two_classes_is_on_one_side(tmp_path: Path):
    for slide in range(8):
        for kind in ("normal", "tumour"):
            save_image(tmp_path / kind / f"s{slide}" / "1.png", PIXELS[:8, :9])
    images = folder_images(tmp_path, (8, 9))
    train, judge = images.split(0.25, seed=1)
    assert (len(train), len(judge)) == (12, 4)
    assert not {train.slide(i) for i in range(12)} & {judge.slide(i) for i in range(4)}
    again = images.split(0.25, seed=1)
    assert [side.numbers for side in again] == [train.numbers, judge.numbers]


def test_a_class_without_pictures_is_named(tmp_path: Path):
    make_folder(tmp_path)
    (tmp_path / "benign" / "s3").mkdir(parents=True)
    (tmp_path / "benign" / "s3" / "list.csv").write_text("")
    (tmp_path / "zebra").mkdir()
    with pytest.raises(ImageError, match="has 4 folders, and no picture in these of them: benign, zebra "):
        folder_images(tmp_path, (8, 9))


def test_bad_pictures_are_named_before_they_are_read(tmp_path: Path):
    images = folder_images(make_folder(tmp_path), (8, 9))
    images.check()
    for path in (tmp_path / "tumour" / "s1").iterdir():
        path.write_bytes(path.read_bytes()[:12])
    with pytest.raises(ImageError, match=r"s1/1\.png is .*\n.*s1/2\.png is [^\n]*$"):
        images.check()
    for number in range(5):
        (tmp_path / "normal" / f"{number}.png").write_text("no picture")
    with pytest.raises(ImageError, match=r"normal/0\.png is not (.|\n)*\nAnd 2 others\.$"):
        folder_images(tmp_path, (8, 9)).check()


def test_classes_of_a_trained_model_keep_their_numbers(tmp_path: Path):
    make_folder(tmp_path)
    images = folder_images(tmp_path, (8, 9), names=("benign", "normal", "tumour"))
    assert images.classes == 3
    assert [images.label(i) for i in range(5)] == [1, 1, 2, 2, 2]
    with pytest.raises(ImageError, match="folders of other classes than benign, tumour: normal"):
        folder_images(tmp_path, (8, 9), names=("benign", "tumour"))


# ---- sizes without pixels


@pytest.mark.parametrize("orientation", [1, 3, 6, 8, 9])  # 9 means nothing
def test_the_header_says_what_the_reader_finds(orientation: int, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(PIXELS).save(tmp_path / "turned.jpg", exif=exif)
    assert read_shape(tmp_path / "turned.jpg") == open_image(tmp_path / "turned.jpg").shape()
    assert read_shape(tmp_path / "turned.jpg") == ((80, 60) if orientation in (6, 8) else (60, 80))


@pytest.mark.parametrize("kind", ["none", "before the pixels", "behind the pixels"])
def test_the_header_of_a_png_is_read_without_its_pixels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, exif = tmp_path / "turned.png", Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(path, **({} if kind == "none" else {"exif": exif}))
    if kind == "behind the pixels":
        data = path.read_bytes()
        start = data.index(b"eXIf") - 4
        stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
        path.write_bytes(data[:start] + data[stop:-12] + data[start:stop] + data[-12:])
    shape = open_image(path).shape()
    assert shape == ((60, 80) if kind == "none" else (80, 60))
    if kind != "behind the pixels":  # where the budget of a decoder is checked before
        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("it was decoded"))
    assert read_shape(path) == shape


def test_a_level_that_is_not_there_is_named(files):
    with pytest.raises(ImageError, match=r"picture\.png has no level 1"):
        read_shape(files[0], 1)
