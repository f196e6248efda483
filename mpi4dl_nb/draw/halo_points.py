"""Halo exchanges by layer, read from the ranks' compiled programs rather than derived a second time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from mpi4dl_nb.draw.figure import format_size
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.receptive import FieldSpans, ReceptiveField, ReceptiveFields
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.formatting import FactTable, describe_unknown, format_bytes
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Axes, Move, Tile, compute_moves
from mpi4dl_nb.engines.geometry.windows import Shift, compute_halo_widths, compute_window
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout, Role, StageRanks
from mpi4dl_nb.engines.program.effects import LocalOp, select_kind
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import Recipe, prepare


class Shown(Protocol):
    """What is drawn in tiles: a picture, or a volume or signal in memory."""

    name: str
    channels: int
    microns_per_px: float | None

    def shape(self) -> tuple[int, ...]:
        """Return the sizes along the sharded axes: rows and columns of a picture."""


@dataclass(frozen=True, repr=False)
class HaloPoint(FactTable):
    """The pixels that the operators `readers` of a stage read beyond each rank's own tile, and their sources.

    `exchanges` holds the instruction of each rank that sends or receives. With fused halos, `computed` holds instead
    the window of each rank, which the rank has computed itself. Pixels are those of the value that the readers read,
    with shape `spec` and rows and columns at `axes`. The value may be smaller than the picture.
    """

    readers: tuple[Node, ...]
    stage: int
    ranks: StageRanks
    spec: TensorSpec
    axes: Axes = (-2, -1)
    exchanges: Mapping[int, Exchange] = field(default_factory=dict)
    computed: Mapping[int, Tile] = field(default_factory=dict)

    caption = "Halo exchange"

    @property
    def unit(self) -> str:
        """The unit of rows and columns."""
        return "px of this layer" if self.readers else "px"

    @property
    def halo_words(self) -> str:
        """What the halo is called in a legend."""
        return "halo: what this tile borrows"

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the sharded axes: planes, rows and columns."""
        return AXIS_NAMES[-len(self.sizes) :]

    @property
    def facts(self) -> dict[str, object]:
        moves = [move for rank in self.ranks.ranks for move in self.get_receives(rank)]
        return {
            "layer": self.name,
            "stage": f"{self.stage}, in {self.ranks.grid} tiles",
            "value": f"{format_size(self.sizes)} px",
            "halos": f"{len(moves)} messages, {format_bytes(self.count_bytes(moves))}",
        }

    @property
    def name(self) -> str:
        """The name of the user's module, or of the operator if it belongs to none."""
        return (self.readers[0].module or self.readers[0].name) if self.readers else "the picture"

    @property
    def operator(self) -> str:
        """The short name of the operator: `aten.conv2d.default` -> `conv2d`."""
        return self.readers[0].operator.split(".")[1]

    @property
    def reads_image(self) -> bool:
        """Whether the value is the image itself."""
        return not self.readers or any(exchange.source == "images" for exchange in self.exchanges.values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the whole value along the sharded axes."""
        return self.spec.get_sizes(self.axes)

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the value for the whole image. Raises PlanError for a volume or a signal."""
        return Tile.whole(*self.sizes).size_px

    @property
    def pixel_bytes(self) -> int:
        """The bytes of one pixel, with all channels and images of the value."""
        return self.spec.bytes // math.prod(self.sizes)

    @property
    def numbers(self) -> dict[int, int]:
        """The tile number of each rank of the stage."""
        return {rank: tile_number for tile_number, rank in enumerate(self.ranks.ranks)}

    @property
    def tiles(self) -> dict[int, Tile]:
        """The tile that each rank of the stage owns."""
        return dict(zip(self.ranks.ranks, self.ranks.grid.cut(*self.sizes), strict=True))

    def is_in(self, module: str) -> bool:
        """Return whether a reader belongs to a module, or to one that it contains."""
        return any(f"{node.module}.".startswith(f"{module}.") for node in self.readers)

    def _check_rank(self, rank: int) -> None:
        if rank not in self.numbers:
            ranks = ", ".join(map(str, self.numbers))
            raise PlanError(f"rank={rank} is none of the ranks of stage {self.stage}. Use one of {ranks}.")

    def get_receives(self, rank: int) -> tuple[Move, ...]:
        """Return the moves that a rank receives. Raises PlanError if the rank is none of the stage."""
        self._check_rank(rank)
        return self.exchanges[rank].receives if rank in self.exchanges else ()

    def get_window(self, rank: int) -> Tile:
        """Return the window of a rank: its own pixels, and those of other ranks that it borrows or computes itself.

        Raises PlanError if the rank is none of the stage.
        """
        self._check_rank(rank)
        # A rank that only sends takes part in an exchange, but has no window: it reads its own tile.
        borrows = rank in self.exchanges and self.exchanges[rank].window
        return borrows or self.computed.get(rank) or self.tiles[rank]

    def find_redundant_moves(self, rank: int) -> tuple[Move, ...]:
        """Return the pixels that a rank computes redundantly. A move's source owns them, but sends nothing."""
        if rank not in self.computed:
            return ()
        return tuple(move for move in compute_moves(self.tiles, {rank: self.computed[rank]}) if move.source != rank)

    def find_halo(self, rank: int) -> tuple[Move, ...]:
        """Return the pixels of other ranks that a rank reads, whether it borrows them or computes them itself."""
        return (*self.get_receives(rank), *self.find_redundant_moves(rank))

    def get_fill(self, rank: int) -> float | None:
        """Return the fill that a rank reads beyond the image's edge; None if its window stays inside."""
        inside = self.get_window(rank).is_inside(Tile.whole(*self.sizes))
        return None if inside or rank not in self.exchanges else self.exchanges[rank].fill

    def count_bytes(self, moves: Sequence[Move]) -> int:
        """Return the bytes of these moves, with all channels and images of the value."""
        # Any rank's instruction will do: a pixel of the value has the same channels and images on all of them.
        return next(iter(self.exchanges.values())).compute_bytes(moves) if moves else 0

    @property
    def verb(self) -> str:
        """What happens to the pixels of other tiles."""
        return "computed twice" if self.computed else "borrowed"

    @property
    def owner_form(self) -> str:
        """The form of a label of such pixels, for the rank that owns them."""
        return "computed,\nof rank {}" if self.computed else "borrowed\nfrom rank {}"

    def describe_total(self, rank: int) -> str:
        """Return a text such as `borrows 3.0 KB`."""
        pieces = self.get_receives(rank)
        return f"borrows {format_bytes(self.count_bytes(pieces)) if pieces else 'nothing'}"

    def describe_move(self, move: Move, end: str = " ") -> str:
        """Return a text such as `from rank 1: 256 × 1 px, 3.0 KB`, with `end` between its parts."""
        size = f"{format_size(move.tile.shape)} px,"
        return end.join((f"from rank {move.source}:", size, format_bytes(self.count_bytes([move]))))

    def compute_widths(self, rank: int) -> dict[str, int]:
        """Return a tile's halo widths in pixels, without the fill, by side: `above`, `below`, `left` and `right`.

        A volume has `before` and `behind`, too, and a signal only `left` and `right`. Raises PlanError if the rank is
        none of the stage.
        """
        widths = self.compute_axis_widths(rank)
        named = zip(_SIDES[-len(widths) :], widths, strict=True)
        return {name: px for names, pair in named for name, px in zip(names, pair, strict=True)}

    def compute_axis_widths(self, rank: int) -> list[tuple[int, int]]:
        """Return these widths axis by axis, before and behind the tile."""
        window = self.get_window(rank)
        spans = zip(self.tiles[rank], window, self.sizes, strict=True)
        return [compute_halo_widths(own, reads, size) for own, reads, size in spans]


_SIDES = (("before", "behind"), ("above", "below"), ("left", "right"))
"""The names of both sides along the axes of a volume: planes, rows and columns."""


def choose_borrower(point: HaloPoint) -> int:
    """Return the number of the tile that reads pixels of most others; the first of several."""
    return point.numbers[max(point.ranks.ranks, key=lambda rank: len(point.find_halo(rank)))]


def resolve_graph(model: nn.Module | Recipe | ModelGraph, picture: Shown, plan: Plan) -> ModelGraph:
    """Return the model's graph, traced at the picture's size if `model` is a module.

    Raises ImageError if the model was traced at another size.
    """
    if isinstance(model, nn.Module):
        model = prepare(model, plan, (plan.parts * plan.local_dp, picture.channels, *picture.shape()))
    graph = model.graph if isinstance(model, Recipe) else model
    size_px = graph.inputs["images"].shape[2:]
    if size_px != picture.shape():
        raise ImageError(
            f"The model was traced for images of {' x '.join(map(str, size_px))} px, but {picture.name} has "
            f"{' x '.join(map(str, picture.shape()))}. Prepare it at that size, or pass the model itself."
        )
    return graph


def find_halo_points(graph: ModelGraph, plan: Plan) -> tuple[HaloPoint, ...]:
    """Return every halo exchange of one forward pass, in order.

    >>> from mpi4dl_nb import Plan, Sizes, find_halo_points, resnet20_v1
    >>> plan = Plan(split_size=1, slice_method="1x2")
    >>> points = find_halo_points(Sizes(resnet20_v1()).graph(plan, (1, 3, 32, 32)), plan)
    >>> points[0].size_px, points[0].compute_widths(rank=0)
    ((32, 32), {'above': 0, 'below': 0, 'left': 0, 'right': 1})
    """
    return tuple(_find_exchange_points(_make_compiler(graph, plan)))


def _make_compiler(graph: ModelGraph, plan: Plan) -> Compiler:
    # Without overlapped halos: the same messages, but one `Exchange` with the whole window for each.
    return Compiler(graph, replace(plan, overlap_halos=False))


def _find_exchange_points(compiler: Compiler) -> Iterator[HaloPoint]:
    nodes = {node.name: node for node in compiler.graph.nodes}
    for stage, ranks in enumerate(compiler.layout.stages):
        if len(ranks.ranks) == 1:
            continue
        # The instructions of one exchange on all ranks share its tag. A rank may take part in some exchanges only, as
        # the middle tile of three may borrow where the outer ones do not.
        met: dict[int, dict[int, Exchange]] = {}
        readers: dict[int, dict[str, Node]] = {}
        for program in map(compiler.compile_rank, ranks.ranks):
            # Of the direction and the stage whose ranks these are: a rank may have other tiles in others.
            way = program.direction_programs[0]
            ops_of = {item.name: item.local_ops for item in way.stages[stage]}
            for item in select_kind(way.stages[stage], Exchange):
                if item.kind != "halo":
                    continue
                met.setdefault(item.tag, {})[program.rank] = item
                ops = [op for reader in way.reads.get(item.target, ()) for op in ops_of.get(reader, ())]
                operators = _find_readers(ops, item.target, nodes)
                readers.setdefault(item.tag, {}).update({node.name: node for node in operators})
        for tag in sorted(met):
            any_rank = next(iter(met[tag].values()))
            spec = TensorSpec(any_rank.shape, any_rank.dtype)
            yield HaloPoint(tuple(readers[tag].values()), stage, ranks, spec, any_rank.axes, met[tag])


def _find_readers(ops: Sequence[LocalOp], name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """Yield the operators that read a value, directly or after padding."""
    for op in ops:
        if name in op.reads:
            if op.out in nodes:
                yield nodes[op.out]
            else:
                # The output is no value of the graph (such as a padded copy): follow it to its readers. What an
                # operator makes for a later segment of its own has none here; it is called after the operator.
                readers = list(_find_readers(ops, op.out, nodes))
                operator = nodes.get(op.out.partition(".")[0])
                yield from readers or filter(None, [operator])


def find_point(points: Sequence[HaloPoint], layer: str | int | None) -> HaloPoint:
    """Return the point of a layer: a module (or one that contains it), an operator's name, a number, None: the first.

    Raises PlanError if that layer borrows nothing.
    """
    if not points:
        raise PlanError("No layer borrows a halo under this plan. Use more tiles, or leave the model out.")
    if isinstance(layer, int) and not 0 <= layer < len(points):
        raise PlanError(f"layer={layer}, but {len(points)} layers borrow halos: use 0 to {len(points) - 1}.")
    if not isinstance(layer, str):
        return points[layer or 0]
    for point in points:
        if point.is_in(layer) or layer in {node.name for node in point.readers}:
            return point
    problem = (
        f"layer={layer!r} borrows no halo: it does not exist, is not in a spatial stage, or its outputs read their own "
        "pixel only"
    )
    raise PlanError(describe_unknown(problem, layer, [point.name for point in points]))


def find_layer_of(points: Sequence[HaloPoint], label: str, otherwise: int = 0) -> int:
    """Return the index of the first layer in a module; `otherwise` if there is none.

    `label` is the module's name, or that of an instruction (`blocks.6.branch.0 … 1`), which begins with it.
    """
    module = label.split(" ", maxsplit=1)[0]
    return next((index for index, point in enumerate(points) if module and point.is_in(module)), otherwise)


def find_rank_layer(points: Sequence[HaloPoint], rank: int, layer: int) -> int:
    """Return `layer` if it is on the rank or no layer is, else the first layer that is on the rank."""
    if rank in points[layer].ranks.ranks:
        return layer
    return next((index for index, point in enumerate(points) if rank in point.ranks.ranks), layer)


def _find_fused_points(compiler: Compiler) -> Iterator[HaloPoint]:
    """Yield the layers that read pixels which ranks computed beyond their tiles.

                 own tile
               |<-------->|
             held (extended)          a fused group computes it on every rank, so that its layers need no exchange
        |<---------------------->|
           window of this layer
          |<----------------->|       inside held: no exchange, a point of its own here
    |<---------------------------->|  exceeds held: an exchange comes first, which `_find_exchange_points` finds
    """
    nodes = {node.name: node for node in compiler.graph.nodes}
    for stage, ranks in enumerate(compiler.layout.stages):
        builder = compiler.lowering.get_builder(Role(stage, 0))
        met: dict[tuple[str, tuple[Tile, ...]], HaloPoint] = {}
        for read in builder.reads:
            extended = builder.extended.held.get(read.value)
            if extended is None or set(read.rules) == {Shift(0)}:  # each output reads its own pixel only
                continue
            whole, tiles = builder.get_image_tiles(read.value)
            outputs = builder.extended.held.get(read.node) or builder.get_image_tiles(read.node)[1]
            wanted = {rank: compute_window(tile, read.rules) & whole for rank, tile in outputs.items()}
            beyond = any(not tile.is_inside(tiles[rank]) for rank, tile in wanted.items())
            if beyond and all(tile.is_inside(extended[rank]) for rank, tile in wanted.items()):
                # Readers with equal windows of a value share a point.
                key, held = (read.value, tuple(wanted.values())), builder.values[read.value].split()
                readers = (*met[key].readers, nodes[read.node]) if key in met else (nodes[read.node],)
                met[key] = HaloPoint(readers, stage, ranks, held.spec, held.axes, computed=wanted)
        yield from met.values()


def with_fused_halos(plan: Plan, layers: int | str | None) -> Plan:
    """Return `plan` with one halo exchange for every `layers` layers (or `auto`), or one before each layer (None)."""
    return replace(plan, halo_d2=layers is not None, fused_layers=1 if layers is None else layers)


class HaloLayers:
    """The layers of a model under a plan, for each number of fused layers. Compiles each variant once."""

    def __init__(self, graph: ModelGraph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.fields = ReceptiveFields(graph)
        self._points: dict[int | str | None, tuple[HaloPoint, ...]] = {}

    def find_points(self, stage: int | None, together: int | str | None = None) -> tuple[HaloPoint, ...]:
        """Return the layers (of one stage) that read beyond their tiles, in the model's order.

        `together` layers share a halo exchange: the first follows it, the others read pixels that each rank computed
        beyond its own tile. None: each has its own. Raises PlanError if the plan does not fit the model.
        """
        if together not in self._points:
            compiler = _make_compiler(self.graph, with_fused_halos(self.plan, together))
            order = {node.name: index for index, node in enumerate(self.graph.nodes)}
            # Two sources: the Exchange instructions of the programs, and what the compiler remembers of fused groups,
            # in whose programs nothing marks where a layer reads beyond its tile.
            points = [*_find_exchange_points(compiler), *_find_fused_points(compiler)]
            points.sort(key=lambda point: min((order[node.name] for node in point.readers), default=0))
            self._points[together] = tuple(points)
        return tuple(point for point in self._points[together] if stage in (None, point.stage))

    def select_points(self, together: int | str | None = None) -> tuple[HaloPoint, ...]:
        """Return all layers, counted without fusion, as they read with `together` fused layers."""
        alone = self.find_points(None)
        # Fusion changes the number of points, so that only the readers' names identify a layer.
        fused = {node.name: point for point in reversed(self.find_points(None, together)) for node in point.readers}
        return tuple(next((fused[node.name] for node in point.readers if node.name in fused), point) for point in alone)

    def get_spans(self, point: HaloPoint) -> tuple[FieldSpans, ...]:
        """Return what of the picture each position of a layer's output depends on, axis by axis.

        Empty if the output has no rows and columns, as that of a layer that flattens.
        """
        node = point.readers[0].name
        return self.fields.get_spans(node) if self.fields.has_pixels(node) else ()

    def compute_field(self, point: HaloPoint, *at: int) -> ReceptiveField:
        """Return the receptive field of one pixel of a layer's output."""
        return self.fields.compute_field(point.readers[0].name, *at)

    def describe_fusion(self, stage: int, tile: int, together: int | str) -> str:
        """Compare the halos of a tile in a forward pass: `13 halos, 196.3 KB (D1), against 4 halos, 238.4 KB (D2)`."""
        descriptions = []
        for name, points in (("D1", self.find_points(stage)), ("D2", self.find_points(stage, together))):
            borrows = [
                point.count_bytes(moves) for point in points if (moves := point.get_receives(point.ranks.ranks[tile]))
            ]
            descriptions.append(f"{len(borrows)} halos, {format_bytes(sum(borrows))} ({name})")
        return f"In a forward pass of this stage, tile {tile} borrows {', against '.join(descriptions)}"


def find_spatial_stages(plan: Plan) -> tuple[int, ...]:
    """Return the stages that are cut into tiles; the first stage if none is."""
    stages = tuple(stage for stage, grid in enumerate(plan.grids) if grid.tiles > 1)
    return stages or (0,)


def get_stage_ranks(plan: Plan, stage: int) -> StageRanks:
    """Return the ranks of a stage. Raises PlanError if there is no such stage, or if it is not cut into tiles."""
    stages = find_spatial_stages(plan)
    if stage not in stages:
        raise PlanError(f"stage={stage} is not cut into tiles: use one of {', '.join(map(str, stages))}.")
    return Layout.of(plan).stages[stage]


def make_picture_point(picture: Shown, plan: Plan, stage: int) -> HaloPoint:
    """Return a point for the picture itself in the tiles of a stage. It has no readers and borrows nothing."""
    ranks = get_stage_ranks(plan, stage)
    # Ranks that share images hold all pixels of theirs: the first stands for all of them.
    ranks = replace(ranks, ranks=ranks.ranks[: ranks.grid.tiles])
    sizes = picture.shape()
    spec = TensorSpec((1, picture.channels, *sizes), plan.held_in)
    return HaloPoint((), stage, ranks, spec, tuple(range(-len(sizes), 0)))
