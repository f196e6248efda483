"""Loads an image tile by tile, when each tile's turn comes: at most one tile is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.images.dataset import LabelledImages
from engines.images.ignored_label import find_ignored_label
from engines.images.shard_reader import ShardReader
from engines.program.program import Program
from engines.program.worker import Inputs
from engines.streaming.streamed_training import StreamedTraining
from engines.training import cut_inputs

__all__ = ["make_tile_loader"]


@dataclass(frozen=True)
class _TileInputs:
    """Selects one tile's part of a step's inputs."""

    program: Program

    def cut(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """Return the tile's parts by micro-batch and name."""
        return cut_inputs(self.program, inputs)


def make_tile_loader(
    training: StreamedTraining, images: LabelledImages
) -> Callable[[Sequence[int], Sequence[int] | None], Callable[[int], Inputs]]:
    """Return a function that gives `step` its `feed`, from the numbers of a step's images and their augmentation draws.

    Pixels are read when `feed` is called; ImageError is raised then if they cannot be read.
    """
    specs, ignored = training.recipe.step_specs, find_ignored_label(training.recipe.graph)
    parts = [ShardReader(_TileInputs(program), images, specs, ignored) for program in training.programs]

    def load_step(numbers: Sequence[int], draws: Sequence[int] | None = None) -> Callable[[int], Inputs]:
        return lambda tile: parts[tile].read(numbers, draws)

    return load_step
