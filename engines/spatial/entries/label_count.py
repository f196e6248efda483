"""The divisor of a mean over class numbers, for labels in tiles or shares."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.layer.graph import Node
from engines.program.builder import Builder
from engines.spatial.kernels import register_kernel
from engines.spatial.operator_table import register_rule

__all__ = ["count_labels"]


@register_kernel("loss.counted.default")
def count_labels(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return a float64 scalar: the number of labels that are not ignored, each weighted by its class."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().double()
    # `weight[target[valid]]` would have a shape that depends on the labels; this one suits a compiled segment.
    return weight.double()[torch.where(valid, target, 0)].mul(valid).sum()


@register_rule("loss.counted.default", images=("target",), shared=True)
def lower_count_labels(b: Builder, node: Node) -> None:
    """Count the rank's own labels, and sum the counts over the ranks of the stage."""
    target, weight, ignore_index = node.arguments.values()
    own = b.add_local_op(f"{node.name}.own", node.operator, b.crop_to_own(target), weight, ignore_index, like=node.spec)
    b.add_local_op(node.name, "aten.alias.default", b.all_reduce(own), like=node.spec)
