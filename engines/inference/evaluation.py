"""Evaluation of a model on held-out images, in evaluation mode: nothing in the model changes.

Ranks predict under the training's own plan, each from its own pixels. The caller (the notebook, or rank 0) receives the
whole predictions of a step, but not the images, and evaluates them image by image.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.device import choose_autocast_type
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.compiler.whole_loss import ImageWeights, compute_mean_loss
from mpi4dl_nb.engines.errors import ImageError, TraceError
from mpi4dl_nb.engines.graph.default_type import use_default_type_of
from mpi4dl_nb.engines.graph.model_graph import LOSS, ModelGraph, TensorSpec, is_batch_dependent
from mpi4dl_nb.engines.graph.output_meaning import find_output_meaning
from mpi4dl_nb.engines.graph.trace import StateNames, trace
from mpi4dl_nb.engines.images.dataset import LabelledImages, find_ignored_label
from mpi4dl_nb.engines.images.loader import describe_read_error
from mpi4dl_nb.engines.images.shard_reader import ReadRequest, ShardReader
from mpi4dl_nb.engines.inference.rank_predictor import (
    Prediction,
    RankPrediction,
    RankPredictor,
    find_mixed_images,
    join_predictions,
    prepare_prediction,
)
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import Counts, Scores, count_predictions

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class PredictedBatch:
    """One rank's result of a prediction step: its parts of the predictions, and on rank 0 all labels.

    `bad`, the same on every rank, maps each image that cannot be read to the reason. If it has any, there are no
    predictions and no labels.
    """

    parts: Prediction
    labels: Tensor | None
    bad: Mapping[int, str]


PredictImages = Callable[[Sequence[int]], tuple[Mapping[int, str], Sequence[PredictedBatch]]]
"""Predicts the images of a step: returns the bad images and, where they are evaluated, the results of all ranks."""


class RankEvaluation(RankPrediction):
    """One rank of an evaluation: it predicts `images` with the training's current weights. Collective.

    `recipe` is that of the prediction; `labels` is the spec of a step's labels.
    """

    def __init__(
        self, world: World, training: RankTraining, recipe: Recipe, labels: TensorSpec, images: LabelledImages
    ) -> None:
        self.world, self.training, self.recipe, self.images = world, training, recipe, images
        self.specs = {**recipe.step_specs, "labels": labels}
        ignored = find_ignored_label(training.graph)
        # Rank 0 alone evaluates: it reads the labels whole, whatever part of them it has in training.
        self.labels = None
        if world.rank == 0:
            self.labels = ShardReader(lambda inputs: {0: {"labels": inputs["labels"]}}, images, self.specs, ignored)

    def begin(self) -> None:
        """Take over the training's current weights for the predictions."""
        self.prediction = RankPredictor(self.world, self.recipe, self.training.held)
        self.own = ShardReader(self.prediction.cut, self.images, self.specs)

    def predict(self, numbers: Sequence[int]) -> PredictedBatch:
        """Predict one step, of the images with these numbers."""
        step = [(index, None) for index in numbers]
        bad: dict[int, str] = {}
        read: dict[ShardReader, dict[ReadRequest, Tensor]] = {self.own: {}}
        if self.labels is not None:
            read[self.labels] = {}
        for part, pieces in read.items():
            for piece in part.make_read_requests(step):
                try:
                    pieces[piece] = part.fetch(piece)
                except (ImageError, OSError) as error:
                    bad[piece.index] = describe_read_error(self.images.name(piece.index), error)
        # All ranks must agree before anyone predicts: a rank that cannot read its pixels would leave the others waiting
        # in the first exchange. Reversed, so that the text of the lowest rank wins.
        unreadable = {index: text for texts in reversed(self.world.all_gather(bad)) for index, text in texts.items()}
        if unreadable:
            return PredictedBatch({}, None, unreadable)
        inputs = {part: part.assemble(step, pieces.__getitem__) for part, pieces in read.items()}
        labels = None if self.labels is None else inputs[self.labels][0]["labels"]
        return PredictedBatch(self.prediction.predict(inputs[self.own]), labels, {})


