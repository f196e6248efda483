"""What is kept of a model's scores for each pixel: the class, the probabilities, or the scores themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engines.errors import PlanError

__all__ = [
    "KINDS",
    "check_kind",
    "compute_probabilities",
    "convert_image_scores",
    "convert_pixel_scores",
    "get_output_channels",
    "get_output_dtype",
]

KINDS = ("classes", "probabilities", "scores")


def check_kind(kind: str) -> None:
    """Raise PlanError if `kind` is unknown."""
    if kind not in KINDS:
        raise PlanError(f"kind={kind!r} is unknown. Choose one of {', '.join(KINDS)}.")


def get_output_dtype(kind: str, channels: int, computed: str = "float32") -> np.dtype[Any]:
    """Return the dtype of the output: uint8, or uint16 for more than 256 classes; scores are float32 or float64.

    `computed` is the dtype in which the model computes; scores in half precision are kept as float32.
    """
    if kind == "scores":
        return np.dtype(np.float64 if computed == "float64" else np.float32)
    return np.dtype(np.uint16 if kind == "classes" and channels > 256 else np.uint8)


def get_output_channels(kind: str, channels: int) -> int:
    """Return how many numbers are kept for each pixel if the model has `channels` outputs."""
    return 1 if kind == "classes" else channels


def compute_probabilities(scores: Tensor) -> Tensor:
    """Return the probabilities of (N, K, ...) scores: softmax over K classes, or the logistic function if K is 1."""
    scores = scores.float() if scores.element_size() < 4 else scores
    return scores.sigmoid() if scores.shape[1] == 1 else scores.softmax(1)


def convert_pixel_scores(scores: Tensor, kind: str) -> NDArray[Any]:
    """Convert (1, K, h, w) scores to an (h, w, C) array on the host.

    `classes`: C is 1, the class with the highest score (of one score: 1 where it is above 0). `probabilities`: C is K,
    scaled to 0 to 255. `scores`: C is K.
    """
    channels = scores.shape[1]
    if kind == "classes":
        found = (scores > 0) if channels == 1 else scores.argmax(1, keepdim=True)
    elif kind == "probabilities":
        found = compute_probabilities(scores).mul(255).round_()
    else:
        found = scores
    # Only what is kept crosses to the host: for classes, one number per pixel instead of K scores.
    made = found[0].permute(1, 2, 0).cpu()
    made = made.float() if made.is_floating_point() and made.element_size() < 4 else made
    return np.ascontiguousarray(
        made.numpy(), get_output_dtype(kind, channels, str(scores.dtype).removeprefix("torch."))
    )


def convert_image_scores(scores: Tensor, kind: str) -> Any:
    """Convert the (K,) scores of one image to its class, or to the probabilities or scores of all classes."""
    if kind == "classes":
        return int(scores > 0) if scores.shape[0] == 1 else int(scores.argmax(0))
    return compute_probabilities(scores[None])[0] if kind == "probabilities" else scores
