"""Small pictures of large ones, and parts of pictures as pictures: what they show, and how little they read."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from made_slides import make_tissue, write_ome, write_pages
from PIL import Image

from mpi4dl_nb import show_slicing
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import picture_reader
from mpi4dl_nb.engines.images.picture import crop_picture, open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Level, Picture
from mpi4dl_nb.engines.images.sample_data import StainCrops
from mpi4dl_nb.engines.plan import Plan

PIXELS = make_tissue(400, 600)


class Endless(Picture):
    """A slide of any size that nobody has to hold: red grows downwards, green to the right."""

    def __init__(self, *levels: Level) -> None:
        super().__init__("endless", levels, 0.25)
        self.largest_px = 0

    def _fill(self, out: np.ndarray, y0: int, x0: int, level: int) -> None:
        height_px, width_px = out.shape[:2]
        self.largest_px = max(self.largest_px, height_px * width_px)
        rows, cols = self.shape(level)
        out[..., 2] = 0
        out[..., 0] = (np.arange(y0, y0 + height_px) * 256 // rows)[:, None]
        out[..., 1] = np.arange(x0, x0 + width_px) * 256 // cols


def is_near(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.abs(one.astype(int) - other).max() <= 2


@pytest.mark.parametrize("longest", [1, 37, 100, 599, 600, 5000])
def test_a_thumbnail_is_the_mean_of_the_pixels_under_it(longest):
    made = open_image(PIXELS).thumbnail(longest)
    size = min(600, longest), max(1, round(400 * min(600, longest) / 600))
    assert is_near(made, np.array(Image.fromarray(PIXELS).resize(size, Image.Resampling.BOX)))


def test_bands_make_the_same_thumbnail(monkeypatch):
    whole = open_image(PIXELS).thumbnail(91)
    monkeypatch.setattr(picture_reader, "BAND_PX", 7000)
    assert is_near(open_image(PIXELS).thumbnail(91), whole)


@pytest.mark.parametrize("longest", [0, -3])
def test_a_thumbnail_of_no_pixels_is_refused(longest):
    with pytest.raises(ImageError, match=f"cannot have sides of {longest} px"):
        open_image(PIXELS).thumbnail(longest)


@pytest.mark.parametrize(("longest", "level"), [(600, 0), (301, 0), (300, 1), (151, 1), (150, 2), (10, 2)])
def test_the_coarsest_level_that_is_fine_enough_is_read(tmp_path, longest, level):
    write_pages(tmp_path / "a.tif", PIXELS)
    opened = open_image(tmp_path / "a.tif")
    assert max(opened.thumbnail(longest).shape) == longest
    rows, cols = opened.shape(level)
    assert rows * cols * 3 <= opened.bytes_read <= rows * cols * 3 * 1.2


def test_a_slide_of_100_000_px_is_never_read_whole():
    sides = [(100_000 // n, 80_000 // n) for n in (1, 4, 16, 64)]
    slide = Endless(*(Level(*side, 100_000 / side[0]) for side in sides))
    small = slide.thumbnail(1200)
    assert small.shape == (1200, 960, 3)
    assert slide.bytes_read < 2 * 1562 * 1250 * 3
    assert abs(int(small[600, 480, 0]) - 128) <= 1
    assert abs(int(small[600, 480, 1]) - 128) <= 1


def test_neither_is_one_that_has_no_smaller_level():
    slide = Endless(Level(100_000, 80_000))
    small = slide.thumbnail(1200)
    assert small.shape == (1200, 960, 3)
    assert slide.bytes_read < 4 << 20
    assert abs(int(small[600, 480, 0]) - 128) <= 4
    assert small[0].min() < 8
    assert small[-1, :, 0].min() > 245


def test_a_large_level_is_read_in_bands():
    slide = Endless(Level(8_000, 8_000))
    slide.thumbnail(300)
    assert slide.largest_px < 30 << 20


def test_a_figure_of_a_slide_reads_the_level_that_fits():
    sides = [(60_000 // n, 80_000 // n) for n in (1, 4, 16, 64)]
    slide = Endless(*(Level(*side, 60_000 / side[0]) for side in sides))
    figure = show_slicing(slide, Plan(split_size=1, slice_method="2x3"))
    assert "60000 × 80000 px" in figure.alt
    assert slide.bytes_read < 2 * 937 * 1250 * 3 * 16


def test_a_region_is_a_picture(tmp_path):
    levels = write_ome(tmp_path / "a.ome.tif", PIXELS)
    opened = open_image(tmp_path / "a.ome.tif")
    part = crop_picture(opened, 30, 40, 100, 120, level=1)
    assert isinstance(part, Picture)
    assert open_image(part) is part
    assert part.name == "a.ome.tif[30:130, 40:160] of level 1"
    assert part.levels == (Level(100, 120),)
    assert part.microns_per_px == 0.5
    assert np.array_equal(part.read(0, 0, 100, 120), levels[1][30:130, 40:160])
    assert np.array_equal(part.read(7, 9, 20, 30), levels[1][37:57, 49:79])
    assert part.bytes_read == (100 * 120 + 20 * 30) * 3
    sent = pickle.loads(pickle.dumps(part))
    assert np.array_equal(sent.read(7, 9, 20, 30), levels[1][37:57, 49:79])


def test_a_region_ends_where_it_ends():
    """Beyond it is white, though the picture goes on there."""
    part = crop_picture(open_image(PIXELS), 30, 40, 100, 120)
    read = part.read(-2, 0, 4, 120)
    assert (read[:2] == 255).all()
    assert np.array_equal(read[2:], PIXELS[30:32, 40:160])


def test_a_region_may_reach_beyond_the_picture():
    read = crop_picture(open_image(PIXELS), 390, -10, 20, 30).read(0, 0, 20, 30)
    assert np.array_equal(read[:10, 10:], PIXELS[390:, :20])
    assert (read[10:] == 255).all()
    assert (read[:, :10] == 255).all()


def test_a_thumbnail_of_a_region_comes_from_a_coarser_level(tmp_path):
    write_ome(tmp_path / "a.ome.tif", PIXELS)
    opened = open_image(tmp_path / "a.ome.tif")
    small = crop_picture(opened, 100, 200, 200, 300).thumbnail(70)
    assert opened.bytes_read < 60 * 80 * 3
    expected = Image.fromarray(PIXELS[100:300:4, 200:500:4]).resize((70, 47), Image.Resampling.BOX)
    assert is_near(small, np.array(expected))


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((0, 0, 0, 5), "0 x 5 px of picture has no pixels"),
        ((0, 0, 5, -1), "no pixels"),
        ((400, 0, 5, 5), "lies outside of picture, which has 400 x 600 px at level 0"),
        ((0, -5, 5, 5), "lies outside"),
        ((0, 0, 5, 5, 3), "no level 3"),
    ],
    ids=str,
)
def test_a_region_without_pixels_is_refused(box, reason):
    with pytest.raises(ImageError, match=reason):
        crop_picture(open_image(PIXELS), *box)


def test_crops_of_a_whole_slide_are_refused_before_it_is_read():
    slide = Endless(Level(100_000, 80_000))
    with pytest.raises(ImageError, match=r"endless has 100000 x 80000 pixels.*crop_picture"):
        StainCrops(slide)
    assert slide.bytes_read == 0


def test_an_array_picture_keeps_its_name():
    assert ArrayPicture("wide", PIXELS).thumbnail(30).shape == (20, 30, 3)
