"""Pictures brought to another size part by part."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mpi4dl_nb.engines.geometry.tiles import Grid, Span, Tile
from mpi4dl_nb.engines.images.examples import find_nearest_pixels, resize_tile

SIDES = st.integers(1, 70)
SIZES = st.tuples(SIDES, SIDES)


class Spied:
    """A picture that writes down the tiles that are read of it."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        self.read: list[Tile] = []

    def __call__(self, tile: Tile) -> np.ndarray:
        self.read.append(tile)
        return self.pixels[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]


@settings(max_examples=150)
@given(SIZES, SIZES, st.data())
def test_parts_are_those_of_the_whole_to_the_bit(source: tuple[int, int], target: tuple[int, int], data):
    picture, whole = Spied(source), Tile.whole(*target)
    expected = resize_tile(picture, source, target, whole)
    assert expected.shape == (*target, 3)
    grid = Grid(*(data.draw(st.integers(1, min(4, side))) for side in target))
    for tile in grid.cut(*target):
        assert np.array_equal(resize_tile(picture, source, target, tile), expected[tile.to_slices(whole)])


@settings(max_examples=150)
@given(SIZES, SIZES)
def test_the_rule_is_pillows_columns_before_rows(source: tuple[int, int], target: tuple[int, int]):
    picture = Spied(source)
    columns = Image.fromarray(picture.pixels).resize((target[1], source[0]), Image.Resampling.BILINEAR)
    both = np.asarray(columns.resize((target[1], target[0]), Image.Resampling.BILINEAR))
    assert np.array_equal(resize_tile(picture, source, target, Tile.whole(*target)), both)


@pytest.mark.parametrize("target", [(50, 60), (400, 480), (100, 120)], ids=["smaller", "larger", "the same"])
def test_a_quarter_needs_little_more_than_a_quarter_of_the_source(target: tuple[int, int]):
    picture = Spied((100, 120))
    resize_tile(picture, (100, 120), target, Grid(2, 2).cut(*target)[3])
    (read,) = picture.read
    assert read.rows.start >= 48
    assert read.cols.start >= 58
    assert (read.rows.stop, read.cols.stop) == (100, 120)


def test_a_scaled_picture_has_the_mean_of_what_it_was_made_from():
    picture = Spied((64, 64))
    small = resize_tile(picture, (64, 64), (8, 8), Tile.whole(8, 8))
    assert abs(small.mean() - picture.pixels.mean()) < 2
    assert small.std() < picture.pixels.std() / 4


@given(SIDES, SIDES, st.data())
def test_the_middle_of_each_pixel_lies_in_its_nearest(source: int, target: int, data):
    stop = data.draw(st.integers(1, target))
    start = data.draw(st.integers(0, stop - 1))
    for px, nearest in zip(range(start, stop), find_nearest_pixels(source, target, Span(start, stop)), strict=True):
        assert nearest <= (px + Fraction(1, 2)) * source / target < nearest + 1
