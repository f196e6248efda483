"""The file of a prediction: its levels, its scale, and that there is never half of it."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from PIL import Image

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning
from mpi4dl_nb.engines.images.mask_file import MaskFile
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.inference.class_map import ClassMap, make_colours, name_classes
from mpi4dl_nb.engines.inference.pyramid_sink import PyramidSink, make_pyramid
from mpi4dl_nb.engines.inference.rank_predictor import make_padded_region

RANDOM = np.random.default_rng(1)


def write_pyramid(path: Path, pixels: np.ndarray, **settings: object) -> Path:
    sink = PyramidSink(path, pixels.shape, pixels.dtype, **settings)
    for tile in reversed(Grid(3, 2).cut(*pixels.shape[:2])):
        sink.put(tile, pixels[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop])
    assert sink.finish() == str(path)
    return path


def read_levels(path: Path) -> list[np.ndarray]:
    with tifffile.TiffFile(path) as file:
        return [level.asarray() for level in file.series[0].levels]


def count_most_frequent(pixels: np.ndarray) -> np.ndarray:
    """Half as large: of each 2 x 2 pixels the class that most of them have; of several such, the lowest."""
    even = np.pad(pixels, ((0, pixels.shape[0] % 2), (0, pixels.shape[1] % 2), (0, 0)), mode="edge")
    parts = even.reshape(even.shape[0] // 2, 2, even.shape[1] // 2, 2, -1)
    counts = np.stack([(parts == number).sum((1, 3)) for number in range(parts.max() + 1)])
    return counts.argmax(0).astype(pixels.dtype)


def test_no_level_is_shifted(tmp_path: Path):
    """A mirrored map has mirrored levels: taking the first of each 2 x 2 pixels would shift all to one side."""
    rows, cols = np.mgrid[:1024, :1536]
    disc = (np.hypot(rows - 511.5, cols - 767.5) < 300).astype(np.uint8)[..., None]
    for number, level in enumerate(read_levels(write_pyramid(tmp_path / "out.tif", disc))):
        assert np.array_equal(level, level[::-1])
        assert np.array_equal(level, level[:, ::-1])
        middles = [(np.nonzero(level)[axis].mean() + 0.5) * 2**number for axis in (0, 1)]
        assert middles == [512, 768]


def write_map(path: Path, pixels: np.ndarray, names: tuple[str, ...], picture: object = None) -> Path:
    picture = open_image(np.zeros((*pixels.shape[:2], 3), np.uint8)) if picture is None else picture
    sink = make_pyramid(
        path, make_padded_region(picture), "classes", pixels.shape[:2], names, pixels.shape, pixels.dtype
    )
    with closing(sink):
        sink.put(Tile.whole(*pixels.shape[:2]), pixels)
        assert sink.finish() == str(path)
    return path


@pytest.mark.parametrize(("name", "count"), [("out.tif", 3), ("out.png", 3), ("out.tif", 300)])
def test_any_viewer_shows_a_map_of_classes_in_colours(name: str, count: int, tmp_path: Path):
    """Its numbers stay the classes, and it is read again as a mask."""
    names = ("glass", "tumour, très", "stroma", *map(str, range(3, count)))
    pixels = RANDOM.integers(0, count, (70, 90, 1)).astype(np.uint8 if count < 257 else np.uint16)
    path = write_map(tmp_path / name, pixels, names)
    assert np.array_equal(MaskFile(path, count).read(Tile.whole(70, 90)), pixels[..., 0])
    colours = make_colours(count)[pixels[..., 0]]
    if name.endswith("png"):
        with Image.open(path) as image:
            assert np.array_equal(np.array(image.convert("RGB")), colours)
            text = image.text["Description"]
    else:
        with tifffile.TiffFile(path) as file:
            page = file.pages[0]
            assert np.array_equal(page.asarray(), pixels[..., 0])
            assert np.array_equal(np.moveaxis(page.colormap[:, page.asarray()] >> 8, 0, -1), colours)
            text = page.description
    assert ClassMap.from_text(text) == ClassMap(names, (0, 0, 70, 90), 0, (1.0, 1.0))
    if count < 257:
        assert np.array_equal(open_image(path).read(0, 0, 70, 90), colours)
        with Image.open(path) as image:  # libtiff's and libpng's reading of the palette
            assert np.array_equal(np.array(image.convert("RGB")), colours)


def test_classes_differ_in_their_colours():
    assert len({tuple(colour) for colour in make_colours(40)}) == 40
    assert np.array_equal(make_colours(40)[:5], make_colours(5))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"classes": 3}', "<OME>", '{"classes": [], "region": [1], "level": "x"}']
)
def test_a_text_of_others_describes_no_map(text: str):
    assert ClassMap.from_text(text) == ClassMap()


@pytest.mark.parametrize("names", [["a"], ["a"] * 4, "abc", [1, 2, 3]], ids=str)
def test_names_that_do_not_fit_are_refused(names: object):
    with pytest.raises(PlanError, match="class_names"):
        name_classes("classes", OutputMeaning.CLASSES, 3, names)


def test_a_png_takes_a_map_of_few_classes(tmp_path: Path):
    with pytest.raises(OSError, match="a PNG takes a map of at most 256 classes"):
        write_map(tmp_path / "out.png", np.zeros((4, 4, 3), np.uint8), ())


def test_classes_at_every_level(tmp_path: Path):
    pixels = RANDOM.integers(0, 5, (1027, 2049, 1), np.uint8)
    found = read_levels(write_pyramid(tmp_path / "out.tif", pixels))
    assert [level.shape for level in found] == [(1027, 2049), (514, 1025), (257, 513), (129, 257)]
    for level in found:
        assert np.array_equal(level, pixels[..., 0])
        pixels = count_most_frequent(pixels)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_probabilities_are_averaged(dtype: type, tmp_path: Path):
    pixels = RANDOM.integers(0, 255, (601, 700, 3)).astype(dtype)
    fine, coarse = read_levels(write_pyramid(tmp_path / "out.tif", pixels, mixes=True))
    assert np.array_equal(fine, pixels)
    means = pixels[:600].astype(np.float32).reshape(300, 2, 350, 2, 3).mean((1, 3))
    assert np.array_equal(coarse[:300], np.rint(means) if dtype is np.uint8 else means)
    assert coarse.shape == (301, 350, 3)


def test_our_own_reader_knows_its_levels_and_scale(tmp_path: Path):
    pixels = RANDOM.integers(0, 5, (700, 900, 1), np.uint8)
    picture = open_image(write_pyramid(tmp_path / "out.tif", pixels, microns_per_px=0.25))
    assert [level.shape for level in picture.levels] == [(700, 900), (350, 450)]
    assert picture.microns_per_px == pytest.approx(0.25)
    assert np.array_equal(picture.read(0, 0, 700, 900)[..., 0], pixels[..., 0])


def test_the_scale_of_a_coarse_prediction_is_the_models_stride(tmp_path: Path):
    fine = open_image(write_pyramid(tmp_path / "fine.tif", np.zeros((1000, 1000, 1), np.uint8), microns_per_px=0.25))
    region = make_padded_region(fine).pad_to_multiple(32)
    with closing(
        make_pyramid(tmp_path / "out.tif", region, "classes", (32, 32), (), (32, 32, 1), np.dtype(np.uint8))
    ) as to:
        to.put(Tile.whole(32, 32), np.zeros((32, 32, 1), np.uint8))
        to.finish()
    assert open_image(tmp_path / "out.tif").microns_per_px == pytest.approx(32 * 0.25)


def test_no_half_file(tmp_path: Path, monkeypatch):
    """Where writing fails, what was there before still is, and nothing else."""
    pixels = np.ones((300, 300, 1), np.uint8)
    path = write_pyramid(tmp_path / "out.tif", pixels)
    before = path.read_bytes()

    def raise_no_space(*given: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tifffile.TiffWriter, "write", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        write_pyramid(path, pixels * 2)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere/out.tif", "nowhere is no folder. Make it"), ("out.png", "out.png ends in '.png'")]
)
def test_a_path_that_cannot_be_written_is_named(name: str, message: str, tmp_path: Path):
    with pytest.raises(OSError, match=message):
        PyramidSink(tmp_path / name, (100, 100, 1), np.dtype(np.uint8))


def test_room_for_the_levels_is_looked_for_at_the_start(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=12_000))
    with pytest.raises(OSError, match=r"has 11\.7 KB left beside the pixels of 100 x 100 px.* may take 12\.2 KB more"):
        PyramidSink(tmp_path / "out.tif", (100, 100, 1), np.dtype(np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_what_is_given_up(tmp_path: Path):
    sink = PyramidSink(tmp_path / "out.tif", (100, 100, 1), np.dtype(np.uint8))
    sink.put(Grid(2, 1).cut(100, 100)[0], np.ones((50, 100, 1), np.uint8))
    sink.close()
    assert list(tmp_path.iterdir()) == []