@dataclass(frozen=True)
class HeldOutSet:
    """Held-out images, with all that is needed to evaluate a state of the training's model on them.

    A bad image ends the training or is left out, as `on_bad_image` says. Raises ImageError if there are no images.
    """

    model: nn.Module
    loss: Loss
    recipe: Recipe
    images: LabelledImages
    on_bad_image: str = "raise"

    def __post_init__(self) -> None:
        if not len(self.images):
            raise ImageError("There are no held-out images. Give some, or leave held_out away.")

    @cached_property
    def forward(self) -> Recipe:
        """The recipe to predict under the plan, without weights: the ranks have them.

        Raises TraceError or PlanError, and ImageError if the results would depend on how images fall into steps.
        """
        plan, images = self.recipe.plan, self.recipe.graph.inputs["images"]
        shape = (images.shape[0] * plan.parts, *images.shape[1:])
        # The state stays empty: ranks predict with the weights that they train, without copies.
        with self._constants:
            forward = prepare_prediction(self.model, plan, shape, self.recipe.device, with_state=False)
        _check_exact(forward, len(self.images))
        return forward

    def check_loss(self) -> None:
        """Raise TraceError if the loss cannot evaluate single images by what the model answers in evaluation mode."""
        graph, labels = self.forward.graph, self.recipe.graph.inputs["labels"]
        loss = f"The loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        remedy = "leave held_out away, and evaluate the model of training.state_dict() yourself."
        if len(graph.answers) > 1:
            raise TraceError(
                f"The model answers with {len(graph.answers)} tensors in evaluation mode, none of them called logits, "
                f"but held-out images are evaluated by one tensor. {loss} takes what the model answers: let that be a "
                f"tensor, or a dict or dataclass that calls it logits, or {remedy}"
            )
        answer, label = graph.specs[graph.prediction], TensorSpec((1, *labels.shape[1:]), labels.dtype)
        scores = torch.zeros((1, *answer.shape[1:]), dtype=_choose_loss_type(getattr(torch, answer.dtype)))
        try:
            with self._constants:
                float(self._copy_loss()(scores, torch.zeros(label.shape, dtype=getattr(torch, label.dtype))))
        except Exception as error:  # a loss may raise anything
            raise TraceError(
                f"{loss} fails for the prediction {tuple(scores.shape)}, {scores.dtype}, and the label {label.shape}, "
                f"{label.dtype}, of one image ({type(error).__name__}: {error}). Held-out images are evaluated one by "
                f"one, by what the model answers in evaluation mode: let the loss take that, or {remedy}"
            ) from error
        # A loss that takes a tensor and the whole output alike would be another one by the tensor alone.
        if (loss_input := self._alone.loss_input) != "Tensor":
            raise TraceError(
                f"{loss} takes the whole {loss_input} that the model answers with, but held-out images are "
                f"evaluated by its prediction alone. Let the model answer with a tensor in evaluation mode, or {remedy}"
            )
        _ = self._weights  # traces the loss of two images where it needs that

    def _copy_loss(self) -> Loss:
        """Return the loss in evaluation mode, in the type of the ranks' weights."""
        loss = copy.deepcopy(self.loss)
        if isinstance(loss, nn.Module):
            loss.to(getattr(torch, self.recipe.graph.inputs["images"].dtype)).eval()
        return loss

    def compute_scores(self, ask: PredictImages, ranks: Callable[[], Sequence[Mapping[str, State]]]) -> Scores | None:
        """Compute the scores of the ranks' current model; None if `ask` returns no predictions.

        `ranks` returns the ranks' tensors, which are needed if the loss has some. Raises ImageError.
        """
        loss = self._copy_loss()
        if isinstance(loss, nn.Module) and self.recipe.names.get("loss", StateNames()).names:
            loss.load_state_dict(collect_state_dict(self.recipe, ranks(), "loss"))
        bad: dict[int, str] = {}
        steps = list(self._score_steps(ask, bad, loss))
        if not steps:
            raise ImageError(
                f"None of the {len(self.images)} held-out images can be read, the first one: {next(iter(bad.values()))}"
            )
        pairs = [pair for losses, _ in steps for pair in losses]
        counts = sum((counts for _, counts in steps), Counts())
        return Scores(compute_mean_loss(*zip(*pairs, strict=True)), counts, tuple(bad.values())) if pairs else None

    def _trace_images(self, images: int) -> ModelGraph:
        """Return the graph of the loss of some images, in evaluation mode."""
        graph, plan = self.recipe.graph, self.recipe.plan
        images_spec, labels_spec = (
            replace(graph.inputs[name], shape=(images, *graph.inputs[name].shape[1:])) for name in graph.inputs
        )
        model = copy.deepcopy(self.model).eval()  # batch norm may reject one image in training
        with self._constants:
            return trace(
                model, self.loss, images_spec, labels_spec, plan.precision, choose_autocast_type(self.recipe.device)
            )

    @property
    def _constants(self) -> AbstractContextManager[None]:
        """The default type with which the training was traced."""
        return use_default_type_of(self.recipe.graph)

    @cached_property
    def _alone(self) -> ModelGraph:
        """The graph of the loss of one image."""
        return self._trace_images(1)

    @cached_property
    def _weights(self) -> ImageWeights:
        """The weight of each image in the mean loss."""
        return ImageWeights.of(lambda images: self._alone if images == 1 else self._trace_images(images))

    def _score_steps(
        self, ask: PredictImages, bad: dict[int, str], loss: Loss
    ) -> Iterator[tuple[list[tuple[float, float]], Counts]]:
        """Yield each step's (loss, weight) by image, and its counts; both empty if `ask` returns no predictions."""
        graph, meaning = self.forward.graph, find_output_meaning(self.recipe.graph)
        owned = dict(self.recipe.state)
        if isinstance(loss, nn.Module):
            owned |= {f"{LOSS}{name}": tensor for name, tensor in (*loss.named_buffers(), *loss.named_parameters())}
        for members, answers in self._predict_steps(ask, bad):
            if not answers:
                yield [], Counts()
                continue
            # The step is filled up with copies of its last image: only the first `members` are evaluated.
            labels = next(answer.labels for answer in answers if answer.labels is not None)[:members]
            whole = join_predictions(
                self.forward.programs, [answer.parts for answer in answers], graph.specs[graph.prediction]
            )[:members]
            whole = whole.to(_choose_loss_type(whole.dtype))
            pairs = zip(whole.split(1), labels.split(1), strict=True)
            with self._constants:
                losses = [
                    (float(loss(scores, label)), self._weights.compute_weight(label, owned)) for scores, label in pairs
                ]
            yield losses, count_predictions(whole, labels, meaning)

    def _predict_steps(self, ask: PredictImages, bad: dict[int, str]) -> Iterator[tuple[int, Sequence[PredictedBatch]]]:
        """Yield the predictions of all images in order, step by step. Copies of the last image fill the last step."""
        size = self.forward.step_specs["images"].shape[0]
        waiting = list(range(len(self.images)))
        while waiting:
            members = waiting[:size]
            if len(members) < size:  # bad images may have left fewer than were counted before the first step
                _check_exact(self.forward, len(self.images) - len(bad))
            unreadable, answers = ask([*members, *members[-1:] * (size - len(members))])
            if unreadable and self.on_bad_image == "raise":
                raise ImageError(next(iter(unreadable.values())))
            bad.update(unreadable)
            # A step with a bad image has no predictions: the same step is tried again without that image.
            waiting = [index for index in waiting if index not in unreadable] if unreadable else waiting[size:]
            if not unreadable:
                yield len(members), answers


