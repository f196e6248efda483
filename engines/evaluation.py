"""How good a model is on images that it is not trained on: in evaluation mode, nothing in it changes.

`HeldOut` is what a training asks after each epoch. Here one process runs the plain model on whole images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engines.comm.device import choose_device
from engines.comm.together import together
from engines.comm.world import World
from engines.errors import ImageError
from engines.images.feed import said
from engines.images.labelled import LabelledImages
from engines.images.own import OwnPart
from engines.layer.answers import prediction_of
from engines.layer.names import OWNERS, StateNames
from engines.metrics import Counts, Scores, count
from engines.training import Loss, RankTraining, Recipe

__all__ = ["HeldOut", "evaluate_on_ranks", "plain_state"]

State = Mapping[str, Tensor]


class _Whole:
    """Cuts nothing: one process has all of its one micro-batch."""

    def cut(self, inputs: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        return {0: dict(inputs)}


@dataclass(frozen=True)
class HeldOut:
    """Images beside the training's, and all that is needed to judge a state of its model on them.

    A bad image ends the training or is left out, as `on_bad_image` says. Raises ImageError where there are none.
    """

    model: nn.Module
    loss: Loss
    recipe: Recipe
    images: LabelledImages
    on_bad_image: str = "raise"

    def __post_init__(self) -> None:
        if not len(self.images):
            raise ImageError("There are no held-out images. Give some, or leave held_out away.")

    def scores(self, ranks: Sequence[Mapping[str, State]]) -> Scores:
        """Of the model and its loss with the weights and statistics that the ranks have. Raises ImageError."""
        device = choose_device(self.recipe.device, 0)
        dtype = getattr(torch, self.recipe.graph.inputs["images"].dtype)
        model = copy.deepcopy(self.model).to(dtype)
        model.load_state_dict(plain_state(self.recipe, ranks))
        model.to(device).eval()
        loss = copy.deepcopy(self.loss)
        if isinstance(loss, nn.Module):
            loss.load_state_dict(plain_state(self.recipe, ranks, "loss"))
            loss.to(device, dtype).eval()
        total, judged, counts = 0.0, 0, Counts()
        bad: list[str] = []
        with torch.inference_mode():
            for batch in self._batches(bad):
                images, labels = (batch[name].to(device) for name in ("images", "labels"))
                prediction = prediction_of(model(images))
                total, judged = total + float(loss(prediction, labels)) * len(images), judged + len(images)
                counts += count(prediction, labels) if isinstance(prediction, Tensor) else Counts()
        if not judged:
            raise ImageError(f"None of the {len(self.images)} held-out images can be read, the first one: {bad[0]}")
        return Scores(total / judged, counts, tuple(bad))

    def _batches(self, bad: list[str]) -> Iterator[Mapping[str, Tensor]]:
        """All images in order, as many at once as a micro-batch has."""
        inputs = self.recipe.graph.inputs
        size = inputs["images"].shape[0]
        one = {name: replace(spec, shape=(1, *spec.shape[1:])) for name, spec in inputs.items()}
        own = OwnPart(_Whole(), self.images, one)  # type: ignore[arg-type]
        gathered: list[Mapping[str, Tensor]] = []
        for index in range(len(self.images)):
            try:
                gathered.append(own.read([index])[0])
            except (ImageError, OSError) as error:
                if self.on_bad_image == "raise":
                    raise
                bad.append(said(self.images.name(index), error))
            if len(gathered) == size:
                yield _joined(gathered)
                gathered = []
        if gathered:
            yield _joined(gathered)


def _joined(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def plain_state(recipe: Recipe, ranks: Sequence[Mapping[str, State]], owner: str = "model") -> dict[str, Tensor]:
    """What the ranks have (as `RankTraining.tensors` says), for `load_state_dict` of the model or of the `loss`."""
    names = recipe.names.get(owner, StateNames())
    found = {
        name: tensor
        for rank in ranks
        for name, tensor in {**rank["weights"], **rank["buffers"], **rank["kept"]}.items()
    }
    return {name: found[names.held.get(name, OWNERS[owner] + name)] for name in names.names}


def evaluate_on_ranks(world: World, training: RankTraining, held_out: HeldOut) -> Scores:
    """The scores of a training as it is now, on every rank; collective. Rank 0 does the work.

    Raises ImageError, on every rank, where an image cannot be read.
    """
    ranks = world.collect(training.tensors())
    scores = together(world, lambda: None if world.rank else held_out.scores(ranks))
    return next(found for found in world.gather(scores) if found is not None)
