"""Prediction tile by tile, for an image larger than the memory of all ranks together.

The tiles are those of a plan with more tiles than ranks, with all layers fused from the image on: a tile reads its
window of the image, and nothing is exchanged. Only a sum over the image (a global pool, the statistics of a norm, the
maxima of all tiles side by side) needs all tiles before the computation can continue. The image is therefore passed
over once for each sum that depends on another sum, and a last time for the prediction. Only the sums are kept between
passes; the rest is recomputed. The number of tiles is such that the memory of each pass, which is estimated before it
runs, is within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import choose_memory_format, read_process_bytes
from mpi4dl_nb.engines.comm.loopback import make_loopback_worlds
from mpi4dl_nb.engines.comm.world import World, run_on_first
from mpi4dl_nb.engines.compiler.lowering import Lowering
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec, find_updated_buffers
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Role
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes
from mpi4dl_nb.engines.program.effects import Phase, select_kind
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute, ModelInstruction
from mpi4dl_nb.engines.program.program import DirectionProgram, Program, ShardSpec, Step
from mpi4dl_nb.engines.program.rng import find_sample_number
from mpi4dl_nb.engines.program.worker import Worker


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
        plan = Plan(
            split_size=1,
            spatial_size=1,
            num_spatial_parts=grid.tiles,
            slice_method=str(grid),
            halo_d2=True,
            fused_layers="auto",
        )
        # Operators that the prediction does not depend on, such as those of other outputs, are left out: a layer that
        # reads the prediction through a window would make each tile of it wider. Draws are counted, and stay.
        needed, kept = {graph.prediction}, []
        for node in reversed(graph.nodes):
            draws = find_sample_number(graph, node) is not None
            if node.name in needed or draws or any(find_updated_buffers(graph, node)):
                kept.append(node)
                needed.update(node.reads)
        try:
            self.lowering = Lowering(replace(graph, nodes=tuple(reversed(kept))), plan, tile_by_tile=True)
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
        shape = predicts.split_shape or self.graph.specs[self.graph.prediction].shape
        sides = [shape[axis] for axis in predicts.axes]
        if sides and predicts.tile != self.grid.get_tile(tile, *sides):
            raise TraceError(
                f"The model's first output ({self.graph.prediction}) is read by a later layer that draws random "
                "numbers or changes a buffer, so that its tiles overlap. Return it from a model of its own."
            )
        ends = self.graph.prediction not in blocked
        wanted = frozenset({self.graph.prediction} if ends else {reduction.source for reduction in sums})
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
        effects = item.get_effects(Phase.FORWARD)
        if known.issuperset(effects.makes):
            continue
        # An unknown sum whose terms are computable now belongs to this pass; one of blocked terms, to a later pass.
        if blocked.isdisjoint(effects.reads):
            sums += select_kind([item], AllReduce)
            able += select_kind([item], Compute)
        if effects.reductions or not blocked.isdisjoint(effects.reads):
            blocked.update(effects.makes)
    return able, sums, blocked


# Estimate the memory of a pass by running its program on the meta device, where tensors have sizes but no memory.


class _PassMemory(LiveBytes):
    """Counts the bytes of live tensors, and what convolutions need beside them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if "convolution" in func._schema.name and args[0].dtype is torch.float64:
            # In float64 ATen unfolds every window of one image (`im2col`), a workspace that is no tensor of the graph.
            # It has one column for each output pixel, or, in a transposed convolution, whose output is larger, one for
            # each input pixel.
            x, weight = args[:2]
            unfolded = output if isinstance(output, Tensor) and output.shape[-1] <= x.shape[-1] else x
            workspace = math.prod(weight.shape[1:]) * math.prod(unfolded.shape[2:]) * x.element_size()
            self.peak = max(self.peak, self.now + workspace)
        return output


def estimate_pass_bytes(turn: TilePass, graph: ModelGraph, sums: Mapping[str, TensorSpec]) -> int:
    """Return the peak bytes of tensors in one pass, without the weights and the image's pixels as bytes.

    The pass runs on the meta device, where tensors have sizes but no memory. `sums` are the sums known at that time.
    Raises NotImplementedError if a kernel has no meta function.
    """
    # The program that will run on the device runs here, so that no second model has to know what it frees and when.
    # Weights are made before `live` is entered, and are not counted: all passes share them.
    device = torch.device("meta")
    weights = {name: _make_empty(graph.weights[name]) for name in turn.program.weights}
    buffers = {name: _make_empty(graph.buffers[name]) for name in turn.program.buffers}
    worker = Worker(turn.program, make_loopback_worlds(1)[0], weights, buffers, device=device)
    with torch.no_grad(), _PassMemory() as live:
        inputs = {name: _make_empty(spec) for name, spec in sums.items()}
        if turn.window is not None:
            images, tile = graph.inputs["images"], turn.window.tile
            inputs["images"] = _make_empty(TensorSpec((*images.shape[:2], *tile.shape), images.dtype))
        worker.run({0: inputs})
    return live.peak


def _make_empty(spec: TensorSpec) -> Tensor:
    layout = choose_memory_format(len(spec.shape))
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", memory_format=layout)


LOOSE = 1.15
"""Memory that the process takes for a pass, as a multiple of its tensors' memory (see `keep_memory_tight`).

The difference is what kernels need themselves. Measured with U-Nets and ResNets: 1.0 to 1.13.
"""

