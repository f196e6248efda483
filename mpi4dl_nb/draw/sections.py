"""Sections: planes through a value of any number of axes. The boxes of ranks are rectangles there, as in a picture.

A section lies along two of the axes, at a position along each other one. A box is cut where it contains that position:

    box of a volume                 its section along rows and columns at plane 5
    planes 4 to 7
    rows 0 to 9          ------->   rows 0 to 9, columns 8 to 15
    columns 8 to 15                 at plane 3: empty

So that what draws pictures draws sections: of a picture, the only section is itself, and that of a signal is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from numpy.typing import NDArray

from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Move, Span, Tile

LEAST_SHARE = 0.25  # of the longer side that is drawn
ROW = Span(0, 1)
"""The rows of a signal."""


@dataclass(frozen=True)
class Section:
    """A plane along `axes`, two of a value's sharded axes, or its only one; `at` has a position along each axis."""

    axes: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def across(self) -> tuple[int, ...]:
        """The axes along which the section has one position only."""
        return tuple(axis for axis in range(len(self.at)) if axis not in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the two axes that are drawn, downwards and to the right."""
        return ("rows", *(self.all_names[axis] for axis in self.axes))[-2:]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all axes of the value."""
        return AXIS_NAMES[-len(self.at) :]

    def cut(self, tile: Tile) -> Tile:
        """Return the rectangle of a box in this section; an empty one if the section does not meet it.

        >>> box = Tile(Span(4, 8), Span(0, 10), Span(8, 16))
        >>> Section((1, 2), (5, 0, 0)).cut(box), bool(Section((1, 2), (3, 0, 0)).cut(box))
        (Tile(Span(start=0, stop=10), Span(start=8, stop=16)), False)
        """
        if not all(self.at[axis] in tile[axis] for axis in self.across):
            return Tile(Span(0, 0), Span(0, 0))
        return Tile(*(ROW, *(tile[axis] for axis in self.axes))[-2:])

    def select(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the section (rows, columns) of an array."""
        part = values[tuple(slice(None) if axis in self.axes else at for axis, at in enumerate(self.at))]
        return part.reshape(-1, part.shape[-1])


def list_sections(at: Sequence[int]) -> tuple[Section, ...]:
    """Return the sections through a position along all pairs of axes: one of a picture or a signal, three of a volume.

    >>> [section.names for section in list_sections((0, 0, 0))]
    [('rows', 'columns'), ('planes', 'columns'), ('planes', 'rows')]
    """
    pairs = reversed([*combinations(range(len(at)), min(2, len(at)))])
    return tuple(Section(axes, tuple(at)) for axes in pairs)


# The tiles of a volume as one picture: its planes of tiles stand on each other, as rows of tiles do.
#
#     plane 0   | 0 | 1 |
#               | 2 | 3 |
#     plane 1   | 4 | 5 |
#               | 6 | 7 |

ROW_SHARE = 8  # positions of a signal for each of the rows that it is drawn with


def measure_stack(sizes: Sequence[int], planes: int) -> tuple[int, int]:
    """Return the rows and columns of a picture of all tiles of a value, in so many planes of tiles.

    >>> measure_stack((64, 96), 1), measure_stack((16, 64, 96), 2), measure_stack((800,), 1)
    ((64, 96), (128, 96), (100, 800))
    """
    *_, rows, cols = (-(-sizes[-1] // ROW_SHARE), *sizes)
    return planes * rows, cols


def place_on_stack(tiles: Sequence[Tile], planes: int, size: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the sides (top, left, bottom, right) of all tiles of a value, in order, in a picture of `size`.

    >>> from mpi4dl_nb.engines.geometry.tiles import Grid
    >>> place_on_stack(Grid(2, 1, 2).cut(16, 64, 96), 2, (128, 96))[3]
    (64.0, 48.0, 128.0, 96.0)
    """
    *_, high, wide = (1, *(span.stop for span in tiles[-1]))
    down, across = size[0] / (planes * high), size[1] / wide
    placed: list[tuple[float, ...]] = []
    for tile_number, tile in enumerate(tiles):
        *_, rows, cols = (ROW, *tile)
        above = tile_number * planes // len(tiles) * high
        placed.append(
            ((above + rows.start) * down, cols.start * across, (above + rows.stop) * down, cols.stop * across)
        )
    return placed


def limit_aspect(sides: Sequence[int]) -> tuple[float, float]:
    """Return the rows and columns as which a section is drawn: a stack of few planes is drawn thicker than it is.

    >>> limit_aspect((30, 40)), limit_aspect((4, 40))
    ((30, 40), (10.0, 40))
    """
    rows, cols = sides
    return max(rows, LEAST_SHARE * cols), max(cols, LEAST_SHARE * rows)


@dataclass(frozen=True, repr=False, kw_only=True)
class SectionPoint(HaloPoint):
    """What a section shows of the point `solid`: rectangles, of which those that it does not meet are empty."""

    solid: HaloPoint
    section: Section

    @classmethod
    def of(cls, solid: HaloPoint, section: Section) -> SectionPoint:
        """Return what a section shows of a point; its position is one of the point's value."""
        parts = solid.readers, solid.stage, solid.ranks, solid.spec, solid.axes, solid.exchanges, solid.computed
        return cls(*parts, solid=solid, section=section)

    @property
    def unit(self) -> str:
        return self.solid.unit

    @property
    def halo_words(self) -> str:
        return self.solid.halo_words

    @property
    def verb(self) -> str:
        return self.solid.verb

    @property
    def owner_form(self) -> str:
        return self.solid.owner_form

    @property
    def reads_image(self) -> bool:
        return self.solid.reads_image

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.section.names

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.section.cut(Tile.whole(*self.solid.sizes)).shape

    @property
    def tiles(self) -> dict[int, Tile]:
        return {rank: self.section.cut(tile) for rank, tile in self.solid.tiles.items()}

    def get_window(self, rank: int) -> Tile:
        return self.section.cut(self.solid.get_window(rank))

    def get_receives(self, rank: int) -> tuple[Move, ...]:
        return self._cut_moves(self.solid.get_receives(rank))

    def find_redundant_moves(self, rank: int) -> tuple[Move, ...]:
        return self._cut_moves(self.solid.find_redundant_moves(rank))

    def _cut_moves(self, moves: Sequence[Move]) -> tuple[Move, ...]:
        cuts = (Move(move.source, move.target, self.section.cut(move.tile)) for move in moves)
        return tuple(move for move in cuts if move.tile)

    def compute_axis_widths(self, rank: int) -> list[tuple[int, int]]:
        widths = self.solid.compute_axis_widths(rank)
        return [(0, 0), *(widths[axis] for axis in self.section.axes)][-2:]

    def describe_total(self, rank: int) -> str:
        return self.solid.describe_total(rank)

    def describe_move(self, move: Move, end: str = " ") -> str:
        # The box that travels, not the part of it that is seen here.
        moves = self.solid.get_receives(move.target)
        return self.solid.describe_move(next(whole for whole in moves if whole.source == move.source), end)
