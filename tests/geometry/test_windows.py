"""Windows, from the outputs backwards: held against which pixels each output reads, pixel by pixel."""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st

from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.geometry.windows import (
    Shift,
    SlidingWindow,
    TableWindow,
    TransposedWindow,
    compute_halo_widths,
    compute_interior,
    compute_window,
)

settings = {
    "kernel": st.integers(1, 6),
    "stride": st.integers(1, 5),
    "padding": st.integers(0, 6),
    "dilation": st.integers(1, 4),
}
outputs = st.builds(lambda start, length: Span(start, start + length), st.integers(0, 12), st.integers(1, 9))


def list_indices(span: Span) -> list[int]:
    return list(range(span.start, span.stop))


def find_hull(pixels: set[int]) -> Span:
    return Span(min(pixels), max(pixels) + 1)


def read_by(output: int, rule: SlidingWindow) -> set[int]:
    """The definition of a convolution: output o reads o * stride - padding + dilation * k."""
    return {output * rule.stride - rule.padding + rule.dilation * k for k in range(rule.kernel)}


def find_written_pixels(pixel: int, rule: TransposedWindow) -> set[int]:
    """The definition of a transposed convolution: input i writes i * stride - padding + dilation * k."""
    return {pixel * rule.stride - rule.padding + rule.dilation * k for k in range(rule.kernel)}


@given(rule=st.builds(SlidingWindow, **settings), out=outputs)
def test_a_sliding_window_is_what_its_outputs_read(rule: SlidingWindow, out: Span):
    """No pixel too few and none too many: its ends are read, and all between them where none is skipped."""
    read = set().union(*(read_by(output, rule) for output in list_indices(out)))
    assert rule(out) == find_hull(read)
    if rule.dilation == 1 and rule.stride <= rule.kernel:
        assert set(list_indices(rule(out))) == read


@given(rule=st.builds(TransposedWindow, **settings), out=outputs)
@example(rule=TransposedWindow(kernel=1, stride=5), out=Span(2, 4))
def test_a_transposed_window_is_what_writes_to_its_outputs(rule: TransposedWindow, out: Span):
    """Where no pixel writes to the outputs it is one pixel all the same, for a kernel needs one."""
    near = {pixel: find_written_pixels(pixel, rule) for pixel in range(-60, 60)}
    writers = {pixel for pixel, written in near.items() if written & set(list_indices(out))}
    around = {pixel for pixel, written in near.items() if min(written) < out.stop and max(written) >= out.start}
    found = rule(out)
    assert writers <= set(list_indices(found))
    assert found == find_hull(around) if around else len(found) == 1
    if rule.dilation == 1:
        assert around == writers


@given(rule=st.builds(SlidingWindow, **settings), out=outputs, image_px=st.integers(1, 40), held=outputs)
@example(rule=SlidingWindow(1), out=Span(0, 3), image_px=2, held=Span(0, 1))
@example(rule=SlidingWindow(3, padding=1), out=Span(0, 8), image_px=8, held=Span(0, 8))
@example(rule=SlidingWindow(3, padding=1), out=Span(0, 4), image_px=8, held=Span(0, 4))
def test_an_interior_reads_only_what_is_held(rule: SlidingWindow, out: Span, image_px: int, held: Span):
    """No output is left out that reads held pixels alone, and none outside the image if others are for that.

    Where some read padding only (on one side of such outputs nothing is held), there may be none: the tile stays whole.
    """
    held, image = held & Span(0, image_px), Span(0, image_px)
    inside = {o for o in list_indices(out) if not (s := rule(Span(o, o + 1)) & image) or s & held == s}
    strictly = {o for o in inside if (s := rule(Span(o, o + 1))) & held == s}
    found = compute_interior(out, rule, held, image_px)
    reads = rule(found) if found else image
    assert set(list_indices(found)) <= inside
    if max(0, -reads.start) != max(0, reads.stop - image_px):
        raise AssertionError("what lies outside is not the same on both sides")
    if all(rule(Span(o, o + 1)) & image for o in list_indices(out)):
        assert strictly <= set(list_indices(found))


@given(by=st.integers(-9, 9), out=outputs)
def test_a_shift_reads_one_pixel_for_each_output(by: int, out: Span):
    assert list_indices(Shift(by)(out)) == [output + by for output in list_indices(out)]


@given(size_px=st.integers(1, 30), count=st.integers(1, 30), data=st.data())
def test_reach_is_what_adaptive_cells_read(size_px: int, count: int, data: st.DataObject):
    start = data.draw(st.integers(0, count - 1))
    out = Span(start, data.draw(st.integers(start + 1, count)))
    cells = [range(i * size_px // count, -(-(i + 1) * size_px // count)) for i in range(count)]
    found = TableWindow(tuple((cell[0], cell[-1]) for cell in cells))(out)
    assert set(list_indices(found)) == {pixel for i in list_indices(out) for pixel in cells[i]}


@given(
    rows=st.builds(SlidingWindow, **settings),
    cols=st.builds(TransposedWindow, **settings),
    a=outputs,
    b=outputs,
)
def test_a_window_has_a_rule_for_each_axis(rows: SlidingWindow, cols: TransposedWindow, a: Span, b: Span):
    assert compute_window(Tile(a, b), (rows, cols)) == Tile(rows(a), cols(b))


@given(
    image_px=st.integers(1, 20),
    own=outputs,
    reads=st.builds(lambda start, length: Span(start, start + length), st.integers(-6, 20), st.integers(1, 20)),
)
def test_halo_widths_count_the_borrowed_pixels(image_px: int, own: Span, reads: Span):
    """Where the window touches the tile. (One that does not is no halo, but a whole tile from elsewhere.)"""
    assume(own.stop <= image_px and own & reads)
    borrowed = set(list_indices(reads)) & set(range(image_px)) - set(list_indices(own))
    before = {pixel for pixel in borrowed if pixel < own.start}
    assert compute_halo_widths(own, reads, image_px) == (len(before), len(borrowed - before))
