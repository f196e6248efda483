"""Where halos move: the exchange points of the compiled programs, by layer. Nothing is computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from engines.errors import ImageError, PlanError
from engines.images.picture import Picture
from engines.layer.graph import ModelGraph, Node, TensorSpec
from engines.layout import StageRanks
from engines.plan import Plan
from engines.program.compile import Compiler
from engines.program.instructions import Compute, Exchange, LocalOp
from engines.program.program import Program
from engines.spatial.moves import Move, compute_moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import compute_halo_widths
from engines.training import Recipe, prepare
from mpi4dl_nb.draw.figure import format_bytes, format_size

__all__ = ["HaloPoint", "find_exchange_points", "find_halo_points", "find_point", "resolve_graph", "with_whole_windows"]


@dataclass(frozen=True)
class HaloPoint:
    """What the operators `readers` of a stage read beyond each rank's own tile, and where that comes from.

    `exchanges` holds the instruction of each rank that lends or borrows; where halos are fused, `computed` is instead
    what each rank has of the value by computing it itself. Pixels are those of the value that the readers read, of
    shape `spec` and with rows and columns at `axes`, which may be smaller than the picture.
    """

    readers: tuple[Node, ...]
    stage: int
    ranks: StageRanks
    spec: TensorSpec
    axes: tuple[int, int] = (-2, -1)
    exchanges: Mapping[int, Exchange] = field(default_factory=dict)
    computed: Mapping[int, Tile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The user's module, or the operator where there is none."""
        return (self.readers[0].module or self.readers[0].name) if self.readers else "the picture"

    @property
    def operator(self) -> str:
        """`aten.conv2d.default` -> `conv2d`."""
        return self.readers[0].operator.split(".")[1]

    @property
    def reads_image(self) -> bool:
        """Whether the value is the image itself."""
        sources = {exchange.source for exchange in self.exchanges.values()}
        return not self.readers or "images" in sources

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the value for the whole image."""
        rows, cols = self.axes
        return self.spec.shape[rows], self.spec.shape[cols]

    @property
    def numbers(self) -> dict[int, int]:
        """The tile number of each rank of the stage."""
        return {rank: number for number, rank in enumerate(self.ranks.ranks)}

    @property
    def tiles(self) -> dict[int, Tile]:
        """What each rank of the stage owns."""
        return dict(zip(self.ranks.ranks, self.ranks.grid.cut(*self.size_px), strict=True))

    def get_receives(self, rank: int) -> tuple[Move, ...]:
        """What arrives at a rank."""
        return self.exchanges[rank].receives if rank in self.exchanges else ()

    def get_window(self, rank: int) -> Tile:
        """What the readers read on a rank: its own pixels, and what it borrows or computes of those of others."""
        borrows = rank in self.exchanges and self.exchanges[rank].window
        return borrows or self.computed.get(rank) or self.tiles[rank]

    def find_redundant_moves(self, rank: int) -> tuple[Move, ...]:
        """What a rank computes though another rank, the move's source, owns it: nothing travels."""
        if rank not in self.computed:
            return ()
        return tuple(move for move in compute_moves(self.tiles, {rank: self.computed[rank]}) if move.source != rank)

    def get_fill(self, rank: int) -> float | None:
        """What a rank reads beyond the image's edge; None where its window ends before."""
        inside = self.get_window(rank).is_inside(Tile.whole(*self.size_px))
        return None if inside or rank not in self.exchanges else self.exchanges[rank].fill

    def count_bytes(self, moves: Sequence[Move]) -> int:
        """What travels with these moves, for the whole batch and all channels."""
        return next(iter(self.exchanges.values())).compute_bytes(moves) if moves else 0

    def describe_move(self, move: Move, end: str = " ") -> str:
        """`from rank 1: 256 × 1 px, 3.0 KB`."""
        size = f"{format_size(move.tile.shape)} px,"
        return end.join((f"from rank {move.source}:", size, format_bytes(self.count_bytes([move]))))

    def compute_widths(self, rank: int) -> dict[str, int]:
        """Pixels that a rank borrows above, below, left and right of its tile."""
        own, reads = self.tiles[rank], self.get_window(rank)
        above, below = compute_halo_widths(own.rows, reads.rows, self.size_px[0])
        left, right = compute_halo_widths(own.cols, reads.cols, self.size_px[1])
        return {"above": above, "below": below, "left": left, "right": right}


