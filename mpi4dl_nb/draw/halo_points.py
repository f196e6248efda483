"""Halo exchanges by layer, read from the ranks' compiled programs rather than derived a second time."""

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
from engines.spatial.moves import Move, compute_moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import compute_halo_widths
from engines.training import Recipe, prepare
from mpi4dl_nb.draw.figure import format_bytes, format_size

__all__ = ["HaloPoint", "find_exchange_points", "find_halo_points", "find_point", "resolve_graph", "with_whole_windows"]


@dataclass(frozen=True)
class HaloPoint:
    """The pixels that the operators `readers` of a stage read beyond each rank's own tile, and their sources.

    `exchanges` holds the instruction of each rank that sends or receives. With fused halos, `computed` holds instead
    the window of each rank, which the rank has computed itself. Pixels are those of the value that the readers read,
    with shape `spec` and rows and columns at `axes`. The value may be smaller than the picture.
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
        """The name of the user's module, or of the operator if it belongs to none."""
        return (self.readers[0].module or self.readers[0].name) if self.readers else "the picture"

    @property
    def operator(self) -> str:
        """The short name of the operator: `aten.conv2d.default` -> `conv2d`."""
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
        """The tile that each rank of the stage owns."""
        return dict(zip(self.ranks.ranks, self.ranks.grid.cut(*self.size_px), strict=True))

    def get_receives(self, rank: int) -> tuple[Move, ...]:
        """Return the moves that a rank receives."""
        return self.exchanges[rank].receives if rank in self.exchanges else ()

    def get_window(self, rank: int) -> Tile:
        """Return the window of a rank: its own pixels, and those of other ranks that it borrows or computes itself."""
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
        inside = self.get_window(rank).is_inside(Tile.whole(*self.size_px))
        return None if inside or rank not in self.exchanges else self.exchanges[rank].fill

    def count_bytes(self, moves: Sequence[Move]) -> int:
        """Return the bytes of these moves, with all channels and images of the value."""
        # Any rank's instruction will do: a pixel of the value has the same channels and images on all of them.
        return next(iter(self.exchanges.values())).compute_bytes(moves) if moves else 0

    def describe_move(self, move: Move, end: str = " ") -> str:
        """Return a text such as `from rank 1: 256 × 1 px, 3.0 KB`, with `end` between its parts."""
        size = f"{format_size(move.tile.shape)} px,"
        return end.join((f"from rank {move.source}:", size, format_bytes(self.count_bytes([move]))))

    def compute_widths(self, rank: int) -> dict[str, int]:
        """Return a tile's halo widths in pixels, without the fill: `above`, `below`, `left` and `right`."""
        own, reads = self.tiles[rank], self.get_window(rank)
        above, below = compute_halo_widths(own.rows, reads.rows, self.size_px[0])
        left, right = compute_halo_widths(own.cols, reads.cols, self.size_px[1])
        return {"above": above, "below": below, "left": left, "right": right}


def resolve_graph(model: nn.Module | Recipe | ModelGraph, picture: Picture, plan: Plan) -> ModelGraph:
    """Return the model's graph, traced at the picture's size if `model` is a module.

    Raises ImageError if the model was traced at another size.
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
    """Return every halo exchange of one forward pass, in order."""
    return tuple(find_exchange_points(Compiler(graph, with_whole_windows(plan))))


def with_whole_windows(plan: Plan) -> Plan:
    """Return `plan` without overlapped halos: the same messages, but one `Exchange` with the whole window for each."""
    return replace(plan, overlap_halos=False)


def find_exchange_points(compiler: Compiler) -> Iterator[HaloPoint]:
    """Yield every halo exchange of the plan of `compiler`, in order. The compiler can be reused."""
    nodes = {node.name: node for node in compiler.graph.nodes}
    for stage, ranks in enumerate(compiler.layout.stages):
        if len(ranks.ranks) == 1:
            continue
        # The instructions of one exchange on all ranks share its tag. A rank may take part in some exchanges only, as
        # the middle tile of three may borrow where the outer ones do not.
        met: dict[int, dict[int, Exchange]] = {}
        readers: dict[int, dict[str, Node]] = {}
        for program in map(compiler.compile_rank, ranks.ranks):
            segments = [item for item in program.forward if isinstance(item, Compute)]
            halos = (item for item in program.forward if isinstance(item, Exchange) and item.purpose == "halo")
            for item in halos:
                met.setdefault(item.tag, {})[program.rank] = item
                ops = [op for segment in segments if item.target in segment.inputs for op in segment.ops]
                found = _find_readers(ops, item.target, nodes)
                readers.setdefault(item.tag, {}).update({node.name: node for node in found})
        for tag in sorted(met):
            any_rank = next(iter(met[tag].values()))
            spec = TensorSpec(any_rank.shape, any_rank.dtype)
            yield HaloPoint(tuple(readers[tag].values()), stage, ranks, spec, any_rank.axes or (-2, -1), met[tag])


def _find_readers(ops: Sequence[LocalOp], name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """Yield the operators that read a value, directly or after padding."""
    for op in ops:
        if name in op.reads:
            if op.out in nodes:
                yield nodes[op.out]
            else:
                # The output is no value of the graph (such as a padded copy): follow it to its readers.
                yield from _find_readers(ops, op.out, nodes)


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
        if any(layer == node.name or f"{node.module}.".startswith(f"{layer}.") for node in point.readers):
            return point
    some = ", ".join(dict.fromkeys(point.name for point in points[:6]))
    raise PlanError(
        f"layer={layer!r} borrows no halo: it is not in a spatial stage, or its outputs read their own pixel "
        f"only. {len(points)} layers do; the first are {some}."
    )
