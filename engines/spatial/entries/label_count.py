"""What a mean over class numbers divides by, of labels in tiles or in shares."""

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
    """(), float64: the labels that are not ignored, each times the weight of its class."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().double()
    return weight.double()[torch.where(valid, target, 0)].mul(valid).sum()


@register_rule("loss.counted.default", images=("target",), shared=True)
def lower_count_labels(b: Builder, node: Node) -> None:
    """Each rank counts its own labels, and the ranks of the stage add that up."""
    target, weight, ignore_index = node.arguments.values()
    own = b.add_local_op(f"{node.name}.own", node.operator, b.crop_to_own(target), weight, ignore_index, like=node.spec)
    b.add_local_op(node.name, "aten.alias.default", b.all_reduce(own), like=node.spec)