def resolve_graph(model: nn.Module | Recipe | ModelGraph, picture: Picture, plan: Plan) -> ModelGraph:
    """The model's graph at the picture's size.

    Raises ImageError where it was traced before, at another size.
    """
    if isinstance(model, nn.Module):
        model = prepare(model, plan, (plan.parts * plan.local_dp, 3, *picture.shape()))
    graph = model.graph if isinstance(model, Recipe) else model
    size_px = graph.inputs["images"].shape[-2:]
    if size_px != picture.shape():
        raise ImageError(
            f"The model was traced for images of {size_px[0]} x {size_px[1]} px, but {picture.name} has "
            f"{picture.shape()[0]} x {picture.shape()[1]}. Prepare it at that size, or pass the model itself."
        )
    return graph


def find_halo_points(graph: ModelGraph, plan: Plan) -> tuple[HaloPoint, ...]:
    """Every exchange of halos in one forward pass, in order."""
    return tuple(find_exchange_points(Compiler(graph, with_whole_windows(plan))))


def with_whole_windows(plan: Plan) -> Plan:
    """The same messages, and windows in one piece."""
    return replace(plan, overlap_halos=False)


def find_exchange_points(compiler: Compiler) -> Iterator[HaloPoint]:
    """The same, from a compiler that is kept for more."""
    for stage, ranks in enumerate(compiler.layout.stages):
        if len(ranks.ranks) > 1:
            yield from _find_stage_points(
                compiler.graph, stage, ranks, [compiler.compile_rank(rank) for rank in ranks.ranks]
            )


def _find_stage_points(
    graph: ModelGraph, stage: int, ranks: StageRanks, programs: Sequence[Program]
) -> Iterator[HaloPoint]:
    nodes = {node.name: node for node in graph.nodes}
    met: dict[int, dict[int, Exchange]] = {}
    readers: dict[int, dict[str, Node]] = {}
    for program in programs:
        for item in program.forward:
            if isinstance(item, Exchange) and item.purpose == "halo":
                met.setdefault(item.tag, {})[program.rank] = item
                found = _find_readers(program, item.target, nodes)
                readers.setdefault(item.tag, {}).update({node.name: node for node in found})
    for tag in sorted(met):
        any_rank = next(iter(met[tag].values()))
        spec = TensorSpec(any_rank.shape, any_rank.dtype)
        yield HaloPoint(tuple(readers[tag].values()), stage, ranks, spec, any_rank.axes or (-2, -1), met[tag])


def _find_readers(program: Program, name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """The operators that read a value, directly or padded."""
    segments = (item for item in program.forward if isinstance(item, Compute) and name in item.inputs)
    for segment in segments:
        yield from _find_op_readers(segment.ops, name, nodes)


def _find_op_readers(ops: Sequence[LocalOp], name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    for op in ops:
        if name in op.reads:
            if op.out in nodes:
                yield nodes[op.out]
            else:
                yield from _find_op_readers(ops, op.out, nodes)


def find_point(points: Sequence[HaloPoint], layer: str | int | None) -> HaloPoint:
    """The point of a layer: a module (or one around it), an operator's name, a number, or None for the first.

    Raises PlanError where that layer borrows nothing.
    """
    if not points:
        raise PlanError("No layer borrows a halo under this plan. Use more tiles, or leave the model out.")
    if isinstance(layer, int) and not 0 <= layer < len(points):
        raise PlanError(f"layer={layer}, but {len(points)} layers borrow halos: use 0 to {len(points) - 1}.")
    if isinstance(layer, str):
        return _find_named(points, layer)
    return points[layer or 0]


def _find_named(points: Sequence[HaloPoint], layer: str) -> HaloPoint:
    for point in points:
        if any(layer == node.name or f"{node.module}.".startswith(f"{layer}.") for node in point.readers):
            return point
    some = ", ".join(dict.fromkeys(point.name for point in points[:6]))
    raise PlanError(
        f"layer={layer!r} borrows no halo: it is not in a spatial stage, or its outputs read their own pixel "
        f"only. {len(points)} layers do; the first are {some}."
    )
