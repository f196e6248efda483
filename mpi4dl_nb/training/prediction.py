"""Evaluation on held-out images: the ranks read and predict them, and the notebook computes the scores."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mpi4dl_nb.engines.checks import check_choice
from mpi4dl_nb.engines.errors import ImageError, Mpi4dlError, PlanError, RankError, make_absolute
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.graph.default_type import use_default_type_of
from mpi4dl_nb.engines.graph.output_meaning import choose_kind, choose_meaning
from mpi4dl_nb.engines.images.dataset import LabelledImages, cast_numbers, check_classes, make_tensor
from mpi4dl_nb.engines.images.picture import Source, open_image
from mpi4dl_nb.engines.inference.class_map import name_classes
from mpi4dl_nb.engines.inference.evaluation import HeldOutSet, PredictedBatch, State, is_exact, warn_of_mixing
from mpi4dl_nb.engines.inference.pyramid_sink import make_pyramid
from mpi4dl_nb.engines.inference.rank_predictor import (
    join_predictions,
    make_padded_region,
    prepare_prediction,
    prepare_region,
)
from mpi4dl_nb.engines.inference.tile_stitcher import KINDS, ArraySink, MakeSink, get_output_channels, get_output_dtype
from mpi4dl_nb.engines.inference.tiled_predictor import PredictionRequest, TiledPrediction
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.engines.train.training_events import Scores
from mpi4dl_nb.training.training_handle import TrainingHandle

# One evaluation: the ranks predict the images in steps of the plan, each of them reading its own pixels, and give their
# parts of the predictions back. Only the notebook has all of them, and computes the scores as one process would.


class Evaluator:
    """Evaluates a training as it is now. Raises ImageError, TraceError or PlanError before any rank is called."""

    def __init__(self, training: TrainingHandle, images: LabelledImages, on_bad_image: str) -> None:
        check_classes(images, training.recipe.graph)
        self.held_out = HeldOutSet(training.model, training.loss, training.recipe, images, on_bad_image)
        self.held_out.check_loss()
        with use_default_type_of(training.recipe.graph):
            warn_of_mixing(training.model, self.held_out.forward, len(images), stacklevel=3)
        self.training, self.name = training, uuid.uuid4().hex
        self._images = images
        self.begin()

    def begin(self) -> None:
        """Prepare the ranks, again if they have lost the evaluation or if the plan has changed."""
        if self.held_out.recipe is not self.training.recipe:
            self.held_out = replace(self.held_out, recipe=self.training.recipe)
        training, labels = self.training, self.training.recipe.step_specs["labels"]
        begin = rank_functions.begin_evaluation, training.name, training.steps, self.name
        training.cluster.call(*begin, self.held_out.forward, labels, self._images)

    def compute_scores(self, tensors: Callable[[], Sequence[Mapping[str, State]]]) -> Scores | None:
        """Return the scores over all images; `tensors` returns the ranks' tensors, for a loss that has some."""

        def predict(numbers: Sequence[int]) -> tuple[Mapping[int, str], Sequence[PredictedBatch]]:
            answers = self.training.cluster.call(rank_functions.call_prediction, self.name, "predict", list(numbers))
            return answers[0].bad, answers

        with self.training.cluster.turn:  # a step of another thread would change the weights in between
            self.training.cluster.call(rank_functions.call_prediction, self.name, "begin")
            return self.held_out.compute_scores(predict, tensors)

    def close(self) -> None:
        """Free what the ranks hold for the evaluation. If ranks have died, it is gone already."""
        with suppress(RankError):
            self.training.cluster.call(rank_functions.drop_prediction, self.name)


# Prediction with a training's weights: batches under its own plan, pictures of any size tile by tile.


@contextmanager
def _begin_prediction(
    training: TrainingHandle, begin: Callable[..., Any], *args: Any
) -> Iterator[tuple[Sequence[Any], Callable[..., list[Any]]]]:
    """Begin a prediction on the ranks; yield what they have returned, and the function that calls its methods.

    It has a name of its own, and all its calls are one turn: another thread's prediction or step waits for its end. In
    the end the ranks free it, and close what they have opened, also if anything fails.
    """
    cluster, name = training.cluster, uuid.uuid4().hex
    with cluster.turn:
        try:
            with training.explain_failure():
                answers = cluster.call(begin, training.name, training.steps, name, *args)
            yield answers, partial(cluster.call, rank_functions.call_prediction, name)
        finally:
            with suppress(Mpi4dlError):
                cluster.call(rank_functions.drop_prediction, name)


def _describe_batch(shape: Sequence[int]) -> str:
    """
    >>> _describe_batch((2, 1, 16, 64, 64))
    '(N, 1, D, H, W)'
    """
    sides = {1: "L", 2: "H, W", 3: "D, H, W"}[len(shape) - 2]
    return f"(N, {shape[1]}, {sides})"


