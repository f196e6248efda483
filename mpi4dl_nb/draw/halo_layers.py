"""The layers of a stage that read beyond their tiles: with halos before each of them (D1), or fused (D2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from engines.errors import PlanError
from engines.images.picture import Picture
from engines.layer.graph import ModelGraph, Node, TensorSpec
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
    """Every layer (of one stage) that reads beyond its tile, in the model's order.

    Before some of them halos travel. With fused halos, others read what each rank has computed beyond its own tile.
    """
    compiler = Compiler(graph, with_whole_windows(plan))
    order = {node.name: number for number, node in enumerate(graph.nodes)}
    found = [*find_exchange_points(compiler), *_find_fused_points(compiler)]
    found.sort(key=lambda point: min((order[node.name] for node in point.readers), default=0))
    return tuple(point for point in found if stage in (None, point.stage))


def _find_fused_points(compiler: Compiler) -> Iterator[HaloPoint]:
    nodes = {node.name: node for node in compiler.graph.nodes}
    for stage, ranks in enumerate(compiler.layout.stages):
        builder = compiler.lowering.get_builder(Role(stage, 0))
        met: dict[tuple[str, tuple[Tile, ...]], HaloPoint] = {}
        for read in builder.reads:
            if wanted := _find_windows(builder, read):
                key = read.value, tuple(wanted.values())
                readers = (*met[key].readers, nodes[read.node]) if key in met else (nodes[read.node],)
                met[key] = _make_point(builder, readers, (stage, ranks), read.value, wanted)
        yield from met.values()


def _find_windows(builder: Builder, read: WindowRead) -> Mapping[int, Tile] | None:
    """The windows of a layer that reads what each rank computed beyond its tile; None of any other layer."""
    held = builder.extended.held.get(read.value)
    if held is None or read.rows == read.cols == Shift(0):
        return None
    whole, own = builder.get_image_tiles(read.value)
    outputs = builder.extended.held.get(read.node) or builder.get_image_tiles(read.node)[1]
    wanted = {rank: compute_window(tile, read.rows, read.cols) & whole for rank, tile in outputs.items()}
    beyond = any(not tile.is_inside(own[rank]) for rank, tile in wanted.items())
    return wanted if beyond and all(tile.is_inside(held[rank]) for rank, tile in wanted.items()) else None


def _make_point(
    builder: Builder, readers: tuple[Node, ...], where: tuple[int, StageRanks], value: str, wanted: Mapping[int, Tile]
) -> HaloPoint:
    held = builder.values[value]
    return HaloPoint(readers, *where, held.spec, held.axes or (-2, -1), computed=wanted)


def with_fused_halos(plan: Plan, layers: int | str | None) -> Plan:
    """The same plan with halos exchanged once for so many layers (`auto`), or before each of them (None)."""
    return replace(plan, halo_d2=layers is not None, fused_layers=1 if layers is None else layers)


class HaloLayers:
    """The layers of a model under a plan, with an exchange before each or with fused ones; each is compiled once."""

    def __init__(self, graph: ModelGraph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.fields = ReceptiveFields(graph)
        self._points: dict[int | str | None, tuple[HaloPoint, ...]] = {}

    def is_compiled(self, together: int | str | None) -> bool:
        """Whether they were compiled before with so many layers fused: if not, that may take a second."""
        return together in self._points

    def find_points(self, stage: int, together: int | str | None = None) -> tuple[HaloPoint, ...]:
        """The layers of a stage that read beyond their tiles; `together` layers share an exchange, None: each has one.

        Raises PlanError where the plan does not fit the model.
        """
        if together not in self._points:
            self._points[together] = find_layer_points(self.graph, with_fused_halos(self.plan, together))
        return tuple(point for point in self._points[together] if point.stage == stage)

    def select_point(self, stage: int, number: int, together: int | str | None = None) -> HaloPoint:
        """One layer, numbered as they are without fusion; with it, what the same layer reads then.

        Raises PlanError where there is no such layer.
        """
        alone = find_point(self.find_points(stage), number)
        if together is None:
            return alone
        names = {node.name for node in alone.readers}
        found = (each for each in self.find_points(stage, together) if names & {node.name for node in each.readers})
        return next(found, alone)

    def get_output_px(self, point: HaloPoint) -> tuple[int, int]:
        """Rows and columns of what a layer makes."""
        return self.fields.get_size_px(point.readers[0].name)

    def compute_field(self, point: HaloPoint, row: int, col: int) -> ReceptiveField:
        """The receptive field of one pixel of what a layer makes."""
        return self.fields.compute_field(point.readers[0].name, row, col)

    def describe_fusion(self, stage: int, tile: int, together: int | str) -> str:
        """What a forward pass brings a tile: `13 halos, 196.3 KB (D1), against 4 halos, 238.4 KB (D2)`."""
        told = []
        for name, points in (("D1", self.find_points(stage)), ("D2", self.find_points(stage, together))):
            borrows = [
                point.count_bytes(moves) for point in points if (moves := point.get_receives(point.ranks.ranks[tile]))
            ]
            told.append(f"{len(borrows)} halos, {format_bytes(sum(borrows))} ({name})")
        return f"In a forward pass of this stage, tile {tile} borrows {', against '.join(told)}"


def find_spatial_stages(plan: Plan) -> tuple[int, ...]:
    """The stages that are cut into tiles; the first one where none is."""
    found = tuple(stage for stage, grid in enumerate(plan.grids) if grid.tiles > 1)
    return found or (0,)


def get_stage_ranks(plan: Plan, stage: int) -> StageRanks:
    """The ranks of a stage. Raises PlanError where it is none, or is not cut into tiles."""
    stages = find_spatial_stages(plan)
    if stage not in stages:
        raise PlanError(f"stage={stage} is not cut into tiles: use one of {', '.join(map(str, stages))}.")
    return Layout.of(plan).stages[stage]


def make_picture_point(picture: Picture, plan: Plan, stage: int) -> HaloPoint:
    """The picture itself in the tiles of a stage, of which nothing is borrowed."""
    return HaloPoint((), stage, get_stage_ranks(plan, stage), TensorSpec((1, 3, *picture.shape()), plan.held_in))
