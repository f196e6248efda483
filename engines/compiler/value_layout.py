"""What the ranks of a stage hold of each value, as recorded while the program of one of them is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.places import (
    Places,
    compute_local_shape,
    count_lead,
    drop_lead,
    get_sizes,
    split_shape,
    to_places,
)
from mpi4dl_nb.engines.geometry.tiles import Axes, Tile
from mpi4dl_nb.engines.geometry.windows import ExtendedTiles, ValueCost
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Ref, TensorSpec
from mpi4dl_nb.engines.plan.layout import StageRanks

# A memo for what all ranks of a stage compute alike: the first rank computes it, the others reuse it.


T = TypeVar("T")


@dataclass
class Memo:
    """Cached results, each reused for as long as its arguments are equal.

    >>> common = Memo()
    >>> common.get_or_compute("sum", ([1, 2],), sum), common.get_or_compute("sum", ([1, 2],), lambda _: "not called")
    (3, 3)
    >>> common.get_or_compute("sum", ([5, 2],), sum)
    7
    """

    _found: dict[Hashable, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, given: tuple[Any, ...], find: Callable[..., T]) -> T:
        """Return `find(*given)`, which must depend on `given` alone; only the last result of each `key` is kept."""
        before = self._found.get(key)
        if before is None or before[0] != given:
            before = self._found[key] = given, find(*given)
        answer: T = before[1]
        return answer


class MergedAxesError(TraceError):
    """A value whose sharded axes are merged with others, where each of them must be a dimension of its own."""


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """A tensor in a stage; `spec` is that of the whole image.

    `places` are those of the axes along which it is sharded, such that each rank holds its own tile; if there are none,
    every rank of the stage holds all of it.
    """

    name: str
    spec: TensorSpec
    places: Places
    differentiable: bool

    @property
    def axes(self) -> Axes:
        """The dimensions along which it is sharded.

        Raises MergedAxesError if rows and columns are no dimensions of their own, as in tokens (N, H * W, C).
        """
        if not self.is_split:
            raise MergedAxesError(f"the rows and columns of {self.name}, of shape {self.spec.shape}, are merged")
        return tuple(place.dim for place in self.places)

    @property
    def is_split(self) -> bool:
        """Whether each sharded axis is a dimension of its own."""
        return all(place.is_whole for place in self.places)

    @property
    def lead(self) -> int:
        """The number of positions beside the pixels, such as class tokens, which the first rank holds."""
        return count_lead(self.places)

    def separate(self) -> tuple[ValueLayout, ...]:
        """Return the layouts of the pixels alone, and of what lies beside them; the value's own if nothing does."""
        if not self.lead:
            return (self,)
        shape, places = drop_lead(self.spec.shape, self.places)
        beside = self.spec.resize(self.places[0].dim, self.lead)
        return (
            replace(self, name=f"{self.name}.pixels", spec=replace(self.spec, shape=shape), places=places),
            replace(self, name=f"{self.name}.beside", spec=beside, places=()),
        )

    @property
    def size_px(self) -> tuple[int, ...]:
        """The sizes of the whole value along its sharded axes."""
        return get_sizes(self.spec.shape, self.places)

    def split(self) -> ValueLayout:
        """Return the layout of the same pixels in a shape in which each sharded axis is a dimension of its own.

        Raises MergedAxesError if other positions lie beside the pixels.
        """
        if self.is_split:
            return self
        if self.lead:
            raise MergedAxesError(
                f"{self.name}, of shape {self.spec.shape}, has {self.lead} positions beside its pixels"
            )
        shape, axes = split_shape(self.spec.shape, self.places)
        return replace(self, name=f"{self.name}.split", spec=replace(self.spec, shape=shape), places=to_places(axes))

    def compute_shape(self, tile: Tile) -> tuple[int, ...]:
        """Return the shape of a tensor that holds `tile`."""
        return compute_local_shape(self.spec.shape, self.places, tile)


