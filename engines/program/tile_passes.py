"""Prediction tile by tile, for an image larger than the memory of all ranks together.

The tiles are those of a plan with more tiles than ranks, with all layers fused from the image on: a tile reads its
window of the image, and nothing is exchanged. Only a sum over the image (a global pool, the statistics of a norm) needs
all tiles before the computation can continue. The image is therefore passed over once for each sum that depends on
another sum, and a last time for the prediction. Only the sums are kept between passes; the rest is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engines.errors import PlanError, TraceError
from engines.graph.model_graph import ModelGraph
from engines.plan import Plan
from engines.program.instructions import AllReduce, Compute, ModelInstruction, Phase
from engines.program.lowering import Lowering
from engines.program.program import DirectionProgram, Program, ShardSpec, Step
from engines.spatial.layout import Role
from engines.spatial.tiles import Grid

__all__ = ["TilePass", "TilePasses"]


@dataclass(frozen=True)
class TilePass:
    """One tile in one pass: what it computes, and the `sums` to which its part is added.

    `prediction` is the part of the prediction that the tile makes; None if the pass is for sums only, or if all tiles
    make the same value.
    """

    program: Program
    sums: tuple[AllReduce, ...]
    prediction: ShardSpec | None

    @property
    def window(self) -> ShardSpec | None:
        """The part of the image that the pass reads; None if the known sums suffice."""
        return self.program.direction_programs[0].input_shards.get("images")

    @property
    def is_last(self) -> bool:
        """Whether the pass makes the prediction."""
        return not self.sums


class TilePasses:
    """The passes over the tiles `grid` of a model without a loss.

    Raises TraceError or PlanError if a layer needs all pixels at once.
    """

    def __init__(self, graph: ModelGraph, grid: Grid) -> None:
        self.graph, self.grid = graph, grid
        cut = {"split_size": 1, "spatial_size": 1, "num_spatial_parts": grid.tiles, "slice_method": str(grid)}
        plan = Plan(**cut, halo_d2=True, fused_layers="auto")
        try:
            self.lowering = Lowering(graph, plan, in_turn=True)
        except (TraceError, PlanError) as error:
            raise type(error)(f"The image cannot be computed in {grid} tiles one after another. {error}") from error

    def make_pass(self, tile: int, known: Iterable[str] = ()) -> TilePass:
        """Return what one tile computes if some sums are `known`: up to the next sums, or to the prediction."""
        role, known = Role(0, tile), frozenset(known)
        forward = self.lowering.build_forward(role, [self.graph.prediction])
        window = dict(self.lowering.get_input_shards(role))["images"]
        predicts = self.lowering.get_prediction_shard(role)
        self.lowering.drop_builder(role)
        able, sums, blocked = _find_computable(forward, known)
        ends = self.graph.prediction not in blocked
        wanted = frozenset({self.graph.prediction} if ends else {each.source for each in sums})
        # Of the computable segments, those on which something wanted depends, from the last one backward. A later pass
        # thus skips whatever led only to sums that are known by now.
        needed, kept = set(wanted), []
        for item in reversed(able):
            if not needed.isdisjoint(item.outputs):
                kept.append(item)
                needed.update(item.inputs)
        run = tuple(reversed(kept))
        way = DirectionProgram(
            stages={0: run},
            input_shards={"images": window} if any("images" in item.inputs for item in run) else {},
            loss=None,
            prediction=self.graph.prediction if ends else None,
            seeds_loss=False,
            kept_to_end=wanted,
        )
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
    """Return the segments computable from the known sums, the sums they lead to, and the values that must wait."""
    #            conv --> (sums of the norm) --> norm --> conv --> (sum of the pool) --> linear
    #   pass 1   ------------------>| blocked ...
    #   pass 2   --------- known -------------------------------------------->| blocked ...
    #   pass 3                                                        known ----------------->  prediction
    able: list[Compute] = []
    sums: list[AllReduce] = []
    blocked: set[str] = set()
    for item in forward:
        if isinstance(item, AllReduce):
            if item.target in known:
                continue
            # An unknown sum whose terms are computable now belongs to this pass; one of blocked terms, to a later pass.
            if item.source not in blocked:
                sums.append(item)
            blocked.add(item.target)
        elif isinstance(item, Compute):
            if blocked.isdisjoint(item.inputs):
                able.append(item)
            else:
                blocked.update(item.outputs)
    return able, sums, blocked
