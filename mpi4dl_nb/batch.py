"""A batch as a step takes it, or in words what is wrong with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.layer.graph import TensorSpec
from engines.training import Loss, Recipe

__all__ = ["checked"]


def checked(recipe: Recipe, loss: Loss, images: Any, labels: Any) -> dict[str, Tensor]:
    """Images and labels as tensors of the recipe's types.

    Raises ImageError for another shape, fractions in place of numbers, or a label beyond the model's classes.
    """
    given = {"images": images, "labels": labels}
    whole = {name: _tensor(name, each, recipe) for name, each in given.items()}
    ignored = getattr(loss, "ignore_index", -100)
    _check_classes(whole["labels"], recipe.graph.specs[recipe.graph.prediction], ignored)
    return whole


def _tensor(name: str, given: Any, recipe: Recipe) -> Tensor:
    spec, tensor, batches = recipe.step_specs[name], torch.as_tensor(given), recipe.plan.batches
    if tuple(tensor.shape) != spec.shape:
        several = f" ({batches} batches make a step of this plan)" if batches > 1 else ""
        raise ImageError(
            f"{name} have shape {tuple(tensor.shape)} but the training was made for {spec.shape}{several}. "
            "Change the batch, or make a Training with this image_shape."
        )
    if tensor.is_floating_point() and not spec.is_floating:
        raise ImageError(
            f"{name} are {tensor.dtype}, but the training was made for {spec.dtype}. Give whole numbers, or "
            "make a Training with labels=TensorSpec(shape, dtype)."
        )
    return tensor.detach().to(getattr(torch, spec.dtype))


def _check_classes(labels: Tensor, prediction: TensorSpec, ignored: int) -> None:
    """Class numbers beyond the model's answers would fail in a rank."""
    if labels.is_floating_point() or len(prediction.shape) < 2:
        return
    classes = prediction.shape[1]
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
    if wrong.numel():
        raise ImageError(
            f"A label is {int(wrong.max())}, but the model answers for {classes} classes (0 to {classes - 1}). "
            "Change the labels, or the model's num_classes."
        )
