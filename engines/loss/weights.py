"""Weights of images in a mean loss, so that the mean equals the loss of all images in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.layer.graph import ModelGraph, Node, Ref
from engines.loss.whole_loss import with_whole_loss
from engines.spatial.kernels import get_kernel
from engines.spatial.local_rules import split_arguments

__all__ = ["ImageWeights", "compute_mean_loss"]


@dataclass(frozen=True)
class ImageWeights:
    """The denominator of the loss of one image: `nodes` compute `source` from its labels.

    All images have the same weight if the loss has no denominator that depends on the labels, or is no such mean.
    """

    nodes: Sequence[Node] = ()
    source: str = ""

    @classmethod
    def of(cls, trace: Callable[[int], ModelGraph]) -> ImageWeights:
        """Return the weights for the loss that `trace(images)` traces for a given number of images."""
        whole = with_whole_loss(trace(1), lambda: trace(2), 1).whole
        return cls(whole.nodes, whole.weighed_by or "") if whole else cls()

    def compute_weight(self, labels: Tensor, owned: Mapping[str, Tensor]) -> float:
        """Return the weight of one image with `labels` (1, ...); `owned` are the loss's buffers by graph name."""
        if not self.source:
            return 1.0
        # The nodes that count labels, run one after another by their kernels.
        values: dict[str, Any] = {**owned, "labels": labels, "@device": torch.device("cpu")}
        for node in self.nodes:
            positional, keywords = split_arguments(node, {})
            values[node.name] = get_kernel(node.operator)(
                *_resolve_refs(positional, values), **_resolve_refs(keywords, values)
            )
        return float(values[self.source])


def _resolve_refs(value: Any, values: Mapping[str, Any]) -> Any:
    match value:
        case Ref(name):
            return values[name]
        case list() | tuple():
            return [_resolve_refs(item, values) for item in value]
        case dict():
            return {key: _resolve_refs(item, values) for key, item in value.items()}
        case _:
            return value


def compute_mean_loss(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of the losses of images. Losses of weight 0, which are NaN, are skipped.

    >>> compute_mean_loss([2.0, float("nan"), 5.0], [3.0, 0.0, 1.0])
    2.75
    """
    if not any(weights):
        return float("nan")
    pairs = zip(losses, weights, strict=True)
    return sum(weight * loss for loss, weight in pairs if weight) / sum(weights)
