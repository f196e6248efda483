"""Grids cut images into tiles: held against painting every pixel by hand."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid, Span, Tile, split_axis

spans = st.builds(lambda start, length: Span(start, start + length), st.integers(-9, 9), st.integers(-4, 9))
tiles = st.builds(Tile, spans, spans)


def list_pixels(tile: Tile) -> set[tuple[int, int]]:
    return set(product(range(tile.rows.start, tile.rows.stop), range(tile.cols.start, tile.cols.stop)))


@given(one=spans, other=spans)
def test_overlap_of_spans_is_that_of_their_pixels(one: Span, other: Span):
    both = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    assert set(range((one & other).start, (one & other).stop)) == both
    assert (len(one & other), bool(one & other)) == (len(both), bool(both))


@given(one=tiles, other=tiles)
def test_overlap_of_tiles_is_that_of_their_pixels(one: Tile, other: Tile):
    both = list_pixels(one) & list_pixels(other)
    assert list_pixels(one & other) == both
    assert ((one & other).pixels, bool(one & other)) == (len(both), bool(both))


@given(outer=tiles, inner=tiles)
def test_within_finds_the_pixels_again(outer: Tile, inner: Tile):
    inner = outer & inner
    if not inner:
        return
    rows, cols = inner.to_slices(outer)
    table = [
        [(row, col) for col in range(outer.cols.start, outer.cols.stop)]
        for row in range(outer.rows.start, outer.rows.stop)
    ]
    found = [line[cols] for line in table[rows]]
    assert {pixel for line in found for pixel in line} == list_pixels(inner)
    assert (len(found), len(found[0])) == inner.shape


@given(rows=st.integers(1, 7), cols=st.integers(1, 7), extra=st.tuples(*[st.integers(0, 40)] * 2))
def test_tiles_are_a_partition_of_nearly_equal_sizes(rows: int, cols: int, extra: tuple[int, int]):
    height_px, width_px = rows + extra[0], cols + extra[1]
    cut = Grid(rows, cols).cut(height_px, width_px)
    painted = Counter(pixel for tile in cut for pixel in list_pixels(tile))
    assert painted == Counter(product(range(height_px), range(width_px)))
    assert len(cut) == Grid(rows, cols).tiles == rows * cols
    for sizes in zip(*(tile.shape for tile in cut), strict=True):
        assert max(sizes) - min(sizes) <= 1


@given(rows=st.integers(1, 5), cols=st.integers(1, 5))
def test_tiles_are_numbered_row_by_row(rows: int, cols: int):
    cut = Grid(rows, cols).cut(rows, cols)
    assert [(tile.rows.start, tile.cols.start) for tile in cut] == list(product(range(rows), range(cols)))


@given(size_px=st.integers(1, 200), parts=st.integers(1, 8), times=st.integers(1, 5))
def test_layers_of_all_sizes_are_cut_at_the_same_fractions(size_px: int, parts: int, times: int):
    """The cuts of an image with `times` as many pixels are less than one small pixel away."""
    small, large = split_axis(size_px, parts), split_axis(size_px * times, parts)
    assert all(0 <= big.start - times * one.start < times for one, big in zip(small, large, strict=True))


@pytest.mark.parametrize(("size_px", "axis"), [((3, 9), "3 rows .* into 4"), ((9, 4), "4 columns .* into 5")])
def test_a_tile_is_never_empty(size_px: tuple[int, int], axis: str):
    with pytest.raises(PlanError, match=axis):
        Grid(4, 5).cut(*size_px)


def test_a_grid_reads_as_people_write_it():
    assert str(Grid(2, 3)) == "2x3"
    assert Tile.whole(2, 3) == Tile(Span(0, 2), Span(0, 3))
