"""Predict an image larger than the memory of all ranks together, tile by tile: the ranks share the tiles.

In each round every rank computes one tile. In the last pass over the image, the tiles of the prediction are sent to
rank 0 (`tile_stitcher.py`), which writes them while the other ranks go on. Ranks synchronise in every round, so that no
queue of tiles builds up.

    pass 1 .. n - 1     sums over the image (global pools, norms): per tile, then per rank, then all-reduced
    pass n              the prediction: per tile, or once on every rank if the sums suffice
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

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.device import (
    choose_device,
    compute_threads_per_rank,
    count_local_ranks,
    keep_memory_tight,
    read_peak_bytes,
    use_threads,
)
from mpi4dl_nb.engines.comm.world import World, run_on_all
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import FactTable, format_bytes, format_number, format_seconds
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning
from mpi4dl_nb.engines.inference.rank_predictor import PaddedRegion, RankPrediction, find_state
from mpi4dl_nb.engines.inference.tile_passes import TilePass, TilePasses, choose_grid, iterate_passes
from mpi4dl_nb.engines.inference.tile_stitcher import (
    ArraySink,
    MakeSink,
    TileStitcher,
    convert_image_scores,
    convert_pixel_scores,
)
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import copy_state_tensor


@dataclass(frozen=True)
class PredictionRequest:
    """What to predict for each pixel (`kind`: classes, probabilities or scores), within `memory_bytes` on any rank.

    `meaning` is that of the model's channels. `side_px` fixes the tiles' side, whatever memory they take. With
    `needs_pixels`, as for a file, a model that answers once for the whole image is refused.
    """

    region: PaddedRegion
    kind: str = "classes"
    meaning: OutputMeaning = OutputMeaning.CLASSES
    memory_bytes: int = 10**9
    side_px: int | None = None
    needs_pixels: bool = False


@dataclass(frozen=True, repr=False)
class TiledPrediction(FactTable):
    """A prediction: `answer` is the sink's result, or that for the whole image if the model has no output per pixel.

    `overhead` is the number of pixels read per pixel of the region, in each of the passes (`walks`) that read the
    image; `peak_bytes` is the peak memory of each rank's process.
    """

    answer: Any
    per_pixel: bool
    tiles: int
    tile_px: tuple[int, int]
    walks: int
    overhead: float
    seconds: float
    peak_bytes: tuple[int, ...]

    caption = "Prediction"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "tiles": f"{self.tiles:,} of {self.tile_px[0]} × {self.tile_px[1]} px",
            "passes over the image": self.walks,
            "pixels read per pixel": format_number(self.overhead),
            "time": format_seconds(self.seconds),
            "memory of the fullest rank": format_bytes(max(self.peak_bytes)),
        }


class TiledPredictor(RankPrediction):
    """One rank's part of a prediction; every method is collective.

    The weights are those `held` by the ranks of a training, or else the recipe's. Raises PlanError or TraceError if the
    model cannot be computed tile by tile within the bound, ImageError if the sink cannot be made.
    """

    def __init__(
        self,
        world: World,
        recipe: Recipe,
        ask: PredictionRequest,
        sink: MakeSink = ArraySink,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        recipe.additions.register()
        use_threads(compute_threads_per_rank(count_local_ranks(world.size)))
        self.world, self.graph, self.ask = world, recipe.graph, ask
        self.device = choose_device(recipe.device, world.rank)
        # Every rank computes all layers, so it needs all weights and buffers, whatever the training's plan gave it.
        graph, names = self.graph, (*self.graph.weights, *self.graph.buffers)
        there = find_state(world, recipe, held, names)
        self.state = {name: copy_state_tensor(there[name], graph.specs[name], self.device) for name in names}
        self.known: dict[str, Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self.walk = self.round = self.read_px = 0
        self.answer: Any = None
        self.mosaic: TileStitcher | None = None
        keep_memory_tight(True)
        try:
            self.turns = TilePasses(graph, choose_grid(world, graph, ask.memory_bytes, ask.side_px))
            self.walks = [turn for _, turn in iterate_passes(self.turns)]
            spec, feed = graph.specs[graph.prediction], self.walks[-1].prediction
            if feed is not None:  # else the model answers once for the image, after the last pass
                self.mosaic = TileStitcher(world, self.turns.grid, spec, feed, ask.region, ask.kind, ask.meaning, sink)
            elif ask.needs_pixels:
                raise PlanError(
                    f"The model answers once for the whole image, with {spec.shape}, which is returned and not written "
                    "to a file. Leave the file out (to=, or --to)."
                )
            elif spec.shape[:1] != (1,) or (ask.kind == "classes" and math.prod(spec.shape[2:]) != 1):
                raise TraceError(
                    f"The model answers once for the whole image, with {spec.shape}, but {ask.kind} are those of one "
                    "image: (1, K) or (1, K, 1, 1), a score for each class. Let the model answer so."
                )
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter()

    @property
    def rounds(self) -> int:
        """Total number of rounds; the last pass of a classifier is a single round."""
        return sum(map(self._count_rounds, self.walks))

    def _count_rounds(self, walk: TilePass) -> int:
        return 1 if walk.window is None else math.ceil(self.turns.grid.tiles / self.world.size)

    @property
    def done(self) -> bool:
        """Whether all rounds are done."""
        return self.walk == len(self.walks)

    def step(self) -> None:
        """Compute one round.

        Raises ImageError, on every rank, if any rank cannot read its tile or rank 0 cannot write.
        """
        first, walk = self.round * self.world.size, self.walks[self.walk]
        part = run_on_all(self.world, partial(self._compute_tile, first + self.world.rank if walk.window else 0))
        if walk.prediction is not None and self.mosaic:
            self.mosaic.add(first, part)
        self.round += 1
        if self.round < self._count_rounds(walk):
            return
        # The pass is over: the sums of all tiles are those of the image.
        for reduction in walk.sums:
            # With more ranks than tiles, a rank has no sum of its own. It contributes zeros: the all-reduce is
            # collective.
            empty = torch.zeros(reduction.spec.shape, dtype=getattr(torch, reduction.spec.dtype), device=self.device)
            total = self._partial.pop(reduction.target, empty).clone()
            all_reduce(self.world, total, tuple(range(self.world.size))).wait()
            self.known[reduction.target] = total
        self.walk, self.round = self.walk + 1, 0

    def _compute_tile(self, number: int) -> NDArray[Any] | None:
        """Compute one tile and add its sums; return its part of the prediction if the pass makes one."""
        if self.mosaic:
            self.mosaic.check()
        if number >= self.turns.grid.tiles:
            return None
        turn = self.turns.make_pass(number, self.known)
        worker = Worker(turn.program, self.world, self.state, self.state, device=self.device)
        # A pass computes only what its sums, or the prediction, depend on, and reads the sums of earlier passes and, if
        # any of it depends on pixels, its window of the image.
        reads = turn.program.get_direction_program(0).reads
        inputs = {name: total for name, total in self.known.items() if name in reads}
        if turn.window is not None:
            tile = turn.window.tile or Tile.whole(*self.ask.region.size_px)
            self.read_px += tile.pixels
            pixels = self.ask.region.read_tile(tile, getattr(torch, self.graph.inputs["images"].dtype))
            inputs["images"] = pixels.to(self.device)
        with torch.no_grad():
            worker.run({0: inputs})
            for reduction in turn.sums:
                term = worker.peek(reduction.source)
                self._partial[reduction.target] = (
                    self._partial[reduction.target] + term if reduction.target in self._partial else term
                )
            if not turn.is_last:
                return None
            scores = worker.peek(self.graph.prediction)
            if turn.prediction is None:
                self.answer = convert_image_scores(scores[0].cpu(), self.ask.kind, self.ask.meaning)
                return None
            return convert_pixel_scores(scores, self.ask.kind, self.ask.meaning)

    def finish(self) -> TiledPrediction:
        """Return the prediction; only rank 0 has the sink's result. Raises ImageError on every rank if it fails."""
        answer = run_on_all(self.world, lambda: self.mosaic.finish() if self.mosaic else self.answer)
        seconds, region_px = time.perf_counter() - self.start_s, self.ask.region.size_px
        asked_px = math.prod(region_px) * sum(walk.window is not None for walk in self.walks)
        grid = self.turns.grid
        overhead = round(sum(self.world.all_gather(self.read_px)) / asked_px, 4)
        peaks = tuple(self.world.all_gather(read_peak_bytes()))
        tile_px = grid.get_tile(0, *region_px).size_px
        return TiledPrediction(
            answer, bool(self.mosaic), grid.tiles, tile_px, len(self.walks), overhead, seconds, peaks
        )

    def close(self) -> None:
        """Close the sink and restore the allocator's settings."""
        keep_memory_tight(False)
        if self.mosaic:
            self.mosaic.close()

    def run(self, hear: Callable[[], object] = lambda: None) -> TiledPrediction:
        """Compute all rounds and return the prediction; `hear` is called after each round."""
        try:
            while not self.done:
                self.step()
                hear()
            return self.finish()
        finally:
            self.close()
