"""Spans, tiles and grids: the part of a value that each rank holds, in positions of the whole value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpi4dl_nb.engines.errors import PlanError

Axes = tuple[int, ...]
"""Axes of a tensor, counted from the end."""

AXIS_NAMES = ("planes", "rows", "columns")
"""The axes of a volume; those of an image are the last two of them, and that of a signal is the last."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `start` to `stop` (half-open) along an axis. An empty span is false; `&` intersects, `|` spans both."""

    start: int
    stop: int

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __contains__(self, px: int) -> bool:
        return self.start <= px < self.stop

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def __or__(self, other: Span) -> Span:
        """Return the shortest span that contains both; an empty span is ignored.

        >>> Span(2, 4) | Span(6, 7)
        Span(start=2, stop=7)
        """
        if not (self and other):
            return self if self else other
        return Span(min(self.start, other.start), max(self.stop, other.stop))


class Tile(tuple[Span, ...]):
    """A box of a value: one span for each axis along which the value is sharded. It is whole along all other axes.

    Which axes these are is known from the value's layout: rows and columns for the tiles of an image, the batch for
    ranks that share images, and none for a value that every rank holds. An empty tile is false; `&` intersects, `|`
    spans both.

    >>> Tile(Span(0, 4), Span(2, 6)) & Tile(Span(3, 9), Span(0, 3))
    Tile(Span(start=3, stop=4), Span(start=2, stop=3))
    """

    __slots__ = ()

    def __new__(cls, *spans: Span) -> Tile:
        return super().__new__(cls, spans)

    def __getnewargs__(self) -> tuple[Span, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"Tile({', '.join(map(repr, self))})"

    @classmethod
    def whole(cls, *sizes: int) -> Tile:
        """Return the tile of the whole value, of these sizes along its sharded axes."""
        return cls(*(Span(0, size) for size in sizes))

    def __bool__(self) -> bool:
        return all(self)

    def __and__(self, other: Tile) -> Tile:
        return Tile(*(a & b for a, b in zip(self, other, strict=True)))

    def __or__(self, other: Tile) -> Tile:
        """Return the smallest tile that contains both."""
        if not (self and other):
            return self if self else other
        return Tile(*(a | b for a, b in zip(self, other, strict=True)))

    @property
    def rows(self) -> Span:
        """The rows of a tile of an image. Raises PlanError for a tile of a volume or a signal."""
        self._check_image()
        return self[0]

    @property
    def cols(self) -> Span:
        """The columns of a tile of an image. Raises PlanError for a tile of a volume or a signal."""
        self._check_image()
        return self[1]

    def _check_image(self) -> None:
        if len(self) != 2:
            raise PlanError(
                f"This is read, drawn or written by rows and columns, but the tiles have {len(self)} axes. Volumes and "
                "signals are tensors: they can be trained, compared with one process, forecast, predicted, saved and "
                "shown (show_slicing, Slicer, Configurator), but not read from files or predicted into them."
            )

    @property
    def sides(self) -> tuple[int, ...]:
        """The first position along each axis, and then the last one + 1 along each, as pages are sent them."""
        return *(span.start for span in self), *(span.stop for span in self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length along each sharded axis."""
        return tuple(map(len, self))

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of a tile of an image."""
        return len(self.rows), len(self.cols)

    @property
    def pixels(self) -> int:
        """Number of positions along the sharded axes: of pixels, for the tile of an image."""
        return math.prod(self.shape)

    def is_inside(self, other: Tile) -> bool:
        """Return whether `other` contains this tile."""
        return not self or self & other == self

    def to_slices(self, other: Tile) -> tuple[slice, ...]:
        """Return this tile as slices, along the sharded axes, of an array that holds exactly what is in `other`.

        >>> Tile(Span(4, 6)).to_slices(Tile(Span(3, 9)))
        (slice(1, 3, None),)
        """
        return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(self, other, strict=True))

    def describe(self, names: Sequence[str] = ()) -> str:
        """Return a text such as `rows 0 to 7, columns 2 to 5`; `names` are those of the axes, by default `AXIS_NAMES`.

        >>> Tile.whole(8, 4).describe(), Tile.whole(4).describe()
        ('rows 0 to 7, columns 0 to 3', 'columns 0 to 3')
        """
        named = zip(names or AXIS_NAMES[-len(self) :], self, strict=True)
        return ", ".join(f"{name} {span.start} to {span.stop - 1}" for name, span in named)

    def replace_span(self, number: int, span: Span) -> Tile:
        """Return the tile with another span along its sharded axis `number`."""
        return Tile(*(span if index == number else other for index, other in enumerate(self)))


def guess_pixel_axes(shape: tuple[int, ...], count: int = 2) -> Axes:
    """Return the `count` axes of pixels, by the shape alone, of a value that every rank holds whole."""
    return tuple(range(-count, 0)) if len(shape) == 2 + count else ()


class Depth(NamedTuple):
    """The only position along `axis` of what is drawn of a volume; a rank's tensor begins at position `start` there."""

    axis: int
    at: int
    start: int


class Plane(NamedTuple):
    """What is drawn of a tile: `tile`, its rows and columns, in each of the `images` (None: in all).

    Rows and columns lie along `axes`. A value without pixels has no such axes: then each row is an image, and its
    columns are the numbers of that image. Of a volume, `cut` chooses one of its `planes`, at `depth`.

    >>> plane = Plane.of((4, 10), (-2,), Tile(Span(2, 4)))  # images 2 and 3 of a linear layer's output
    >>> plane.images, plane.axes, plane.tile
    (Span(start=2, stop=4), (), Tile(Span(start=2, stop=4), Span(start=0, stop=10)))
    """

    images: Span | None
    axes: Axes
    tile: Tile
    planes: int = 1
    depth: Depth | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: Axes, tile: Tile) -> Plane:
        """Return the plane of a tile along `axes` of a value of this shape."""
        spans = dict(zip(axes, tile, strict=True))
        # Two axes are always rows and columns. One alone, or one before them, is that of the images.
        images = spans.pop(-len(shape), None) if len(spans) != 2 else None
        pixels = tuple(spans) or guess_pixel_axes(shape)
        if pixels:
            planes = shape[pixels[0]] if len(pixels) > 2 else 1
            return cls(images, pixels, Tile(*(spans.get(axis, Span(0, shape[axis])) for axis in pixels)), planes)
        rows, cols = math.prod(shape[:1]), math.prod(shape[1:])
        return cls(images, (), Tile(images or Span(0, rows), Span(0, cols)))

    def __str__(self) -> str:
        """
        >>> str(Plane(Span(2, 4), (-2, -1), Tile.whole(8, 8)))
        'rows 0 to 7, columns 0 to 7 of images 2 to 3'
        """
        images = f" of images {self.images.start} to {self.images.stop - 1}" if self.axes and self.images else ""
        return self.tile.describe(() if self.axes else ("images", "numbers")) + images

    def cut(self, share: float) -> Plane:
        """Return what is drawn at a share of the depth of a volume, or at the plane of the tile that is nearest to it.

        Anything else is drawn as it is.

        >>> Plane.of((1, 2, 8, 4, 6), (-3, -2, -1), Tile.whole(4, 4, 6)).cut(0.7).depth
        Depth(axis=-3, at=3, start=0)
        """
        if len(self.axes) != 3:
            return self
        planes, *others = self.tile
        at = min(max(int(share * self.planes), planes.start), planes.stop - 1)
        depth = Depth(self.axes[0], at, planes.start)
        return Plane(self.images, self.axes[1:], Tile(*others), self.planes, depth)


