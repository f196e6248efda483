"""Where halos move: the exchange points of the compiled programs, by layer. Nothing is computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from engines.errors import ImageError, PlanError
from engines.images.picture import Picture
from engines.layer.graph import ModelGraph, Node, TensorSpec
from engines.layout import StageRanks
from engines.plan import Plan
from engines.program.compile import Compiler
from engines.program.instructions import Compute, Exchange, LocalOp
from engines.program.program import Program
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile
from engines.spatial.windows import halo_widths
from engines.training import Recipe, prepare
from mpi4dl_nb.draw.figure import spoken_bytes, spoken_size

__all__ = ["HaloPoint", "find_point", "halo_points", "traced"]


@dataclass(frozen=True)
class HaloPoint:
    """One exchange of halos among the tiles of a stage, for the operators `readers`.

    `exchanges` holds the instruction of each rank that lends or borrows. Pixels are those of `source`, the
    value that the readers read, which may be smaller than the picture.
    """

    readers: tuple[Node, ...]
    stage: int
    ranks: StageRanks
    exchanges: Mapping[int, Exchange]

    @property
    def name(self) -> str:
        """The user's module, or the operator where there is none."""
        return self.readers[0].module or self.readers[0].name

    @property
    def operator(self) -> str:
        """`aten.conv2d.default` -> `conv2d`."""
        return self.readers[0].operator.split(".")[1]

    @property
    def spec(self) -> TensorSpec:
        """Shape and type of the value for the whole image."""
        any_rank = next(iter(self.exchanges.values()))
        return TensorSpec(any_rank.shape, any_rank.dtype)

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the value for the whole image."""
        rows, cols = self._axes
        return self.spec.shape[rows], self.spec.shape[cols]

    @property
    def _axes(self) -> tuple[int, int]:
        return next(iter(self.exchanges.values())).axes or (-2, -1)

    @property
    def numbers(self) -> dict[int, int]:
        """The tile number of each rank of the stage."""
        return {rank: number for number, rank in enumerate(self.ranks.ranks)}

    @property
    def tiles(self) -> dict[int, Tile]:
        """What each rank of the stage owns."""
        return dict(zip(self.ranks.ranks, self.ranks.grid.cut(*self.size_px), strict=True))

    def borrowed(self, rank: int) -> tuple[Move, ...]:
        """What arrives at a rank."""
        return self.exchanges[rank].receives if rank in self.exchanges else ()

    def fill(self, rank: int) -> float | None:
        """What a rank reads beyond the image's edge; None where its window ends before."""
        window = self.exchanges[rank].window if rank in self.exchanges else None
        inside = window is None or window & Tile.whole(*self.size_px) == window
        return None if inside else self.exchanges[rank].fill

    def bytes(self, moves: Sequence[Move]) -> int:
        """What travels with these moves, for the whole batch and all channels."""
        return next(iter(self.exchanges.values())).bytes_of(moves)

    def piece_text(self, move: Move, end: str = " ") -> str:
        """`from rank 1: 256 × 1 px, 3.0 KB`."""
        size = f"{spoken_size(move.tile.shape)} px,"
        return end.join((f"from rank {move.source}:", size, spoken_bytes(self.bytes([move]))))

    def widths(self, rank: int) -> dict[str, int]:
        """Pixels that a rank borrows above, below, left and right of its tile."""
        own, window = self.tiles[rank], self.exchanges[rank].window if rank in self.exchanges else None
        reads = window or own
        above, below = halo_widths(own.rows, reads.rows, self.size_px[0])
        left, right = halo_widths(own.cols, reads.cols, self.size_px[1])
        return {"above": above, "below": below, "left": left, "right": right}


def traced(model: nn.Module | Recipe | ModelGraph, picture: Picture, plan: Plan) -> ModelGraph:
    """The model's graph at the picture's size.

    Raises ImageError where it was traced before, at another size.
    """
    if isinstance(model, nn.Module):
        model = prepare(model, plan, (1, 3, *picture.shape()))
    graph = model.graph if isinstance(model, Recipe) else model
    size_px = graph.inputs["images"].shape[-2:]
    if size_px != picture.shape():
        raise ImageError(
            f"The model was traced for images of {size_px[0]} x {size_px[1]} px, but {picture.name} has "
            f"{picture.shape()[0]} x {picture.shape()[1]}. Prepare it at that size, or pass the model itself."
        )
    return graph


def halo_points(graph: ModelGraph, plan: Plan) -> tuple[HaloPoint, ...]:
    """Every exchange of halos in one forward pass, in order."""
    compiler = Compiler(graph, plan)
    return tuple(
        point
        for stage, ranks in enumerate(compiler.layout.stages)
        if len(ranks.ranks) > 1
        for point in _of_stage(graph, stage, ranks, [compiler.program(rank) for rank in ranks.ranks])
    )


def _of_stage(graph: ModelGraph, stage: int, ranks: StageRanks, programs: Sequence[Program]) -> Iterator[HaloPoint]:
    nodes = {node.name: node for node in graph.nodes}
    met: dict[int, dict[int, Exchange]] = {}
    readers: dict[int, dict[str, Node]] = {}
    for program in programs:
        for item in program.forward:
            if isinstance(item, Exchange) and item.purpose == "halo":
                met.setdefault(item.tag, {})[program.rank] = item
                found = _readers(program, item.target, nodes)
                readers.setdefault(item.tag, {}).update({node.name: node for node in found})
    for tag in sorted(met):
        yield HaloPoint(tuple(readers[tag].values()), stage, ranks, met[tag])


def _readers(program: Program, name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """The operators that read a value, directly or padded."""
    segments = (item for item in program.forward if isinstance(item, Compute) and name in item.inputs)
    for segment in segments:
        yield from _reading(segment.ops, name, nodes)


def _reading(ops: Sequence[LocalOp], name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    for op in ops:
        if name in op.reads:
            if op.out in nodes:
                yield nodes[op.out]
            else:
                yield from _reading(ops, op.out, nodes)


def find_point(points: Sequence[HaloPoint], layer: str | int | None) -> HaloPoint:
    """The point of a layer: a module (or one around it), an operator's name, a number, or None for the first.

    Raises PlanError where that layer borrows nothing.
    """
    if not points:
        raise PlanError("No layer borrows a halo under this plan. Use more tiles, or leave the model out.")
    if isinstance(layer, int) and not 0 <= layer < len(points):
        raise PlanError(f"layer={layer}, but {len(points)} layers borrow halos: use 0 to {len(points) - 1}.")
    if isinstance(layer, str):
        return _named(points, layer)
    return points[layer or 0]


def _named(points: Sequence[HaloPoint], layer: str) -> HaloPoint:
    for point in points:
        if any(layer == node.name or f"{node.module}.".startswith(f"{layer}.") for node in point.readers):
            return point
    some = ", ".join(dict.fromkeys(point.name for point in points[:6]))
    raise PlanError(
        f"layer={layer!r} borrows no halo: it is not in a spatial stage, or its outputs read their own pixel "
        f"only. {len(points)} layers do; the first are {some}."
    )