def is_exact(recipe: Recipe, images: int, at_once: bool = False) -> bool:
    """Return whether ranks predict `images` images as one process does, step by step or (`at_once`) in one batch.

    A batch norm without running statistics normalises an image by those beside it. So copies that fill a step would
    change its results, and so would the cut into micro-batches.
    """
    return not is_batch_dependent(recipe.graph) or _fits_steps(recipe, images, at_once)


def _fits_steps(recipe: Recipe, images: int, at_once: bool) -> bool:
    """Return whether images have the same ones beside them as in one process."""
    if at_once:  # the other micro-batches are filled up with copies of this one
        return images == recipe.graph.inputs["images"].shape[0]
    return recipe.plan.micro_batches == 1 and images % recipe.step_specs["images"].shape[0] == 0


def warn_of_mixing(model: nn.Module, recipe: Recipe, images: int, stacklevel: int, at_once: bool = False) -> None:
    """Warn if the model may predict an image by those beside it, and ranks predict `images` images otherwise."""
    if _fits_steps(recipe, images, at_once) or not (where := find_mixed_images(model, recipe)):
        return
    micro_batch, step = recipe.graph.inputs["images"].shape[0], recipe.step_specs["images"].shape[0]
    advice = f"Give {micro_batch} images"
    if not at_once:
        advice = f"Give a multiple of {step} images{' to a plan with one micro-batch' * (step > micro_batch)}"
    warnings.warn(
        "The model computes with several images at once in evaluation mode, too, as far as its trace tells (see "
        f"{where}). Of {images} images, ranks predict {micro_batch} at a time, and fill up with copies: the results "
        f"are not those of model.eval() for all {images}. {advice}, or use model.eval() itself.",
        stacklevel=stacklevel + 1,
    )


