"""Which part of a whole value a rank's tensor is, as needed to draw it or to reassemble the value from its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.steps import StepLabel
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.places import compute_local_shape, to_places
from mpi4dl_nb.engines.geometry.tiles import Axes, Depth, Plane, Span, Tile, guess_pixel_axes
from mpi4dl_nb.engines.graph.model_graph import Ref
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.program import Program


@dataclass(frozen=True, slots=True)
class Shard:
    """The value `name` on one rank: of the whole micro-batch's `shape` it holds `held`.

    `held` may extend beyond the image. `own` is the part it owns. `axes` are the rows and columns, none if the value
    has no pixels. `images` are the images that it holds, None for all. `module` is the module that made the value.
    `split_shape` is the shape in which rows and columns are dimensions, if the value merges them with others. Of a
    volume, `cut` chooses one plane, at `depth`.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    held: Tile
    own: Tile
    images: Span | None
    module: str = ""
    split_shape: tuple[int, ...] | None = None
    depth: Depth | None = None

    @property
    def title(self) -> str:
        """The name for display: `relu_2 (block.after)`, or the window of it."""
        name, window, _ = self.name.partition(".window")
        label = f"{'window of ' * bool(window)}{name.removesuffix('.split')}"
        return label + (f" ({self.module})" if self.module else "")

    @property
    def size_px(self) -> tuple[int, ...]:
        """Height and width of the whole value."""
        return tuple((self.split_shape or self.shape)[axis] for axis in self.axes)

    @property
    def held_shape(self) -> tuple[int, ...] | None:
        """The shape in which the rank's tensor has rows and columns as dimensions, if it is not its own."""
        if self.split_shape is None:
            return None
        return compute_local_shape(self.split_shape, to_places(self.axes), self.held)

    @property
    def plane(self) -> Plane:
        """What can be drawn of it."""
        if self.axes:
            return Plane(self.images, self.axes, self.held, self.size_px[0], self.depth)
        shared = () if self.images is None else (self.images,)
        return Plane.of(self.shape, (-len(self.shape),) * len(shared), Tile(*shared))

    def cut(self, share: float) -> Shard:
        """Return the plane at a share of the depth of a volume; it holds nothing if the rank has not got that plane.

        Anything else is returned as it is.
        """
        if len(self.axes) != 3:
            return self
        at = min(int(share * self.size_px[0]), self.size_px[0] - 1)
        held, own = (Tile(*tile[1:]) if at in tile[0] else Tile(*[Span(0, 0)] * 2) for tile in (self.held, self.own))
        return replace(self, axes=self.axes[1:], held=held, own=own, depth=Depth(self.axes[0], at, self.held[0].start))

    @property
    def whole_plane(self) -> Tile:
        """The rows and columns that are drawn of the whole value."""
        return Tile.whole(*self.size_px) if self.axes else Plane.of(self.shape, (), Tile()).tile


class ShardIndex:
    """The values on all ranks of a plan; `programs` are those that `compiler` makes."""

    def __init__(self, compiler: Compiler, programs: Sequence[Program]) -> None:
        self.compiler, self.programs = compiler, programs
        self.modules = {node.name: node.module for node in compiler.graph.nodes}

    def find_shard(self, rank: int, direction: int, stage: int, name: str) -> Shard | None:
        """Return a rank's part of a value in a stage, or None if the stage has no such value."""
        for role in self.compiler.layout.roles[rank]:
            builder = self.compiler.lowering.get_builder(role)
            if (role.direction, role.stage) != (direction, stage) or name not in builder.values:
                continue
            value, ref = builder.values[name], Ref(name)
            if value.lead:
                continue  # pixels and class tokens in one axis cannot be drawn
            split = value.split()
            shape, axes, images = value.spec.shape, split.axes, None
            held = builder.get_held_tiles(ref)[builder.rank] if axes else Tile()
            owned = builder.get_tiles(value.size_px)[builder.rank] if axes else Tile()
            if axes == (-len(shape),):
                (images,), axes = held, ()
            if not axes:
                # The rank holds all pixels, if there are any.
                axes = guess_pixel_axes(shape, len(self.compiler.plan.grids[0]))
                held = owned = Tile.whole(*(shape[axis] for axis in axes))
            module, split_shape = self.modules.get(name.partition(".")[0], ""), split.spec.shape
            return Shard(name, shape, axes, held, owned, images, module, None if value.is_split else split_shape)
        return None

    def find_step_shard(self, rank: int, place: StepLabel) -> Shard | None:
        """Return the shard that a step made, or in backward the one whose gradient it computed; None if there is none.

        Of several values, the largest counts, those with pixels first.
        """
        if place.work is None:
            return None
        effects = place.step.instruction.get_effects(place.step.phase)
        names = effects.makes
        if not names and place.step.phase is Phase.FORWARD:
            names = effects.reads  # all that is sent
        shards = [self.find_shard(rank, place.work.direction, place.work.stage, name) for name in names]
        extents = [extent for extent in shards if extent is not None]
        return max(extents, key=lambda extent: (bool(extent.axes), math.prod(extent.shape)), default=None)

    def find_shards(self, micro_batch: int, name: str) -> Iterator[tuple[int, Shard]]:
        """Yield (rank, shard) of a micro-batch's value, by its own name or that of the module that makes it.

        Only outputs of segments are kept. A module's name therefore stands for the last of its operators whose result
        is kept.
        """
        for rank, program in enumerate(self.programs):
            direction = program.directions.get(micro_batch)
            if direction is None:
                continue
            way = program.direction_programs[direction]
            for stage, items in way.stages.items():
                ops = ((item, op) for item in items for op in item.local_ops)
                outputs = [
                    op.out
                    for item, op in ops
                    if op.out in item.get_effects(Phase.FORWARD).makes
                    and not op.out.endswith(".split")  # another shape for the value before it
                    and (name == op.out or f"{op.module}.".startswith(f"{name}."))
                ]
                kept = name if name in way.input_shards else outputs[-1] if outputs else None
                if kept and (extent := self.find_shard(rank, direction, stage, kept)) is not None:
                    yield rank, extent


def assemble_shards(parts: Iterable[tuple[Shard, Tensor]], adds: bool) -> Tensor:
    """Return the whole value of a micro-batch from its shards; with `adds`, overlapping gradients are summed.

    Raises PlanError if there are no parts, or a part does not have the shape of its shard.
    """
    whole: Tensor | None = None
    shape: tuple[int, ...] = ()
    for extent, tensor in parts:
        if whole is None:
            whole, shape = tensor.new_zeros(extent.split_shape or extent.shape), extent.shape
        tensor = tensor if extent.held_shape is None else tensor.reshape(extent.held_shape)
        into = whole if extent.images is None else whole[extent.images.start : extent.images.stop]
        if tuple(tensor.shape[axis] for axis in extent.axes) != extent.held.shape:
            raise PlanError(f"{extent.name} has shape {tuple(tensor.shape)}, which is not that of {extent.held}.")
        # A window may extend beyond the image: only what is inside is part of the value.
        inside = extent.held & Tile.whole(*extent.size_px)
        for axis, span, frame in zip(extent.axes, inside, extent.held, strict=True):
            into = into.narrow(axis, span.start, len(span))
            tensor = tensor.narrow(axis, span.start - frame.start, len(span))
        into.add_(tensor) if adds else into.copy_(tensor)
    if whole is None:
        raise PlanError("No rank holds this value now.")
    return whole.reshape(shape)
