"""The layers of a stage that read beyond their tiles, with a halo exchange before each (D1) or fused halos (D2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from engines.errors import PlanError
from engines.images.picture import Picture
from engines.layer.graph import ModelGraph, TensorSpec
from engines.layout import Layout, Role, StageRanks
from engines.plan import Plan
from engines.program.builder import Builder
from engines.program.compile import Compiler
from engines.program.receptive import ReceptiveField, ReceptiveFields
from engines.spatial.halo_fusion import WindowRead
from engines.spatial.tiles import Tile
from engines.spatial.windows import Shift, compute_window
from mpi4dl_nb.draw.figure import format_bytes
from mpi4dl_nb.draw.halo_points import HaloPoint, find_exchange_points, find_point, with_whole_windows

__all__ = [
    "HaloLayers",
    "find_layer_points",
    "find_spatial_stages",
    "get_stage_ranks",
    "make_picture_point",
    "with_fused_halos",
]


def find_layer_points(graph: ModelGraph, plan: Plan, stage: int | None = None) -> tuple[HaloPoint, ...]:
    """Return every layer (of one stage) that reads beyond its tile, in the model's order.

    Some follow a halo exchange. With fused halos, the others read pixels that each rank computed beyond its own tile.
    """
    compiler = Compiler(graph, with_whole_windows(plan))
    order = {node.name: number for number, node in enumerate(graph.nodes)}
    # Two sources: the Exchange instructions of the programs, and what the compiler remembers of fused groups, in whose
    # programs nothing marks where a layer reads beyond its tile.
    found = [*find_exchange_points(compiler), *_find_fused_points(compiler)]
    found.sort(key=lambda point: min((order[node.name] for node in point.readers), default=0))
    return tuple(point for point in found if stage in (None, point.stage))


def _find_fused_points(compiler: Compiler) -> Iterator[HaloPoint]:
    nodes = {node.name: node for node in compiler.graph.nodes}
    for stage, ranks in enumerate(compiler.layout.stages):
        builder = compiler.lowering.get_builder(Role(stage, 0))
        met: dict[tuple[str, tuple[Tile, ...]], HaloPoint] = {}
        for read in builder.reads:
            if wanted := _find_windows(builder, read):  # readers with equal windows of a value share a point
                key, held = (read.value, tuple(wanted.values())), builder.values[read.value]
                readers = (*met[key].readers, nodes[read.node]) if key in met else (nodes[read.node],)
                met[key] = HaloPoint(readers, stage, ranks, held.spec, held.axes or (-2, -1), computed=wanted)
        yield from met.values()


def _find_windows(builder: Builder, read: WindowRead) -> Mapping[int, Tile] | None:
    """Return each rank's window if the layer reads pixels that ranks computed beyond their tiles, else None.

                 own tile
               |<-------->|
             held (extended)          a fused group computes it on every rank, so that its layers need no exchange
        |<---------------------->|
           window of this layer
          |<----------------->|       inside held: no exchange, a point of its own here
    |<---------------------------->|  exceeds held: an exchange comes first, which `find_exchange_points` finds
    """
    held = builder.extended.held.get(read.value)
    if held is None or read.rows == read.cols == Shift(0):  # Shift(0): each output reads its own pixel only
        return None
    whole, own = builder.get_image_tiles(read.value)
    outputs = builder.extended.held.get(read.node) or builder.get_image_tiles(read.node)[1]
    wanted = {rank: compute_window(tile, read.rows, read.cols) & whole for rank, tile in outputs.items()}
    beyond = any(not tile.is_inside(own[rank]) for rank, tile in wanted.items())
    return wanted if beyond and all(tile.is_inside(held[rank]) for rank, tile in wanted.items()) else None


def with_fused_halos(plan: Plan, layers: int | str | None) -> Plan:
    """Return `plan` with one halo exchange for every `layers` layers (or `auto`), or one before each layer (None)."""
    return replace(plan, halo_d2=layers is not None, fused_layers=1 if layers is None else layers)


class HaloLayers:
    """The layers of a model under a plan, for each number of fused layers. Compiles each variant once."""

    def __init__(self, graph: ModelGraph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.fields = ReceptiveFields(graph)
        self._points: dict[int | str | None, tuple[HaloPoint, ...]] = {}

    def is_compiled(self, together: int | str | None) -> bool:
        """Return whether the plan with `together` fused layers is compiled. Compiling may take a second."""
        return together in self._points

    def find_points(self, stage: int, together: int | str | None = None) -> tuple[HaloPoint, ...]:
        """Return the layers of a stage that read beyond their tiles.

        `together` layers share a halo exchange; None: each has its own. Raises PlanError if the plan does not fit the
        model.
        """
        if together not in self._points:
            self._points[together] = find_layer_points(self.graph, with_fused_halos(self.plan, together))
        return tuple(point for point in self._points[together] if point.stage == stage)

    def select_point(self, stage: int, number: int, together: int | str | None = None) -> HaloPoint:
        """Return layer `number`, counted without fusion, as it reads with `together` fused layers.

        Raises PlanError if there is no such layer.
        """
        alone = find_point(self.find_points(stage), number)
        if together is None:
            return alone
        # Fusion changes the number of points, so that only the readers' names identify the layer.
        names = {node.name for node in alone.readers}
        found = (each for each in self.find_points(stage, together) if names & {node.name for node in each.readers})
        return next(found, alone)

    def get_output_px(self, point: HaloPoint) -> tuple[int, int]:
        """Return the rows and columns of a layer's output."""
        return self.fields.get_size_px(point.readers[0].name)

    def compute_field(self, point: HaloPoint, row: int, col: int) -> ReceptiveField:
        """Return the receptive field of one pixel of a layer's output."""
        return self.fields.compute_field(point.readers[0].name, row, col)

    def describe_fusion(self, stage: int, tile: int, together: int | str) -> str:
        """Compare the halos of a tile in a forward pass: `13 halos, 196.3 KB (D1), against 4 halos, 238.4 KB (D2)`."""
        told = []
        for name, points in (("D1", self.find_points(stage)), ("D2", self.find_points(stage, together))):
            borrows = [
                point.count_bytes(moves) for point in points if (moves := point.get_receives(point.ranks.ranks[tile]))
            ]
            told.append(f"{len(borrows)} halos, {format_bytes(sum(borrows))} ({name})")
        return f"In a forward pass of this stage, tile {tile} borrows {', against '.join(told)}"


def find_spatial_stages(plan: Plan) -> tuple[int, ...]:
    """Return the stages that are cut into tiles; the first stage if none is."""
    found = tuple(stage for stage, grid in enumerate(plan.grids) if grid.tiles > 1)
    return found or (0,)


def get_stage_ranks(plan: Plan, stage: int) -> StageRanks:
    """Return the ranks of a stage. Raises PlanError if there is no such stage, or if it is not cut into tiles."""
    stages = find_spatial_stages(plan)
    if stage not in stages:
        raise PlanError(f"stage={stage} is not cut into tiles: use one of {', '.join(map(str, stages))}.")
    return Layout.of(plan).stages[stage]


def make_picture_point(picture: Picture, plan: Plan, stage: int) -> HaloPoint:
    """Return a point for the picture itself in the tiles of a stage. It has no readers and borrows nothing."""
    return HaloPoint((), stage, get_stage_ranks(plan, stage), TensorSpec((1, 3, *picture.shape()), plan.held_in))
