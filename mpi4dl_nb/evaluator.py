"""Evaluation on held-out images: the ranks read and predict them, and the notebook computes the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from engines.errors import RankError
from engines.evaluation import HeldOutSet, PredictedBatch, RankEvaluation
from engines.images.dataset import LabelledImages
from engines.layer.graph import TensorSpec
from engines.metrics import Scores
from engines.training import Recipe
from mpi4dl_nb.loops import check_classes, get_rank_training

if TYPE_CHECKING:
    from engines.rank_server import RankServer
    from mpi4dl_nb.training import Training

__all__ = ["Evaluator"]


# One evaluation: the ranks predict the images in steps of the plan, each of them reading its own pixels, and give their
# parts of the predictions back. Only the notebook has all of them, and computes the scores as one process would.


class Evaluator:
    """Evaluates a training as it is now. Raises ImageError, TraceError or PlanError before any rank is called."""

    def __init__(self, training: Training, images: LabelledImages, on_bad_image: str) -> None:
        check_classes(images, training.recipe.graph)
        self.held_out = HeldOutSet(training.model, training.loss, training.recipe, images, on_bad_image)
        self.training, self.name = training, f"{training.name}.held_out"
        self._images = images
        self.begin()

    def begin(self) -> None:
        """Prepare the ranks, again if they have lost the evaluation or if the plan has changed."""
        if self.held_out.recipe is not self.training.recipe:
            self.held_out = replace(self.held_out, recipe=self.training.recipe)
        training, labels = self.training, self.training.recipe.step_specs["labels"]
        training.cluster.call(_begin, training.name, self.name, self.held_out.forward, labels, self._images)

    def compute_scores(self, tensors: Callable[[], Sequence[Mapping[str, object]]]) -> Scores | None:
        """Return the scores over all images; `tensors` returns the ranks' tensors, for a loss that has some."""
        self.training.cluster.call(_use_current_weights, self.name)
        return self.held_out.compute_scores(self._request_predictions, tensors)

    def _request_predictions(self, numbers: Sequence[int]) -> tuple[Mapping[int, str], Sequence[PredictedBatch]]:
        answers = self.training.cluster.call(_predict, self.name, list(numbers))
        return answers[0].bad, answers

    def close(self) -> None:
        """Free what the ranks hold for the evaluation. If ranks have died, it is gone already."""
        with suppress(RankError):
            self.training.cluster.call(_end, self.name)


def _begin(
    host: RankServer, training: str, name: str, recipe: Recipe, labels: TensorSpec, images: LabelledImages
) -> None:
    host.predictions[name] = RankEvaluation(host.world, get_rank_training(host, training), recipe, labels, images)


def _use_current_weights(host: RankServer, name: str) -> None:
    host.predictions[name].begin()


def _predict(host: RankServer, name: str, numbers: Sequence[int]) -> PredictedBatch:
    return host.predictions[name].predict(numbers)


def _end(host: RankServer, name: str) -> None:
    host.predictions.pop(name, None)
