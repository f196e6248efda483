"""The values that pass from one stage of the plan to a later one, and the transfers that carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.class_tokens import separate_lead
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import to_places
from mpi4dl_nb.engines.geometry.tiles import Axes, Span, Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Ref, TensorSpec
from mpi4dl_nb.engines.plan.layout import Layout, Role, StageRanks

_PARTS = 2
"""The most transfers of one value: its pixels, and what lies beside them."""


@dataclass(frozen=True, slots=True)
class CrossStageValue:
    """A value made in one stage and read in a later one.

    `travels` is false if the ranks of `target` already have the value from an earlier stage of theirs.
    """

    value: str
    source: int
    target: int
    tag: int
    travels: bool


def find_crossings(graph: ModelGraph, layout: Layout, stage_of: Mapping[str, int]) -> Iterable[CrossStageValue]:
    """Yield the values that are read in a later stage than that which makes them, once for each such stage."""
    pairs = dict.fromkeys(
        (name, stage_of[name], stage_of[node.name])
        for node in graph.nodes
        for name in node.reads
        if name in stage_of and stage_of[name] != stage_of[node.name]
    )
    # `has` records which ranks have a value already, as its makers or from an earlier transfer: it is sent to them
    # once.
    has = {(name, layout.stages[source].ranks) for name, source, _ in pairs}
    for index, (name, source, target) in enumerate(pairs):
        ranks = layout.stages[target].ranks
        yield CrossStageValue(name, source, target, 2 + 2 * _PARTS * index, travels=(name, ranks) not in has)
        has.add((name, ranks))


@dataclass(frozen=True, slots=True)
class _TravellingPart:
    """What one transfer carries: a value in its split form, and the axes along which its target divides it.

    `of_first`: only the first rank of each stage has it.
    """

    value: ValueLayout
    axes: Axes
    of_first: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether source and target divide it along the same axes."""
        return self.axes == self.value.axes