_SIDES = tuple(round(128 * 2 ** (step / 4)) for step in range(29))  # to 16384 px


_CLASS_BYTES, _SCORE_BYTES = 8, 8
"""Bytes per output pixel besides the scores: the class, and for each score a probability or a copy."""

_READ_BYTES = 40
"""Bytes per pixel being read: bytes as in the file and in the picture, and numbers before and after scaling."""

AT_WORK_BYTES = 40 * 10**6
"""Bytes that libraries take as soon as they compute (oneDNN's kernels, message buffers)."""


def make_tile_grid(size_px: Sequence[int], side_px: int) -> Grid:
    """Return a grid of tiles of nearly equal size, none with a side longer than `side_px`.

    >>> str(make_tile_grid((3000, 1000), 1024))
    '3x1'
    """
    return Grid(-(-size_px[0] // side_px), -(-size_px[1] // side_px))


def iterate_passes(turns: TilePasses) -> Iterator[tuple[dict[str, TensorSpec], TilePass]]:
    """Yield each pass over an image, in order: the sums known before it, and the pass of the middle tile."""
    # The middle tile has neighbours on all sides if any tile has, so that its window, with halos, is the largest.
    known: dict[str, TensorSpec] = {}
    middle = turns.grid.rows // 2 * turns.grid.cols + turns.grid.cols // 2
    while True:
        turn = turns.make_pass(middle, known)
        yield dict(known), turn
        if turn.is_last:
            return
        known |= {reduction.target: reduction.spec for reduction in turn.sums}


def fit_tiles(graph: ModelGraph, ranks: int, bound_bytes: int) -> TilePasses:
    """Return the fewest tiles that each take at most `bound_bytes`; at least one per rank if the image is large enough.

    Raises PlanError if even the smallest tiles take more, TraceError if the model cannot be computed in tiles.
    """
    size_px = graph.inputs["images"].shape[2:]
    sides = [side for side in _SIDES if side < max(size_px)] + [max(size_px)]
    sides = [side for side in sides if make_tile_grid(size_px, side).tiles >= ranks] or sides[:1]
    best: TilePasses | None = None
    refusal = PlanError("An image without pixels cannot be computed in tiles.")
    low, high = 0, len(sides)
    # Bisect for the largest side that fits. Memory grows with the side, so that all smaller sides fit too.
    while low < high:
        middle = (low + high) // 2
        try:
            turns = TilePasses(graph, make_tile_grid(size_px, sides[middle]))
            fits = (taken := _estimate_peak_bytes(turns, graph)) <= bound_bytes
        except PlanError as error:  # a late layer has fewer pixels than there are tiles: try larger tiles
            refusal, turns, fits, taken = error, None, True, 0
        if fits:
            best, low = turns or best, middle + 1
        else:
            high = middle
            refusal = PlanError(
                f"A tile of {sides[middle]} px takes {_to_mb(taken)} MB beside what a rank holds anyway, but only "
                f"{_to_mb(bound_bytes)} MB of the bound are left for it. Allow {_to_mb(taken - bound_bytes)} MB more "
                "(memory_mb), or predict a coarser level."
            )
    # Every side that was tried either fitted or left the reason why it did not.
    if best is None:
        raise refusal
    return best


def choose_grid(world: World, graph: ModelGraph, bound_bytes: int, side_px: int | None = None) -> Grid:
    """Choose, on rank 0, the grid of tiles for all ranks so that none exceeds `bound_bytes` in total; collective.

    Raises PlanError or TraceError as `fit_tiles` does, on every rank.
    """
    taken = max(world.all_gather(read_process_bytes("VmRSS"))) if side_px is None else 0

    # Every rank needs the same grid, and how much memory a process takes differs from rank to rank.
    def choose() -> Grid:
        if side_px is not None:
            return TilePasses(graph, make_tile_grid(graph.inputs["images"].shape[2:], side_px)).grid
        left_bytes = bound_bytes - taken - AT_WORK_BYTES
        if left_bytes <= 0:
            raise PlanError(
                f"A rank takes {_to_mb(taken + AT_WORK_BYTES)} MB before it computes anything, and the bound is "
                f"{_to_mb(bound_bytes)} MB. Allow more (memory_mb)."
            )
        return fit_tiles(graph, world.size, left_bytes).grid

    return run_on_first(world, choose)


def _estimate_peak_bytes(turns: TilePasses, graph: ModelGraph) -> int:
    """Return the bytes of the most expensive pass, including its tile's output and the pixels as they are read."""
    most = 0
    for known, turn in iterate_passes(turns):
        taken = estimate_pass_bytes(turn, graph, known)
        if turn.prediction is not None and turn.prediction.tile is not None:
            # Added to the peak, since the pass's tensors are still held when its scores are converted.
            channels = graph.specs[graph.prediction].shape[1]
            taken += turn.prediction.tile.pixels * (_CLASS_BYTES + _SCORE_BYTES * channels)
        # A sum is held until all tiles are added, and once more while the ranks add theirs.
        taken += 2 * sum(reduction.spec.bytes for reduction in turn.sums)
        if turn.window is not None and turn.window.tile is not None:
            # A maximum and no sum: the pixels are bytes no longer when the pass begins.
            taken = max(taken, _READ_BYTES * turn.window.tile.pixels)
        most = max(most, taken)
    return int(LOOSE * most)


def _to_mb(count: int) -> int:
    return -(-count // 10**6)
