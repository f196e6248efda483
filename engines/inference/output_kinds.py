"""What of a model's scores is kept for each pixel: the class, the probabilities, or the scores themselves."""

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
    """Raises PlanError for a kind that there is not."""
    if kind not in KINDS:
        raise PlanError(f"kind={kind!r} is unknown. Choose one of {', '.join(KINDS)}.")


def get_output_dtype(kind: str, channels: int, computed: str = "float32") -> np.dtype[Any]:
    """What is kept in: bytes, but for scores (as they are `computed`, float32 for half) and more than 256 classes."""
    if kind == "scores":
        return np.dtype(np.float64 if computed == "float64" else np.float32)
    return np.dtype(np.uint16 if kind == "classes" and channels > 256 else np.uint8)


def get_output_channels(kind: str, channels: int) -> int:
    """How many numbers are kept for each pixel, of a model that answers with so many."""
    return 1 if kind == "classes" else channels


def compute_probabilities(scores: Tensor) -> Tensor:
    """(N, K, ...) by softmax over the classes; one score is that of a yes, by the logistic function."""
    scores = scores.float() if scores.element_size() < 4 else scores
    return scores.sigmoid() if scores.shape[1] == 1 else scores.softmax(1)


def convert_pixel_scores(scores: Tensor, kind: str) -> NDArray[Any]:
    """(1, K, h, w) -> (h, w, C) on the host.

    `classes`: C is 1, the class with the highest score (of one score: 1 where it is above 0). `probabilities`: C is K,
    from 0 to 255. `scores`: C is K.
    """
    channels = scores.shape[1]
    if kind == "classes":
        found = (scores > 0) if channels == 1 else scores.argmax(1, keepdim=True)
    elif kind == "probabilities":
        found = compute_probabilities(scores).mul(255).round_()
    else:
        found = scores
    made = found[0].permute(1, 2, 0).cpu()
    made = made.float() if made.is_floating_point() and made.element_size() < 4 else made
    return np.ascontiguousarray(
        made.numpy(), get_output_dtype(kind, channels, str(scores.dtype).removeprefix("torch."))
    )


def convert_image_scores(scores: Tensor, kind: str) -> Any:
    """Of one image, (K,): its class, or the probabilities or scores of all."""
    if kind == "classes":
        return int(scores > 0) if scores.shape[0] == 1 else int(scores.argmax(0))
    return compute_probabilities(scores[None])[0] if kind == "probabilities" else scores
