"""Windows: the input positions that given outputs read, computed backwards from the outputs, axis by axis.

With fused halos, windows are computed backwards through several layers: one exchange serves them all, and ranks
recompute the overlap of their extended tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import ClassVar

from mpi4dl_nb.engines.geometry.tiles import Span, Tile, compute_moves

SpanRule = Callable[[Span], Span]
"""Maps outputs along one axis to the inputs that they read, including those outside the image.

A rule that is `elementwise` also takes a span whose start and stop are arrays: one span for each element."""

Margins = tuple[tuple[int, int], ...]
"""For each sharded axis: how much to add, or if negative to crop, before and after."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Window of a convolution or pool: output i reads `kernel` pixels, `dilation` apart, from i * stride - padding."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    elementwise: ClassVar[bool] = True

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
    elementwise: ClassVar[bool] = True

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
        # Never empty: a kernel needs a pixel; surplus outputs are cropped. This is min(first, last), also of arrays.
        return Span(first - (first > last) * (first - last), last + 1)


@dataclass(frozen=True, slots=True)
class Shift:
    """Window of slicing and padding: output i reads input i + `by`."""

    by: int
    elementwise: ClassVar[bool] = True

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
    def margins(self) -> Margins:
        """Pixels to add (or, if negative, to crop) before and after, along each sharded axis."""
        pairs = zip(self.held, self.wanted, strict=True)
        return tuple((held.start - wanted.start, wanted.stop - held.stop) for held, wanted in pairs)


def compute_window(out: Tile, rules: Sequence[SpanRule]) -> Tile:
    """Return what the outputs in `out` read, by one rule for each sharded axis; it may extend beyond the image."""
    return Tile(*(rule(span) for rule, span in zip(rules, out, strict=True)))


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


# Fused halos: the tiles that ranks hold beyond their own, so that one exchange serves a group of layers.


Tiles = Mapping[int, Tile]
"""A tile for each rank."""

TileLookup = Callable[[str], tuple[Tile, Tiles]]
"""Maps the name of a tiled value to the tile of its whole image and each rank's own tile."""


@dataclass(frozen=True, slots=True)
class WindowRead:
    """A read of a tiled value by a node's outputs, by a rule for each sharded axis, with `fill` outside the image."""

    node: str
    value: str
    rules: tuple[SpanRule, ...]
    fill: float


@dataclass(frozen=True)
class ExtendedTiles:
    """Pixels that ranks hold beyond their own tiles.

    `held`: what each rank computes of a node's result, if more than its own tile. `fetched`: what each rank fetches of
    a value from another group, by group and value; `alike` are the entries of which all readers want the same. `groups`
    maps each node to its group.
    """

    held: Mapping[str, Tiles] = field(default_factory=dict)
    fetched: Mapping[tuple[int, str], Tiles] = field(default_factory=dict)
    alike: frozenset[tuple[int, str]] = frozenset()
    groups: Mapping[str, int] = field(default_factory=dict)

    def get_fetched(self, node: str, value: str) -> Tiles | None:
        """Return what the group of `node` fetches of `value` for all its readers; None if they all want the same."""
        key = self.groups.get(node, -1), value
        return None if key in self.alike else self.fetched.get(key)


def extend_tiles(reads: Iterable[WindowRead], groups: Mapping[str, int], extent: TileLookup) -> ExtendedTiles:
    """Walk a stage backwards: each node also computes what later nodes of its group read.

    `reads` are in the nodes' order; `groups` maps each node to the number of its group.
    """
    # Two 3 x 3 convolutions in one group, on the rank that owns columns 4 to 8:
    #
    #     second convolution        4 |==========| 8           its own outputs
    #     first convolution       3 |--============--| 9       computed redundantly where neighbours own the columns
    #     input                2 |----============----| 10     fetched in one exchange of two columns, not in two of one
    held: dict[str, Tiles] = {}
    requests: dict[tuple[int, str], list[tuple[Tiles, float]]] = defaultdict(list)
    for read in reversed(list(reads)):  # backwards: `held` of a node must cover its readers before its own reads follow
        whole, owned = extent(read.value)
        outputs = held.get(read.node) or extent(read.node)[1]
        wanted = {rank: compute_window(tile, read.rules) for rank, tile in outputs.items()}
        if groups.get(read.value) == groups[read.node]:
            held[read.value] = _compute_hulls([held.get(read.value, owned), wanted], whole)
        else:
            requests[groups[read.node], read.value].append((wanted, read.fill))
    fetched = {
        key: _compute_hulls([wanted for wanted, _ in wishes], extent(key[1])[0]) for key, wishes in requests.items()
    }
    alike = frozenset(key for key, wishes in requests.items() if all(wish == wishes[0] for wish in wishes))
    return ExtendedTiles(held, fetched, alike, groups)