class Grid(tuple[int, ...]):
    """The number of parts along each sharded axis. Tiles are numbered in row-major order.

    The sizes of the tiles differ by at most one position along each axis.

    >>> [len(tile.cols) for tile in Grid(1, 3).cut(4, 10)]
    [3, 3, 4]
    """

    __slots__ = ()

    def __new__(cls, *parts: int) -> Grid:
        return super().__new__(cls, parts)

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)

    @property
    def rows(self) -> int:
        """Number of rows of tiles; those of the planes of a volume follow one another."""
        return self.tiles // self[-1]

    @property
    def cols(self) -> int:
        """Number of columns of tiles."""
        return self[-1]

    @property
    def planes(self) -> int:
        """Number of planes of tiles: of an image or a signal, 1."""
        return math.prod(self[:-2])

    @property
    def tiles(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def __repr__(self) -> str:
        return f"Grid({', '.join(map(str, self))})"

    @lru_cache(maxsize=4096)  # noqa: B019  (grids are small values, and layers of one size ask again and again)
    def cut(self, *sizes: int) -> tuple[Tile, ...]:
        """Return the tiles of a value, in order.

        Raises PlanError if a tile would be empty.

        >>> Grid(1, 2).cut(4, 5)[1].cols
        Span(start=2, stop=5)
        """
        self.check(sizes)
        return tuple(Tile(*spans) for spans in itertools.product(*map(split_axis, sizes, self)))

    def get_tile(self, number: int, *sizes: int) -> Tile:
        """Return one of the tiles without computing the others.

        >>> Grid(1, 2).get_tile(1, 4, 5) == Grid(1, 2).cut(4, 5)[1]
        True
        """
        self.check(sizes)
        spans = []
        for size, parts in zip(reversed(sizes), reversed(self), strict=True):
            number, at = divmod(number, parts)
            spans.append(Span(size * at // parts, size * (at + 1) // parts))
        return Tile(*reversed(spans))

    def check(self, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        """Raise PlanError if a tile of a value would be empty, of which each position is a window of so many pixels.

        `lengths` are those of the windows along each axis, by default 1.
        """
        if len(sizes) != len(self):
            raise PlanError(
                f"{self} tiles are cut along {len(self)} axes, but the image has {len(sizes)}, of sizes "
                f"{' x '.join(map(str, sizes))}. Use a slice_method with {len(sizes)} numbers."
            )
        names = ("planes", "rows", "columns")[-len(self) :] if 1 < len(self) <= 3 else ("positions",) * len(self)
        for name, size, parts, length in zip(names, sizes, self, lengths or (1,) * len(self), strict=True):
            if size < parts:
                things = (
                    (name if len(self) == 1 else f"{name} of pixels") if length == 1 else f"windows of {length} {name}"
                )
                raise PlanError(
                    f"{size} {things} cannot be cut into {parts} tiles. "
                    f"Use a slice_method with at most {size} along that axis, or a smaller spatial_size."
                )


def find_compact_grid(sizes: Sequence[int], tiles: int) -> Grid:
    """Return the grid of so many tiles whose cuts are smallest in all, and with it the halos of layers.

    No axis is cut into more parts than it has positions, if there is such a grid.

    >>> find_compact_grid((64, 64, 16), 4), find_compact_grid((100,), 3)
    (Grid(2, 2, 1), Grid(3))
    """
    whole = math.prod(sizes)

    def rate(grid: Grid) -> tuple[bool, int]:
        pairs = list(zip(grid, sizes, strict=True))
        return any(parts > size for parts, size in pairs), sum((parts - 1) * whole // size for parts, size in pairs)

    return min(_factor(tiles, len(sizes)), key=rate)


def _factor(tiles: int, axes: int) -> list[Grid]:
    """Return all grids of so many tiles along so many axes."""
    if axes == 1:
        return [Grid(tiles)]
    # Divisors come in pairs, so that those up to the root are enough: of billions of tiles, too.
    low = [parts for parts in range(1, math.isqrt(tiles) + 1) if tiles % parts == 0]
    divisors = sorted({*low, *(tiles // parts for parts in low)})
    return [Grid(parts, *rest) for parts in divisors for rest in _factor(tiles // parts, axes - 1)]


def split_axis(size: int, parts: int) -> list[Span]:
    """Cut an axis at the same fractions for every size, so that the tiles of all layers line up."""
    # 10 pixels over 4 tiles: cuts at 0, 2, 5, 7, 10. The 5 pixels after a stride of 2: 0, 1, 2, 3, 5. Each cut is
    # within a pixel of half the other, so that halos stay narrow.
    cuts = [size * part // parts for part in range(parts + 1)]
    return [Span(start, stop) for start, stop in itertools.pairwise(cuts)]


# Moves: boxes that one rank sends to another. Halos, gathers, scatters and repartitions all consist of moves.


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of `tile` from rank `source` to rank `target`."""

    source: int
    target: int
    tile: Tile


def compute_moves(owned: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> tuple[Move, ...]:
    """Return every transfer that fills each rank's `wanted` tile from the `owned` tiles, its own pixels included.

    The owned tiles do not overlap, so each wanted position inside the value arrives exactly once.

    >>> from mpi4dl_nb.engines.geometry.tiles import Span
    >>> left, right = (Tile(Span(0, 4), cols) for cols in (Span(0, 4), Span(4, 8)))
    >>> [m.source for m in compute_moves({0: left, 1: right}, {0: Tile(Span(0, 4), Span(0, 5))})]
    [0, 1]
    """
    # Four ranks own a quarter each. Rank 0 wants its own and a halo of one pixel, marked by the numbers of the owners:
    #
    #     0 0 0 | 1 . .
    #     0 0 0 | 1 . .
    #     0 0 0 | 1 . .        0 -> 0 its own pixels, 1 -> 0 a column, 2 -> 0 a row, 3 -> 0 the corner
    #     ------+------
    #     2 2 2 | 3 . .
    #     . . . | . . .
    return tuple(
        Move(source, target, overlap)
        for target, want in wanted.items()
        for source, tile in owned.items()
        if (overlap := want & tile)
    )
