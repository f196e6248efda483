"""Spans, tiles and grids: the pixels of an image that each rank owns, in whole-image pixels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from engines.errors import PlanError

__all__ = ["Grid", "Move", "Span", "Tile", "compute_moves"]


@dataclass(frozen=True, slots=True)
class Span:
    """Pixels `start` to `stop` (half-open) along one axis. An empty span is false; `&` intersects, `|` spans both."""

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

    def to_slice(self, other: Span) -> slice:
        """Return this span as a slice of an array that holds exactly the pixels of `other`.

        >>> Span(4, 6).to_slice(Span(3, 9))
        slice(1, 3, None)
        """
        return slice(self.start - other.start, self.stop - other.start)


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of whole-image pixels. An empty tile is false; `&` intersects, `|` spans both.

    `images` are the images of the micro-batch that the tile covers, None for all.
    """

    rows: Span
    cols: Span
    images: Span | None = None

    @classmethod
    def whole(cls, height_px: int, width_px: int) -> Tile:
        """Return the tile of the whole image."""
        return cls(Span(0, height_px), Span(0, width_px))

    def __bool__(self) -> bool:
        return bool(self.rows) and bool(self.cols) and (self.images is None or bool(self.images))

    def __and__(self, other: Tile) -> Tile:
        if self.images is None or other.images is None:
            images = other.images if self.images is None else self.images
        else:
            images = self.images & other.images
        return Tile(self.rows & other.rows, self.cols & other.cols, images)

    def __or__(self, other: Tile) -> Tile:
        """Return the smallest tile that contains both."""
        if not (self and other):
            return self if self else other
        return Tile(self.rows | other.rows, self.cols | other.cols)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return len(self.rows), len(self.cols)

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return len(self.rows) * len(self.cols)

    def is_inside(self, other: Tile) -> bool:
        """Return whether `other` contains this tile."""
        return not self or self & other == self

    def to_slices(self, other: Tile) -> tuple[slice, slice]:
        """Return this tile as (row, column) slices of an array that holds exactly the pixels of `other`."""
        return self.rows.to_slice(other.rows), self.cols.to_slice(other.cols)


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of `rows` x `cols` tiles, numbered row by row. Their sizes differ by at most one pixel.

    >>> [len(span) for span in Grid(1, 3).split_axis(10, 3)]
    [3, 3, 4]
    """

    rows: int
    cols: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.rows * self.cols

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((row, col) for row in range(self.rows) for col in range(self.cols))

    @staticmethod
    def split_axis(size_px: int, parts: int) -> tuple[Span, ...]:
        """Cut `size_px` pixels at the same fractions for every size, so that the tiles of all layers line up."""
        # 10 pixels over 4 tiles: cuts at 0, 2, 5, 7, 10. The 5 pixels after a stride of 2: 0, 1, 2, 3, 5. Each cut is
        # within a pixel of half the other, so that halos stay narrow.
        cuts = [size_px * part // parts for part in range(parts + 1)]
        return tuple(Span(start, stop) for start, stop in itertools.pairwise(cuts))

    @lru_cache(maxsize=4096)  # noqa: B019  (grids are small values, and layers of one size ask again and again)
    def cut(self, height_px: int, width_px: int) -> tuple[Tile, ...]:
        """Return the tiles of an image, in order.

        Raises PlanError if a tile would be empty.

        >>> Grid(1, 2).cut(4, 5)[1].cols
        Span(start=2, stop=5)
        """
        self._check(height_px, width_px)
        rows, cols = self.split_axis(height_px, self.rows), self.split_axis(width_px, self.cols)
        return tuple(Tile(rows[row], cols[col]) for row, col in self)

    def get_tile(self, number: int, height_px: int, width_px: int) -> Tile:
        """Return one of the tiles without computing the others.

        >>> Grid(1, 2).get_tile(1, 4, 5) == Grid(1, 2).cut(4, 5)[1]
        True
        """
        self._check(height_px, width_px)
        row, col = divmod(number, self.cols)
        rows, cols = ((height_px, row, self.rows), (width_px, col, self.cols))
        return Tile(*(Span(px * at // parts, px * (at + 1) // parts) for px, at, parts in (rows, cols)))

    def _check(self, height_px: int, width_px: int) -> None:
        for name, size_px, parts in (("rows", height_px, self.rows), ("columns", width_px, self.cols)):
            if size_px < parts:
                raise PlanError(
                    f"{size_px} {name} of pixels cannot be cut into {parts} tiles. "
                    f"Use a slice_method with at most {size_px} along that axis, or a smaller spatial_size."
                )


# Moves: rectangles that one rank sends to another. Halos, gathers, scatters and repartitions all consist of moves.


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of the pixels of `tile` from rank `source` to rank `target`."""

    source: int
    target: int
    tile: Tile


def compute_moves(owned: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> tuple[Move, ...]:
    """Return every transfer that fills each rank's `wanted` tile from the `owned` tiles, its own pixels included.

    The owned tiles do not overlap, so each wanted pixel inside the image arrives exactly once.

    >>> from engines.spatial.tiles import Span
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
        for source, own in owned.items()
        if (overlap := want & own)
    )
