"""Windows: the input pixels that given output pixels read, computed backwards from the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.spatial.tiles import Span, Tile

__all__ = [
    "Shift",
    "SlidingWindow",
    "SpanRule",
    "TableWindow",
    "TransposedWindow",
    "Window",
    "compute_halo_widths",
    "compute_interior",
    "compute_window",
]

SpanRule = Callable[[Span], Span]
"""Maps output pixels along one axis to the input pixels that they read, including those outside the image."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Window of a convolution or pool: output i reads `kernel` pixels, `dilation` apart, from i * stride - padding."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, out: Span) -> Span:
        """Return the input pixels that the outputs `out` read.

        >>> SlidingWindow(kernel=3, padding=1)(Span(4, 8))
        Span(start=3, stop=9)
        """
        # Kernel 3, stride 2, padding 1; outputs 2 and 3 read the inputs 2 * 2 - 1 = 3 to 3 * 2 - 1 + 2 = 7:
        #
        #     input      -1  0  1  2  3  4  5  6  7
        #     output 0    x  x  x
        #     output 1          x  x  x
        #     output 2                x  x  x
        #     output 3                      x  x  x
        first = out.start * self.stride - self.padding
        last = (out.stop - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        return Span(first, last + 1)


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Window of a transposed convolution: input i writes i * stride - padding + dilation * (0 ... kernel - 1)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, out: Span) -> Span:
        """Return the input pixels that write to the outputs `out`.

        >>> TransposedWindow(kernel=2, stride=2)(Span(2, 6))
        Span(start=1, stop=3)
        """
        # Kernel 3, stride 2, padding 1: the inputs' writes overlap, here at outputs 1 and 3.
        #
        #     input 0    x  x  x
        #     input 1          x  x  x
        #     input 2                x  x  x
        #     output    -1  0  1  2  3  4  5
        reach = self.dilation * (self.kernel - 1)
        # Rounded up: the first input whose last write reaches out.start.
        first = -((reach - out.start - self.padding) // self.stride)
        last = (out.stop - 1 + self.padding) // self.stride
        return Span(min(first, last), last + 1)  # never empty: a kernel needs a pixel; surplus outputs are cropped


@dataclass(frozen=True, slots=True)
class Shift:
    """Window of slicing and padding: output i reads input i + `by`."""

    by: int

    def __call__(self, out: Span) -> Span:
        return Span(out.start + self.by, out.stop + self.by)


@dataclass(frozen=True, slots=True)
class TableWindow:
    """Any window at all: output i reads the inputs `table[i]`, in any order."""

    table: tuple[tuple[int, ...], ...]

    def __call__(self, out: Span) -> Span:
        """Return the shortest span of the inputs that the outputs `out` read.

        >>> TableWindow(((1,), (0,), (1, 2)))(Span(0, 2))
        Span(start=0, stop=2)
        """
        reads = [index for row in self.table[out.start : out.stop] for index in row]
        return Span(min(reads), max(reads) + 1)


@dataclass(frozen=True, slots=True)
class Window:
    """A local tensor `name` with the pixels `held`; the kernel reads `wanted`, with `fill` for the pixels not held."""

    name: str
    held: Tile
    wanted: Tile
    fill: float

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Pixels to add (or, if negative, to crop) left, right, above and below, in the order of `F.pad`."""
        held, wanted = self.held, self.wanted
        return (
            held.cols.start - wanted.cols.start,
            wanted.cols.stop - held.cols.stop,
            held.rows.start - wanted.rows.start,
            wanted.rows.stop - held.rows.stop,
        )


def compute_window(out: Tile, rows: SpanRule, cols: SpanRule) -> Tile:
    """Return the input rectangle that the outputs in `out` read; it may extend beyond the image."""
    return Tile(rows(out.rows), cols(out.cols))


def compute_interior(out: Span, rule: SpanRule, held: Span, image_px: int) -> Span:
    """Return the outputs in `out` that read only `held` pixels of the image; an empty span if there are none.

    Outside the image they read equally many pixels on both sides, or none: a kernel's own padding can replace the fill.

    >>> compute_interior(Span(4, 8), SlidingWindow(kernel=3, padding=1), held=Span(4, 8), image_px=8)
    Span(start=5, stop=7)
    """
    image = Span(0, image_px)
    # First allow reads beyond the image's edges. A kernel pads both sides alike, so unequal reads forbid them all.
    loose = _trim_ends(out, lambda span: _is_inside(rule(span) & image, held))
    if not loose or max(0, -rule(loose).start) == max(0, rule(loose).stop - image_px):
        return loose
    return _trim_ends(out, lambda span: _is_inside(rule(span), held & image))


def _is_inside(span: Span, other: Span) -> bool:
    return not span or span & other == span


def _trim_ends(out: Span, fits: Callable[[Span], bool]) -> Span:
    """Return `out` without the outputs at its ends that do not fit; empty if the rest does not fit either."""
    # From both ends, since a monotonic rule makes the fitting outputs one run; the rule itself may be any function.
    start, stop = out.start, out.stop
    while start < stop and not fits(Span(start, start + 1)):
        start += 1
    while start < stop and not fits(Span(stop - 1, stop)):
        stop -= 1
    return Span(start, stop) if start < stop and fits(Span(start, stop)) else Span(start, start)


def compute_halo_widths(own: Span, reads: Span, image_px: int) -> tuple[int, int]:
    """Return the halo widths (before, after) of a tile along one axis, in pixels.

    `own` is the span that the tile holds and `reads` the span that its outputs need, both in image coordinates. Pixels
    beyond the image's edge are filled, not exchanged.

    >>> compute_halo_widths(own=Span(4, 8), reads=Span(3, 9), image_px=8)
    (1, 0)
    """
    inside = reads & Span(0, image_px)
    return max(0, own.start - inside.start), max(0, inside.stop - own.stop)
