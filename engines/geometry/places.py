"""Places: where the sharded axes of a value are in its shape, as whole dimensions or as factors of dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import mul
from typing import NamedTuple

from mpi4dl_nb.engines.geometry.tiles import Axes, Tile
from mpi4dl_nb.engines.geometry.windows import Shift, SlidingWindow, SpanRule, TableWindow


class Place(NamedTuple):
    """Where a sharded axis is: the factor of dimension `dim` with `outer` positions before it and `inner` behind it.

    Dimensions are counted from the end. The positions of a dimension are in row-major order. An axis that is a whole
    dimension has nothing before or behind it. The first `lead` positions of the dimension are none of the image, such
    as class tokens: the first tile has them, beside its own.

    >>> rows, columns = Place(-2, outer=1, inner=6), Place(-2, outer=4, inner=1)  # of 4 x 6 pixels as tokens (N, 24, C)
    >>> get_sizes((2, 24, 8), (rows, columns))
    (4, 6)
    """

    dim: int
    outer: int = 1
    inner: int = 1
    lead: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the axis is a whole dimension."""
        return self.outer == self.inner == 1 and not self.lead


Places = tuple[Place, ...]

Ranges = Sequence[tuple[int, int, int]]
"""For each axis of a tensor, or factor of one: its whole size, and the start and stop of the local part."""


def to_places(axes: Iterable[int | Place]) -> Places:
    """Return the places of axes, of which numbers are whole dimensions."""
    return tuple(Place(axis) if isinstance(axis, int) else axis for axis in axes)