def _compute_hulls(wishes: Sequence[Tiles], whole: Tile) -> Tiles:
    """Return each rank's smallest tile that contains all its wishes inside the image."""
    return {rank: reduce(or_, (wish[rank] & whole for wish in wishes)) for rank in wishes[0]}


# Which layers share a halo exchange: groups of a given size, or the cheapest groups.


_MOST_LAYERS = 8  # longer groups are not searched: redundant computation grows with the square of their length


@dataclass(frozen=True, slots=True)
class ValueCost:
    """Cost of a value: FLOPs for the whole image, a multiply-add counted as two, and bytes per pixel."""

    flops: int
    pixel_bytes: float


@dataclass(frozen=True, slots=True)
class HaloCost:
    """Cost of a halo exchange and of redundant computation, for one rank.

    Every exchange costs `exchange_s` seconds, and its bytes at `bytes_per_s`; work that another rank does as well runs
    at `flops_per_s`. The defaults are for ranks that share the cores of a small machine.
    """

    exchange_s: float = 3e-4
    bytes_per_s: float = 4e9
    flops_per_s: float = 2e10

    def estimate_seconds(self, wide: ExtendedTiles, extent: TileLookup, work: Mapping[str, ValueCost]) -> float:
        """Return the seconds that fused layers add to a training step, on the rank to which they add most.

        Backward transfers the bytes once more, and computes twice as much redundantly as forward.
        """
        # More layers in a group: fewer exchanges, and a wider rim that neighbours compute as well.
        added: dict[int, float] = {}
        for node, tiles in wide.held.items():
            whole, owned = extent(node)
            for rank, tile in tiles.items():
                more = work[node].flops * (tile.pixels - owned[rank].pixels) / whole.pixels
                added[rank] = added.get(rank, 0.0) + 3 * more / self.flops_per_s
        for (_, value), wanted in wide.fetched.items():
            travelling = [move for move in compute_moves(extent(value)[1], wanted) if move.source != move.target]
            for rank in wanted:
                pixels = sum(move.tile.pixels for move in travelling if move.target == rank)
                seconds = pixels * work[value].pixel_bytes / self.bytes_per_s + self.exchange_s * bool(travelling)
                added[rank] = added.get(rank, 0.0) + 2 * seconds
        return max(added.values(), default=0.0)


def group_cheapest(
    layers: Sequence[Sequence[str]],
    reads: Sequence[WindowRead],
    extent: TileLookup,
    work: Mapping[str, ValueCost],
    cost: HaloCost,
) -> tuple[int, ...]:
    """Return the group sizes that minimise the time of a training step; `layers` are the names of their nodes.

    Dynamic programming over the start of the last group.
    """
    layer_of = {node: index for index, nodes in enumerate(layers) for node in nodes}
    reads_of: list[list[WindowRead]] = [[] for _ in layers]
    for read in reads:
        reads_of[layer_of[read.node]].append(read)

    def estimate_group(start: int, end: int) -> float:
        inside = [read for layer_reads in reads_of[start:end] for read in layer_reads]
        nodes = dict.fromkeys((node for layer in layers[start:end] for node in layer), 0)
        return cost.estimate_seconds(extend_tiles(inside, nodes, extent), extent, work)

    # best[end]: the first `end` layers, as (seconds, size of each group).
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for end in range(1, len(layers) + 1):
        starts = range(max(0, end - _MOST_LAYERS), end)
        options = ((best[start][0] + estimate_group(start, end), (*best[start][1], end - start)) for start in starts)
        best.append(min(options))
    return best[-1][1]