ARRAY_BYTES = 1 << 29  # a larger prediction must be written to a file


def predict_batch(training: TrainingHandle, images: Any) -> Tensor:
    """Return `model.eval()(images)` with the current weights."""
    images = make_tensor(images)
    batch = training.recipe.graph.inputs["images"].shape
    if images.shape[1] != batch[1] or not images.numel():
        wrong = f"but the model was trained on {batch[1]} channels" if images.numel() else "which is nothing to predict"
        raise ImageError(f"images have shape {tuple(images.shape)}, {wrong}. Give {_describe_batch(batch)}.")
    shape = (batch[0] * training.plan.parts, *images.shape[1:])
    with use_default_type_of(training.recipe.graph):
        recipe = prepare_prediction(training.model, training.plan, shape, training.recipe.device, with_state=False)
    images = cast_numbers("images", images, recipe.step_specs["images"])
    count = shape[0] * training.plan.batches
    if not is_exact(recipe, len(images), at_once=True):
        beside = recipe.graph.inputs["images"].shape[0]
        raise ImageError(
            "The model has a batch norm without running statistics, which normalises an image by those beside it: a "
            f"prediction of {len(images)} images is exact only in one micro-batch, of {beside} images here. Give "
            f"{beside} images, or use model.eval() itself."
        )
    with use_default_type_of(training.recipe.graph):
        warn_of_mixing(training.model, recipe, len(images), stacklevel=3, at_once=True)
    # 7 images at 3 a step:  [0 1 2] [3 4 5] [6 6 6]; the repeated ones are dropped from the predictions.
    predictions = []
    with _begin_prediction(training, rank_functions.begin_prediction, recipe) as (_, call):
        for part in images.split(count):
            # Programs have a fixed batch size: fill the last part up with repeated images, and drop their predictions.
            filled = part[torch.arange(count) % len(part)]
            parts = [(cut_inputs(program, {"images": filled}),) for program in recipe.programs]
            replies, spec = call("predict", per_rank=parts), recipe.graph.specs[recipe.graph.prediction]
            predictions.append(join_predictions(recipe.programs, replies, spec)[: len(part)])
    return torch.cat(predictions)


def predict_picture(
    training: TrainingHandle,
    source: Source,
    to: str | PathLike[str] | None,
    region: Sequence[int] | None,
    level: int,
    kind: str | None,
    memory_mb: int,
    progress: bool,
    activation: str | None,
    class_names: Sequence[str] | None,
) -> TiledPrediction:
    """Predict a region of a picture tile by tile on all ranks of the training."""
    if kind is not None:
        check_choice("kind", kind, KINDS)
    batch = training.recipe.graph.inputs["images"].shape
    if len(batch) != 4:
        raise ImageError(
            f"This is a model of {'volumes' if len(batch) == 5 else 'signals'}, {_describe_batch(batch)}, and cannot "
            "predict a picture. Give a batch of that shape as a tensor."
        )
    meaning = choose_meaning(activation, training.recipe.graph)
    kind = choose_kind(kind, meaning)
    where = make_absolute(source) if isinstance(source, str | PathLike) else source
    asked = make_padded_region(open_image(where), region, level)
    with use_default_type_of(training.recipe.graph):
        recipe, asked = prepare_region(training.model, asked, training.plan.precision, training.recipe.device)
    request = PredictionRequest(asked, kind, meaning, memory_mb * 10**6, needs_pixels=to is not None)
    spec = recipe.graph.specs[recipe.graph.prediction]
    sink: MakeSink = ArraySink
    names = name_classes(kind, meaning, spec.shape[1] if len(spec.shape) > 1 else 1, class_names)
    if to is not None:
        sink = partial(make_pyramid, make_absolute(to), asked, kind, spec.shape[2:], names)
    if to is None and len(spec.shape) >= 4:  # a prediction per pixel, which will be sent to the notebook as an array
        channels, dtype = spec.shape[1], get_output_dtype(kind, spec.shape[1], meaning, spec.dtype)
        size = math.prod(spec.shape[2:]) * get_output_channels(kind, channels, meaning) * dtype.itemsize
        if size > ARRAY_BYTES:
            raise PlanError(
                f"The prediction of {asked.picture_px[0]} x {asked.picture_px[1]} px takes {format_bytes(size)}. "
                "Write it to a file (to='prediction.tif'), or predict a region or a coarser level."
            )
    # One call per round rather than one for the whole picture: the bar advances, and the stop button takes effect
    # between two rounds.
    arguments = rank_functions.begin_tiled_prediction, replace(recipe, state={}), request, sink
    with _begin_prediction(training, *arguments) as ((rounds, *_), call):
        for _ in tqdm(range(rounds), unit="round", disable=not progress):
            call("step")
        return call("finish")[0]