def get_sizes(shape: Sequence[int], places: Places) -> tuple[int, ...]:
    """Return the sizes of the sharded axes of a value."""
    return tuple((shape[place.dim] - place.lead) // (place.outer * place.inner) for place in places)


def count_lead(places: Places) -> int:
    """Return how many positions along a sharded dimension are none of the image."""
    return max((place.lead for place in places), default=0)


def drop_lead(shape: Sequence[int], places: Places) -> tuple[tuple[int, ...], Places]:
    """Return shape and places of the positions of the image alone.

    >>> drop_lead((2, 25, 8), (Place(-2, 1, 6, lead=1), Place(-2, 4, 1, lead=1)))
    ((2, 24, 8), (Place(dim=-2, outer=1, inner=6, lead=0), Place(dim=-2, outer=4, inner=1, lead=0)))
    """
    leads = {place.dim + len(shape): place.lead for place in places}
    sizes = tuple(size - leads.get(dim, 0) for dim, size in enumerate(shape))
    return sizes, tuple(place._replace(lead=0) for place in places)


@lru_cache(maxsize=1 << 12)
def split_shape(shape: tuple[int, ...], places: Places) -> tuple[tuple[int, ...], Axes]:
    """Return the shape in which each sharded axis is a dimension, and these dimensions, counted from the end.

    >>> split_shape((2, 24, 8), (Place(-2, 1, 6), Place(-2, 4, 1)))
    ((2, 4, 6, 8), (-3, -2))
    """
    factors: list[int] = []
    numbers: dict[Place, int] = {}
    for dim, size in enumerate(shape, -len(shape)):
        before, begin = 1, len(factors)
        for place in sorted(
            (place for place in places if place.dim == dim), key=lambda place: (-place.inner, place.outer)
        ):
            if place.outer > before:
                factors.append(place.outer // before)
            numbers[place] = len(factors)
            factors.append(size // (place.outer * place.inner))
            before = size // place.inner
        if before < size or len(factors) == begin:
            factors.append(size // before)
    return tuple(factors), tuple(numbers[place] - len(factors) for place in places)


def list_ranges(shape: Sequence[int], places: Places, tile: Tile) -> list[tuple[int, int, int]]:
    """Return the positions of a tile, of all dimensions in row-major order: sizes of factors, with start and stop.

    >>> from mpi4dl_nb.engines.geometry.tiles import Span
    >>> list_ranges((2, 24), (Place(-1, 1, 6), Place(-1, 4, 1)), Tile(Span(0, 4), Span(3, 6)))
    [(2, 0, 2), (4, 0, 4), (6, 3, 6)]
    """
    factors, axes = split_shape(tuple(shape), places)
    ranges = [(size, 0, size) for size in factors]
    for axis, span in zip(axes, tile, strict=True):
        ranges[axis] = factors[axis], span.start, span.stop
    return ranges


def compute_local_shape(shape: Sequence[int], places: Places, tile: Tile) -> tuple[int, ...]:
    """Return the shape of a tile of a value.

    >>> from mpi4dl_nb.engines.geometry.tiles import Span
    >>> compute_local_shape((2, 24, 8), (Place(-2, 1, 6), Place(-2, 4, 1)), Tile(Span(0, 4), Span(3, 6)))
    (2, 12, 8)
    """
    image, of_image = drop_lead(shape, places)
    sizes = list(image)
    for place, size, span in zip(of_image, get_sizes(image, of_image), tile, strict=True):
        sizes[place.dim] = sizes[place.dim] // size * len(span)
    if is_first(tile):
        sizes = [size + whole - part for size, whole, part in zip(sizes, shape, image, strict=True)]
    return tuple(sizes)


def is_first(tile: Tile) -> bool:
    """Return whether a tile begins where the image does."""
    return all(span.start == 0 for span in tile)


def keep_places(places: Places, dims: Sequence[int | None]) -> Places:
    """Return the places after each dimension, from the front, has become the one of the same place in `dims`.

    The new dimensions are counted from the end. A dimension that is None is left out, and so are its axes.
    """
    moved = ((place, dims[place.dim + len(dims)]) for place in places)
    return tuple(place._replace(dim=dim) for place, dim in moved if dim is not None)


def reduce_on_tiles(
    shape: Sequence[int], places: Places, parts: Sequence[int], dims: Sequence[int]
) -> tuple[tuple[int, ...], Places]:
    """Return shape and places of a value of which each tile has reduced `dims`, counted from the front, to 1.

    The whole has as many positions along them as there are tiles: `parts` along each sharded axis.

    >>> reduce_on_tiles((2, 24, 8), (Place(-2, 1, 6), Place(-2, 4, 1)), (2, 3), [1])  # tokens on 2 x 3 tiles
    ((2, 6, 8), (Place(dim=-2, outer=1, inner=3, lead=0), Place(dim=-2, outer=2, inner=1, lead=0)))
    """
    sizes = [1 if dim in dims else size for dim, size in enumerate(shape)]
    reduced = [place._replace(lead=0) if place.dim + len(shape) in dims else place for place in places]
    for index in sorted(range(len(places)), key=lambda index: (places[index].inner, -places[index].outer)):
        dim = places[index].dim
        if dim + len(shape) in dims:  # from the innermost axis outwards
            reduced[index] = Place(dim, inner=sizes[dim])
            sizes[dim] *= parts[index]
    for index, place in enumerate(reduced):
        if place.dim + len(shape) in dims:
            reduced[index] = place._replace(outer=sizes[place.dim] // (place.inner * parts[index]))
    return tuple(sizes), tuple(reduced)


# Other shapes for the same values (`view`, `reshape`, `flatten`): each sharded axis stays where it is in memory.


@dataclass(frozen=True, slots=True)
class Regrouping:
    """The sharded axes of a value in another shape: their `places`, and for each axis the positions that it reads."""

    places: Places
    rules: tuple[SpanRule, ...]


def find_regrouping(shape: tuple[int, ...], places: Places, out: tuple[int, ...]) -> Regrouping | None:
    """Return where the sharded axes of a value are in the shape `out`; None if one of them is there in no place.

    An axis that is split stays on its outer part; one that is joined with positions behind it alone grows by them.

    >>> find_regrouping((2, 8, 4, 6), (Place(-2), Place(-1)), (2, 8, 24)).places  # rows and columns as tokens
    (Place(dim=-1, outer=1, inner=6, lead=0), Place(dim=-1, outer=4, inner=1, lead=0))
    >>> find_regrouping((2, 8, 4, 6), (Place(-2), Place(-1)), (2, 8, 2, 2, 2, 3)).rules  # windows of 2 x 3 pixels
    (SlidingWindow(kernel=2, stride=2, padding=0, dilation=1), SlidingWindow(kernel=3, stride=3, padding=0, dilation=1))
    >>> find_regrouping((2, 8, 4, 6), (Place(-2), Place(-1)), (2, 8, 6, 4)) is None  # neither rows nor columns any more
    True
    """
    shape, out = (tuple(max(1, size) for size in sizes) for sizes in (shape, out))  # 0 channels have a place
    candidates = [list(_find_places(shape, place, out)) for place in places]
    choices = [choice for choice in product(*candidates) if len({place for place, _ in choice}) == len(choice)]
    if not choices:
        return None
    # Axes of size 1 leave a choice: prefer the last axes in order, where rules for images expect rows and columns.
    last = tuple(range(-len(places), 0))

    def rate(choice: Sequence[tuple[Place, SpanRule]]) -> tuple[bool, bool, tuple[int, ...]]:
        dims = tuple(place.dim for place, _ in choice)
        whole = all(place.is_whole for place, _ in choice)
        return whole and dims == last, whole, dims

    chosen, rules = zip(*max(choices, key=rate), strict=True)
    grown = [_grow(place, rule, chosen, out) for place, rule in zip(chosen, rules, strict=True)]
    return Regrouping(tuple(place for place, _ in grown), tuple(rule for _, rule in grown))


def _find_places(shape: Sequence[int], place: Place, out: Sequence[int]) -> Iterable[tuple[Place, SpanRule]]:
    """Yield where an axis may be in the shape `out`, with the rule by which its positions read those of before."""
    if place.lead:  # stays a dimension, of the same size in the same place
        end = math.prod(shape[place.dim :][1:])
        for dim, size in enumerate(out):
            if size == shape[place.dim] and math.prod(out[dim + 1 :]) == end:
                yield place._replace(dim=dim - len(out)), Shift(0)
        return
    # `low` is the number of values that lie behind one position of the axis in memory, `high` that of all of it. The
    # dimensions of `out` end at other such numbers. Those between the two split the axis; it stays on the outer part:
    #
    #     (N, C, [H = 8], 6)           low 6, high 48
    #     (N, C, 2, 4, 6)              a dimension ends at 24: the axis becomes the 2, and each position reads 4 rows
    behind = [*accumulate(reversed(out), mul, initial=1)][::-1]  # behind[d + 1] values are behind dimension d
    (size,), low = get_sizes(shape, (place,)), math.prod(shape[place.dim :][1:]) * place.inner
    high = low * size
    cuts = sorted({end for end in behind if low < end < high})
    if any(end % low or high % end for end in cuts):
        return
    begin = cuts[-1] if cuts else low
    rule: SpanRule = SlidingWindow(begin // low, begin // low) if cuts else Shift(0)
    for dim, (above, end) in enumerate(pairwise(behind)):
        if end <= begin and high <= above and not (begin % end or above % high) and (above > end or size == 1):
            yield Place(dim - len(out), above // high, begin // end), rule


def _grow(place: Place, rule: SpanRule, places: Sequence[Place], out: Sequence[int]) -> tuple[Place, SpanRule]:
    """Return the place and the rule of an axis that becomes the whole of its dimension, if no other axis is in that."""
    if place.outer > 1 or place.inner == 1 or place.lead or sum(other.dim == place.dim for other in places) > 1:
        return place, rule
    return Place(place.dim), TableWindow(tuple((position // place.inner,) for position in range(out[place.dim])))
