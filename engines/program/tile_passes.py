"""Tiles in turn: an image larger than all ranks together, computed tile after tile.

The tiles are those of a plan with more tiles than ranks, all layers fused from the image on: what a tile reads of the
image is its window, and nothing travels. Only a sum over the image (a global pool, the statistics of a norm) needs
all tiles before it goes on. So an image is walked once for each sum that reads what another sum has made, and at
last for the prediction. Nothing is kept between the walks but the sums: what a tile needs again it computes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.errors import PlanError, TraceError
from engines.layer.graph import ModelGraph
from engines.layout import Layout, Role
from engines.plan import Plan
from engines.program.instructions import AllReduce, Compute, ModelInstruction, Phase
from engines.program.lowering import Lowering
from engines.program.program import DirectionProgram, Program, ShardSpec, Step
from engines.spatial.tiles import Grid

__all__ = ["TilePass", "TilePasses"]


@dataclass(frozen=True)
class TilePass:
    """One tile in one walk: what it computes, and the `sums` that its part is to be added to.

    `prediction` is the part of the prediction that it makes; None where the walk is for sums alone, or where all tiles
    make the same.
    """

    program: Program
    sums: tuple[AllReduce, ...]
    prediction: ShardSpec | None

    @property
    def window(self) -> ShardSpec | None:
        """What it reads of the image; None where sums that are known already are enough."""
        return self.program.direction_programs[0].input_shards.get("images")

    @property
    def is_last(self) -> bool:
        """Whether it makes the prediction."""
        return not self.sums


class TilePasses:
    """The tiles of a model without a loss over `grid`.

    Raises TraceError or PlanError where a layer needs all pixels at once.
    """

    def __init__(self, graph: ModelGraph, grid: Grid) -> None:
        self.graph, self.grid = graph, grid
        plan = Plan(
            split_size=1, spatial_size=1, num_spatial_parts=grid.tiles, slice_method=str(grid), halo_d2=True,
            fused_layers="auto",
        )  # fmt: skip
        try:
            self.lowering = Lowering(graph, plan, Layout.of(plan), input_gradient=False, in_turn=True)
        except (TraceError, PlanError) as error:
            raise type(error)(f"The image cannot be computed in {grid} tiles one after another. {error}") from error

    def make_pass(self, tile: int, known: Iterable[str] = ()) -> TilePass:
        """What one tile computes where some sums are known: as far as the next sums, or the prediction."""
        role, known = Role(0, tile), frozenset(known)
        forward = self.lowering.build_forward(role, [self.graph.prediction])
        window, predicts = (
            dict(self.lowering.get_input_shards(role))["images"],
            self.lowering.get_prediction_shard(role),
        )
        self.lowering.drop_builder(role)
        able, sums, blocked = _find_computable(forward, known)
        ends = self.graph.prediction not in blocked
        wanted = {self.graph.prediction} if ends else {each.source for each in sums}
        run = _select_needed(able, wanted)
        reads = {name for item in run for name in item.inputs}
        way = DirectionProgram(
            stages={0: run}, input_shards={"images": window} if "images" in reads else {}, loss=None,
            prediction=self.graph.prediction if ends else None, seeds_loss=False, kept_to_end=frozenset(wanted),
        )  # fmt: skip
        program = Program(
            rank=0,
            steps=tuple(Step(item, Phase.FORWARD) for item in run),
            direction_programs={0: way},
            directions={0: 0},
            micro_batches=1,
            weights=tuple(self.graph.weights),
            buffers=tuple(self.graph.buffers),
        )
        return TilePass(program, () if ends else tuple(sums), predicts if ends and predicts.axes else None)


def _find_computable(
    forward: Iterable[ModelInstruction], known: frozenset[str]
) -> tuple[list[Compute], list[AllReduce], set[str]]:
    """The segments that can be computed with the sums that are known, the sums they lead to, and what has to wait."""
    able: list[Compute] = []
    sums: list[AllReduce] = []
    blocked: set[str] = set()
    for item in forward:
        if isinstance(item, AllReduce):
            if item.target in known:
                continue
            if item.source not in blocked:
                sums.append(item)
            blocked.add(item.target)
        elif isinstance(item, Compute):
            if blocked.isdisjoint(item.inputs):
                able.append(item)
            else:
                blocked.update(item.outputs)
    return able, sums, blocked


def _select_needed(able: Sequence[Compute], wanted: Iterable[str]) -> tuple[Compute, ...]:
    """Those that something wanted is made of."""
    names, found = set(wanted), []
    for item in reversed(able):
        if not names.isdisjoint(item.outputs):
            found.append(item)
            names.update(item.inputs)
    return tuple(reversed(found))