@dataclass
class ValueLayouts:
    """The pixels and images that each rank of a stage holds of every value, for the rank of tile `tile`.

    `extended` is what they hold beyond their tiles. `memo` is shared by the builders of all ranks of the stage.
    `tile_by_tile`: tiles are computed one after another without communication, so that only the tile of this rank is
    considered. `copies` are the ranks of the stage in all replicas: those of the first one, of the second one, and so
    on.
    """

    graph: ModelGraph
    stage: StageRanks
    tile: int
    tag: int
    values: dict[str, ValueLayout] = field(default_factory=dict)
    extended: ExtendedTiles = field(default_factory=ExtendedTiles)
    tile_by_tile: bool = False
    copies: tuple[int, ...] = ()
    memo: Memo = field(default_factory=Memo)
    _held: dict[str, Mapping[int, Tile]] = field(default_factory=dict)
    _node: str = ""
    _flops: dict[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank whose program is built."""
        return self.stage.ranks[self.tile]

    @property
    def is_first(self) -> bool:
        """Whether it is the first rank of its stage, with the first tile."""
        return self.tile == 0

    @property
    def image_axes(self) -> Axes:
        """The axes along which the stage cuts images: the last ones, as many as its grid has."""
        return tuple(range(-len(self.stage.grid), 0))

    def get_image_px(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the size of the images in a value along `image_axes`, in pixels."""
        return spec.get_sizes(self.image_axes)

    def is_tiled(self, ref: Any) -> bool:
        """Return whether an argument is a value of which each rank holds a part: a tile, or images."""
        return isinstance(ref, Ref) and ref.name in self.values and bool(self.values[ref.name].places)

    def count_elements(self, ref: Ref, groups: int) -> list[int]:
        """Return how many elements of a value each rank has, per group of `groups`; one number if all hold the same."""
        value = self.get_value(ref).split()
        if not value.places:
            return [value.spec.numel // groups]
        per_px = value.spec.numel // groups // math.prod(value.size_px)
        return [per_px * tile.pixels for tile in self.stage.parts.cut(*value.size_px)]

    def get_value(self, ref: Ref) -> ValueLayout:
        """Return the value that an argument refers to; weights, buffers and constants are whole on every rank."""
        if ref.name in self.values:
            return self.values[ref.name]
        return ValueLayout(ref.name, self.graph.specs[ref.name], (), ref.name in self.graph.trainable)

    def get_tiles(self, size_px: tuple[int, ...]) -> dict[int, Tile]:
        """Return the tile that each rank owns of an image of that size."""
        if self.tile_by_tile:
            return {self.rank: self.stage.parts.get_tile(self.tile, *size_px)}
        return self.memo.get_or_compute(
            ("tiles", size_px),
            (self.stage, size_px),
            lambda stage, size_px: dict(zip(stage.ranks, stage.parts.cut(*size_px), strict=True)),
        )

    def can_tile(self, size_px: tuple[int, ...]) -> bool:
        """Return whether an image of that size can be cut into tiles."""
        return all(parts <= size for parts, size in zip(self.stage.parts, size_px, strict=True))

    def get_output_tiles(self, size_px: tuple[int, ...]) -> Mapping[int, Tile]:
        """Return what each rank computes of the current node's result, an image of that size: its tile, or more."""
        return self.extended.held.get(self._node) or self.get_tiles(size_px)

    def get_held_tiles(self, ref: Ref) -> Mapping[int, Tile]:
        """Return what each rank holds of a tiled value: its tile, or more."""
        return self._held.get(ref.name) or self.get_tiles(self.get_value(ref).size_px)

    def hold_extended(self, name: str) -> None:
        """Record that ranks hold more than their tiles of a tiled value, where its group reads more (fused halos)."""
        if self.values[name].places and not self.values[name].lead and name in self.extended.held:
            self._held[name] = self.extended.held[name]

    def hold_like(self, out: Ref, ref: Ref) -> None:
        """Record that each rank holds the same pixels of `out` as of `ref`."""
        self._held[out.name] = self.get_held_tiles(ref)

    def hold_own(self, name: str) -> None:
        """Record that this rank holds its own tile of a value, also if its group reads more (fused halos)."""
        self._held.pop(name, None)

    def hold(self, value: ValueLayout, tile: Tile) -> Ref:
        """Add a value of which this rank holds the pixels of `tile`."""
        self.values[value.name], self._held[value.name] = value, {self.rank: tile}
        return Ref(value.name)

    def get_image_tiles(self, name: str) -> tuple[Tile, Mapping[int, Tile]]:
        """Return a tiled value's whole image, and each rank's own tile of it."""
        size_px = self.values[name].size_px
        return Tile.whole(*size_px), self.get_tiles(size_px)

    def estimate_cost(self, name: str) -> ValueCost:
        """Return the cost of computing a tiled value, and of sending it."""
        value, flops = self.values[name], self._flops.get(name, 0)
        return ValueCost(flops, value.spec.bytes / math.prod(value.size_px))
