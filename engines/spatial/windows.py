"""Windows: which input pixels some output pixels read, computed from the outputs backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.spatial.tiles import Span, Tile

__all__ = [
    "AssignmentWindow",
    "MonotoneWindow",
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
"""Output pixels along one axis -> the input pixels that they read, the image's outside included."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Convolution and pooling: output i reads `kernel` pixels, `dilation` apart, from i * stride - padding."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, out: Span) -> Span:
        """
        >>> SlidingWindow(kernel=3, padding=1)(Span(4, 8))
        Span(start=3, stop=9)
        """
        first = out.start * self.stride - self.padding
        last = (out.stop - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1)
        return Span(first, last + 1)


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Transposed convolution: input i writes outputs i * stride - padding + dilation * (0 ... kernel - 1)."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __call__(self, out: Span) -> Span:
        """
        >>> TransposedWindow(kernel=2, stride=2)(Span(2, 6))
        Span(start=1, stop=3)
        """
        reach = self.dilation * (self.kernel - 1)
        first = -((reach - out.start - self.padding) // self.stride)
        last = (out.stop - 1 + self.padding) // self.stride
        return Span(min(first, last), last + 1)  # never empty: a kernel needs a pixel, and its writes are cut


@dataclass(frozen=True, slots=True)
class Shift:
    """Slicing and padding: output i reads input i + `by`."""

    by: int

    def __call__(self, out: Span) -> Span:
        return Span(out.start + self.by, out.stop + self.by)


@dataclass(frozen=True, slots=True)
class AssignmentWindow:
    """Assignment of `count` inputs to outputs `step` apart from `start` on: output start + i * step reads input i."""

    start: int
    step: int
    count: int

    def __call__(self, out: Span) -> Span:
        """Never empty: outputs to which nothing is assigned read the input that is nearest.

        >>> (
        ...     AssignmentWindow(start=2, step=1, count=3)(Span(0, 4)),
        ...     AssignmentWindow(start=2, step=1, count=3)(Span(7, 9)),
        ... )
        (Span(start=0, stop=2), Span(start=2, stop=3))
        """
        first = min(max(-((self.start - out.start) // self.step), 0), self.count - 1)
        last = min(max((out.stop - 1 - self.start) // self.step, first), self.count - 1)
        return Span(first, last + 1)


@dataclass(frozen=True, slots=True)
class MonotoneWindow:
    """Anything monotonic: output i reads inputs `first(i)` to `last(i)`, both included."""

    first: Callable[[int], int]
    last: Callable[[int], int]

    def __call__(self, out: Span) -> Span:
        return Span(self.first(out.start), self.last(out.stop - 1) + 1)


@dataclass(frozen=True, slots=True)
class TableWindow:
    """Anything at all: output i reads the inputs `table[i]`, in any order."""

    table: tuple[tuple[int, ...], ...]

    def __call__(self, out: Span) -> Span:
        """
        >>> TableWindow(((1,), (0,), (1, 2)))(Span(0, 2))
        Span(start=0, stop=2)
        """
        reads = [index for row in self.table[out.start : out.stop] for index in row]
        return Span(min(reads), max(reads) + 1)


@dataclass(frozen=True, slots=True)
class Window:
    """The local tensor `name` holds the pixels `held`; the kernel is to read `wanted`, filled outside them."""

    name: str
    held: Tile
    wanted: Tile
    fill: float

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Pixels to add (or, negative, to drop) left, right, above and below, in the order of `F.pad`."""
        held, wanted = self.held, self.wanted
        return (
            held.cols.start - wanted.cols.start,
            wanted.cols.stop - held.cols.stop,
            held.rows.start - wanted.rows.start,
            wanted.rows.stop - held.rows.stop,
        )


def compute_window(out: Tile, rows: SpanRule, cols: SpanRule) -> Tile:
    """The input rectangle that the outputs in `out` read; it may reach outside the image."""
    return Tile(rows(out.rows), cols(out.cols))


def compute_interior(out: Span, rule: SpanRule, held: Span, image_px: int) -> Span:
    """The outputs among `out` that read nothing of the image but what is `held`; empty where there are none.

    What they read outside the image is the same on both sides, or nothing: a kernel's own padding can stand for it.

    >>> compute_interior(Span(4, 8), SlidingWindow(kernel=3, padding=1), held=Span(4, 8), image_px=8)
    Span(start=5, stop=7)
    """
    image = Span(0, image_px)
    loose = _trim_ends(out, lambda span: _is_inside(rule(span) & image, held))
    if not loose or max(0, -rule(loose).start) == max(0, rule(loose).stop - image_px):
        return loose
    return _trim_ends(out, lambda span: _is_inside(rule(span), held & image))


def _is_inside(span: Span, other: Span) -> bool:
    return not span or span & other == span


def _trim_ends(out: Span, fits: Callable[[Span], bool]) -> Span:
    """`out` without the outputs at its ends that do not fit; empty where others do not either."""
    start, stop = out.start, out.stop
    while start < stop and not fits(Span(start, start + 1)):
        start += 1
    while start < stop and not fits(Span(stop - 1, stop)):
        stop -= 1
    return Span(start, stop) if start < stop and fits(Span(start, stop)) else Span(start, start)


def compute_halo_widths(own: Span, reads: Span, image_px: int) -> tuple[int, int]:
    """Pixels that a tile must borrow (before, after) itself along one axis.

    `own` is what the tile holds and `reads` what its outputs need, both in image coordinates.
    What lies beyond the image's edge is filled, not borrowed.

    >>> compute_halo_widths(own=Span(4, 8), reads=Span(3, 9), image_px=8)
    (1, 0)
    """
    inside = reads & Span(0, image_px)
    return max(0, own.start - inside.start), max(0, inside.stop - own.stop)