@dataclass
class Crossings:
    """The joints of the stages of a plan. `values` are the layouts of what crosses, as its source divides it.

    `batch` is the number of images of a micro-batch.
    """

    crossings: tuple[CrossStageValue, ...]
    layout: Layout
    batch: int
    values: dict[str, ValueLayout] = field(default_factory=dict)

    @property
    def end_tag(self) -> int:
        """The tag after the last one that transfers between stages use."""
        return 2 + 2 * _PARTS * self.layout.directions * len(self.crossings)

    def send(self, builder: Builder, role: Role) -> None:
        """Add the transfers of what a stage has made for later ones."""
        for crossing in self.crossings:
            if crossing.source == role.stage:
                cropped = builder.crop_to_own(Ref(crossing.value))
                for part in separate_lead(builder, cropped):
                    builder.split_axes(part)
                self._transfer(builder, role, crossing, builder.get_value(cropped))

    def receive(self, builder: Builder, role: Role) -> None:
        """Add the transfers of what a stage reads of earlier ones, and the values."""
        for crossing in self.crossings:
            if crossing.target != role.stage:
                continue
            value = self.values[crossing.value]
            arrives = self._transfer(builder, role, crossing, value)
            pixels = self._list_parts(role, crossing, value)[0]
            if not pixels.is_kept:
                value = replace(value, places=to_places((-len(value.spec.shape),) if pixels.axes else ()))
            builder.values[value.name] = value
            if arrives:
                self._assemble(builder, role, crossing, value)

    def _assemble(self, builder: Builder, role: Role, crossing: CrossStageValue, value: ValueLayout) -> None:
        """Add a value to the target's from its parts, which have arrived in their split form."""
        sent, refs = self.values[crossing.value], []
        for part, layout in zip(self._list_parts(role, crossing, sent), sent.separate(), strict=True):
            if part.of_first and not builder.is_first:
                continue
            builder.values[part.value.name] = replace(part.value, places=to_places(part.axes))
            if part.value.name != layout.name:
                places = layout.places if part.is_kept else value.places
                builder.merge_axes(Ref(part.value.name), replace(layout, places=places))
            refs.append(Ref(layout.name))
        if sent.lead:
            pixels, *beside = refs
            joined = (*beside, pixels), sent.places[0].dim
            builder.add_local_op(value.name, "aten.cat.default", *joined, like=value.spec, axes=value.places)

    def _transfer(self, builder: Builder, role: Role, crossing: CrossStageValue, value: ValueLayout) -> bool:
        """Add the joint of two stages: the transfers of one value from the tiles of one to those of the other.

        It travels in its split form. Returns whether this rank receives any of it.
        """
        if not crossing.travels:
            return False
        arrives = [
            self._transfer_part(builder, role, crossing, part, number)
            for number, part in enumerate(self._list_parts(role, crossing, value))
        ]
        return any(arrives)

    def _transfer_part(
        self, builder: Builder, role: Role, crossing: CrossStageValue, part: _TravellingPart, number: int
    ) -> bool:
        # Both stages compute the same moves from their tiles, without a word between them. For example, from 4 vertical
        # tiles to 2 horizontal ones each source rank sends 2 messages:
        #
        #   | 0 | 1 | 2 | 3 |        |   4   |        4 receives the upper half of each of 0 to 3,
        #   |   |   |   |   |  --->  |-------|
        #   |   |   |   |   |        |   5   |        5 the lower half
        #
        # The axes are those along which either stage divides the value.
        ends = (crossing.source, part.value.axes), (crossing.target, part.axes)
        whole = replace(part.value, places=to_places(dict.fromkeys((*ends[1][1], *ends[0][1]))))
        owned, wanted = (
            {
                rank: _extend_to_axes(tile, axes, whole)
                for rank, tile in cut_value(self._get_stage_ranks(role, stage), whole.spec, axes).items()
            }
            for stage, axes in ends
        )
        if part.of_first:
            wanted = dict(list(wanted.items())[:1])
        # A rank of both stages whose tile does not change receives nothing.
        wanted = {rank: tile for rank, tile in wanted.items() if owned.get(rank) != tile}
        if len(set(owned.values())) == 1:
            owned = dict(list(owned.items())[:1])  # all source ranks hold the same, or the first one alone: it sends
        name = f"{whole.name.removesuffix('.split')}.stage{crossing.source}to{crossing.target}"
        # All micro-batches use this tag: their messages match in the order in which both ranks post them.
        tag = crossing.tag + 2 * number + 2 * _PARTS * role.direction * len(self.crossings)
        builder.transfer(whole, "stage", name, whole.name, tag, owned, wanted)
        return builder.rank in wanted

    def _list_parts(self, role: Role, crossing: CrossStageValue, value: ValueLayout) -> list[_TravellingPart]:
        """Return the parts in which a value travels: its pixels, and what lies beside them.

        The target divides them as its source does, or where its ranks share images, by images.
        """
        pixels, *others = value.separate()
        split = pixels.split()
        source, target = (self._get_stage_ranks(role, stage) for stage in (crossing.source, crossing.target))
        axes = split.axes
        if target.shares > 1 and not (source.shares > 1 and split.axes):
            axes = find_batch_axis(split.spec, self.batch)
            # Positions before the first image belong to no image.
            before = others and value.places[0].dim == -len(value.spec.shape)
            axes = () if before or not set(axes).isdisjoint(split.axes) else axes
        parts = [_TravellingPart(split, axes)]
        for beside in others:
            kept = parts[0].is_kept
            by_image = () if kept or not axes else find_batch_axis(beside.spec, self.batch)
            parts.append(_TravellingPart(beside, by_image, of_first=kept))
        return parts

    def _get_stage_ranks(self, role: Role, stage: int) -> StageRanks:
        """Return the ranks of a stage in the replica and direction of `role`."""
        return self.layout.get_pipeline(role).stages[stage]


def find_batch_axis(spec: TensorSpec, divisor: int) -> Axes:
    """Return the first axis of a value if its size is a multiple of `divisor`, as that of images is, else ()."""
    # Any axis may be divided, and rules see to what follows: an axis that is none of images costs time or is refused.
    return (-len(spec.shape),) if spec.shape and spec.shape[0] % divisor == 0 else ()


def cut_value(stage: StageRanks, spec: TensorSpec, axes: Axes) -> dict[int, Tile]:
    """Return the tile that each rank of a stage has of a value that the stage divides along `axes`."""
    tiles = stage.parts.cut(*spec.get_sizes(axes)) if axes else [Tile()] * len(stage.ranks)
    return dict(zip(stage.ranks, tiles, strict=True))


def _extend_to_axes(tile: Tile, axes: Axes, value: ValueLayout) -> Tile:
    """Return a tile, given along `axes`, along those of `value`."""
    spans = dict(zip(axes, tile, strict=True))
    return Tile(*(spans.get(axis, Span(0, value.spec.shape[axis])) for axis in value.axes))
