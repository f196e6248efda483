"""Images whose tiles are read when their turn comes: no more than one tile of them is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.images.ignored import ignored_label
from engines.images.labelled import LabelledImages
from engines.images.own import OwnPart
from engines.program.program import Program
from engines.program.worker import Inputs
from engines.streaming.training import StreamedTraining
from engines.training import cut_inputs

__all__ = ["tile_by_tile"]


@dataclass(frozen=True)
class _Tile:
    """Knows which part of a step's inputs is one tile's."""

    program: Program

    def cut(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """By micro-batch and name."""
        return cut_inputs(self.program, inputs)


def tile_by_tile(
    training: StreamedTraining, images: LabelledImages
) -> Callable[[Sequence[int], Sequence[int] | None], Callable[[int], Inputs]]:
    """A function of the numbers of a step's images, and what each is augmented from, that gives what `step` asks for.

    Pixels are read when it asks; ImageError is raised then, where they cannot be.
    """
    specs, ignored = training.recipe.step_specs, ignored_label(training.recipe.graph)
    parts = [OwnPart(_Tile(program), images, specs, ignored) for program in training.programs]

    def of_step(numbers: Sequence[int], draws: Sequence[int] | None = None) -> Callable[[int], Inputs]:
        return lambda tile: parts[tile].read(numbers, draws)

    return of_step