def _check_exact(recipe: Recipe, images: int) -> None:
    """Raise ImageError if the scores of `images` held-out images would not be those of one process."""
    if is_exact(recipe, images):
        return
    step, parts = recipe.step_specs["images"].shape[0], recipe.plan.micro_batches
    wrong = f"{images} held-out images are no multiple of a step's {step}. Give a multiple of {step}"
    if parts > 1:
        wrong = f"A step is computed in {parts} micro-batches. Use a plan with one (parts=1)"
    raise ImageError(
        "The model has a batch norm without running statistics, which normalises an image by those beside it. "
        f"{wrong}, or leave held_out away."
    )


def _choose_loss_type(prediction: torch.dtype) -> torch.dtype:
    """Return the type in which a loss is computed of predictions: autocast keeps the digits of a loss in training."""
    return torch.promote_types(prediction, torch.float32)


def collect_state_dict(recipe: Recipe, ranks: Sequence[Mapping[str, State]], owner: str = "model") -> dict[str, Tensor]:
    """Collect the ranks' tensors (from `RankTraining.copy_tensors`) into a state dict of the model or the `loss`."""
    names = recipe.names.get(owner, StateNames())
    tensors = {
        name: tensor
        for rank in ranks
        for name, tensor in {**rank["weights"], **rank["buffers"], **rank["kept"]}.items()
    }
    return {name: tensors[key] for name, key in names.on_ranks.items()}


def evaluate_on_ranks(world: World, training: RankTraining, held_out: HeldOutSet, evaluation: RankEvaluation) -> Scores:
    """Compute the scores of a training's current state, on every rank; rank 0 evaluates the predictions. Collective.

    Raises ImageError, on every rank, if an image cannot be read.
    """

    def predict_images(numbers: Sequence[int]) -> tuple[Mapping[int, str], Sequence[PredictedBatch]]:
        batch = evaluation.predict(numbers)
        return batch.bad, world.gather(batch)

    evaluation.begin()
    scores = held_out.compute_scores(predict_images, lambda: world.all_gather(training.copy_tensors()))
    return next(rank_scores for rank_scores in world.all_gather(scores) if rank_scores is not None)
