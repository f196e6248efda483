"""Convert a batch to what a step takes, or raise an error that explains what is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.loss.label_spec import find_label_specs
from engines.training import Recipe

__all__ = ["prepare_batch"]


def prepare_batch(recipe: Recipe, images: Any, labels: Any) -> dict[str, Tensor]:
    """Return images and labels as tensors of the recipe's dtypes.

    Raises ImageError for a wrong shape, for floats in place of integers or the reverse, or for a label beyond the
    classes of the loss.
    """
    whole, batches = {}, recipe.plan.batches
    for name, given in (("images", images), ("labels", labels)):
        spec, tensor = recipe.step_specs[name], torch.as_tensor(given)
        if tuple(tensor.shape) != spec.shape:
            several = f" ({batches} batches make a step of this plan)" if batches > 1 else ""
            other = "labels=EXAMPLE, a tensor like the labels of a batch" if name == "labels" else "this image_shape"
            raise ImageError(
                f"{name} have shape {tuple(tensor.shape)} but the training was made for {spec.shape}{several}. "
                f"Change the batch, or make a Training with {other}."
            )
        if tensor.is_floating_point() and not spec.is_floating:
            raise ImageError(
                f"{name} are {tensor.dtype}, but the training was made for {spec.dtype}. Give whole numbers, or "
                "make a Training with labels=EXAMPLE, a tensor like the labels of a batch."
            )
        # A picture's bytes could be cast without an error; that they are not scaled would only show as poor learning.
        if name == "images" and spec.is_floating and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ImageError(
                f"images are {tensor.dtype}, but the training computes in {spec.dtype}, and a cast would not scale "
                "them. Give images.float() / 255, as images of files are given, or images.float() for the numbers as "
                "they are."
            )
        whole[name] = tensor.detach().to(getattr(torch, spec.dtype))
    # An index beyond the classes must not reach a GPU: the assertion in its kernel leaves the process without that GPU.
    for numbers in find_label_specs(recipe.graph):
        wrong = numbers.find_invalid(whole["labels"])
        if wrong.numel():
            ignores = "" if numbers.ignored is None else f" and ignores {numbers.ignored}"
            raise ImageError(
                f"A label is {int(wrong.max())}, but the loss takes numbers of {numbers.classes} classes (0 to "
                f"{numbers.classes - 1}){ignores}. Change the labels, the loss's ignore_index, or the model's "
                "num_classes."
            )
    return whole
