"""An image larger than all ranks together, predicted tile after tile: the ranks take tiles in turn.

In each round every rank computes one tile. Where tiles of the prediction are made they go to rank 0
(`tile_stitcher.py`), which writes them while the others go on; nobody is further ahead than one round, so nothing piles
up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.comm.all_reduce import all_reduce
from engines.comm.collective_errors import run_on_all
from engines.comm.device import (
    choose_device,
    compute_threads_per_rank,
    count_local_ranks,
    keep_memory_tight,
    read_process_bytes,
    use_threads,
)
from engines.comm.world import World
from engines.inference.output_kinds import convert_image_scores, convert_pixel_scores
from engines.inference.padded_region import PaddedRegion
from engines.inference.rank_predictor import fetch_tensors
from engines.inference.tile_fitting import choose_grid, iterate_passes
from engines.inference.tile_sink import ArraySink, MakeSink
from engines.inference.tile_stitcher import TileStitcher
from engines.program.tile_passes import TilePass, TilePasses
from engines.program.worker import Worker
from engines.spatial.tiles import Tile
from engines.training import Recipe, copy_state_tensor

__all__ = ["PredictionRequest", "TiledPrediction", "TiledPredictor"]


@dataclass(frozen=True)
class PredictionRequest:
    """What is wanted: of each pixel its class, probabilities or scores (`kind`), within `memory_bytes` on any rank.

    `side_px` makes tiles of that size, whatever memory they take.
    """

    region: PaddedRegion
    kind: str = "classes"
    memory_bytes: int = 10**9
    side_px: int | None = None


@dataclass(frozen=True)
class TiledPrediction:
    """A prediction: `answer` is what the sink answers, or what is told where the model answers for the whole image.

    `overhead` is how many pixels were read for each that was asked for, in each of `walks` over the image that read
    any; `peak_bytes` the most memory that each rank's process has ever had.
    """

    answer: Any
    per_pixel: bool
    tiles: int
    tile_px: tuple[int, int]
    walks: int
    overhead: float
    seconds: float
    peak_bytes: tuple[int, ...]


class TiledPredictor:
    """One rank's part of a prediction; every method is collective.

    Weights are those `held` by the ranks of a training, or else the recipe's. Raises PlanError or TraceError where the
    model cannot be computed tile after tile within the bound, ImageError where the sink cannot be made.
    """

    def __init__(
        self, world: World, recipe: Recipe, ask: PredictionRequest, sink: MakeSink = ArraySink,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        recipe.additions.register()
        use_threads(compute_threads_per_rank(count_local_ranks(world.size)))
        self.world, self.graph, self.ask = world, recipe.graph, ask
        self.device = choose_device(recipe.device, world.rank)
        self.state = self._collect_state(recipe, held)
        self.known: dict[str, Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self.walk = self.round = self.read_px = 0
        self.answer: Any = None
        self.mosaic: TileStitcher | None = None
        keep_memory_tight(True)
        try:
            self._choose_tiles(sink)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter()

    def _choose_tiles(self, sink: MakeSink) -> None:
        """Choose the tiles, and make what takes those of the prediction."""
        world, ask = self.world, self.ask
        self.turns = TilePasses(self.graph, choose_grid(world, self.graph, ask.memory_bytes, ask.side_px))
        self.walks = [turn for _, turn in iterate_passes(self.turns)]
        spec, feed = self.graph.specs[self.graph.prediction], self.walks[-1].prediction
        if feed is not None:
            self.mosaic = TileStitcher(world, self.turns.grid, spec, feed, ask.region, ask.kind, sink)

    def _collect_state(self, recipe: Recipe, held: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """All weights and buffers: every rank computes all layers."""
        names = (*self.graph.weights, *self.graph.buffers)
        learnt = [name for name in names if name not in self.graph.constants]
        there = (
            recipe.state
            if held is None
            else {**fetch_tensors(self.world, held, learnt), **held, **self.graph.constants}
        )
        return {name: copy_state_tensor(there[name], self.graph.specs[name], self.device) for name in names}

    @property
    def rounds(self) -> int:
        """How many there are in all; the last walk of a classifier is one by itself."""
        return sum(map(self._count_rounds, self.walks))

    def _count_rounds(self, walk: TilePass) -> int:
        return 1 if walk.window is None else math.ceil(self.turns.grid.tiles / self.world.size)

    @property
    def done(self) -> bool:
        """Whether every round is."""
        return self.walk == len(self.walks)

    def step(self) -> None:
        """One round. Raises ImageError, on every rank, where one cannot read its tile, or rank 0 cannot write."""
        first, walk = self.round * self.world.size, self.walks[self.walk]
        made = run_on_all(self.world, partial(self._compute_tile, first + self.world.rank if walk.window else 0))
        if walk.prediction is not None and self.mosaic:
            self.mosaic.add(first, made)
        self.round += 1
        if self.round == self._count_rounds(walk):
            self._end_pass(walk)

    def _compute_tile(self, number: int) -> NDArray[Any] | None:
        """Compute one tile: its part of the prediction, where this walk makes it. Sums are kept."""
        if self.mosaic:
            self.mosaic.check()
        if number >= self.turns.grid.tiles:
            return None
        turn = self.turns.make_pass(number, self.known)
        worker = Worker(turn.program, self.world, self.state, self.state, device=self.device)
        with torch.no_grad():
            worker.run({0: self._read_inputs(turn)})
            for each in turn.sums:
                own = worker.peek(each.source)
                self._partial[each.target] = self._partial[each.target] + own if each.target in self._partial else own
            if not turn.is_last:
                return None
            scores = worker.peek(self.graph.prediction)
            if turn.prediction is None:
                self.answer = convert_image_scores(scores[0].cpu(), self.ask.kind)
                return None
            return convert_pixel_scores(scores, self.ask.kind)

    def _read_inputs(self, turn: TilePass) -> dict[str, Tensor]:
        reads = {name for item in turn.program.forward for name in item.inputs}
        inputs = {name: total for name, total in self.known.items() if name in reads}
        if turn.window is not None:
            tile = turn.window.tile or Tile.whole(*self.ask.region.size_px)
            self.read_px += tile.pixels
            pixels = self.ask.region.read_tile(tile, getattr(torch, self.graph.inputs["images"].dtype))
            inputs["images"] = pixels.to(self.device)
        return inputs

    def _end_pass(self, walk: TilePass) -> None:
        """What was summed over tiles is summed over ranks."""
        for each in walk.sums:
            empty = torch.zeros(each.spec.shape, dtype=getattr(torch, each.spec.dtype), device=self.device)
            total = self._partial.pop(each.target, empty).clone()
            all_reduce(self.world, total, tuple(range(self.world.size))).wait()
            self.known[each.target] = total
        self.walk, self.round = self.walk + 1, 0

    def finish(self) -> TiledPrediction:
        """The prediction; on rank 0 with the sink's answer. Raises ImageError, on every rank, where it cannot write."""
        answer = run_on_all(self.world, lambda: self.mosaic.finish() if self.mosaic else self.answer)
        seconds, region_px = time.perf_counter() - self.start_s, self.ask.region.size_px
        asked_px = math.prod(region_px) * sum(walk.window is not None for walk in self.walks)
        grid = self.turns.grid
        overhead = round(sum(self.world.all_gather(self.read_px)) / asked_px, 4)
        peaks = tuple(self.world.all_gather(read_process_bytes("VmHWM")))
        tile_px = grid.get_tile(0, *region_px).shape
        return TiledPrediction(
            answer, bool(self.mosaic), grid.tiles, tile_px, len(self.walks), overhead, seconds, peaks
        )

    def close(self) -> None:
        """Leave nothing unfinished behind."""
        keep_memory_tight(False)
        if self.mosaic:
            self.mosaic.close()

    def run(self, hear: Callable[[], object] = lambda: None) -> TiledPrediction:
        """Every round; `hear` is called after each."""
        try:
            while not self.done:
                self.step()
                hear()
            return self.finish()
        finally:
            self.close()
