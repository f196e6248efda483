"""What a mean over class numbers divides by, of labels in tiles or in shares."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.layer.graph import Node
from engines.program.builder import Builder
from engines.spatial.kernels import local_kernel
from engines.spatial.ops import entry

__all__ = ["counted"]


@local_kernel("loss.counted.default")
def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """(), float64: the labels that are not ignored, each times the weight of its class."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().double()
    return weight.double()[torch.where(valid, target, 0)].mul(valid).sum()


@entry("loss.counted.default", images=("target",), shared=True)
def counted_on_tiles(b: Builder, node: Node) -> None:
    """Each rank counts its own labels, and the ranks of the stage add that up."""
    target, weight, ignore_index = node.arguments.values()
    own = b.local(f"{node.name}.own", node.operator, b.owned(target), weight, ignore_index, like=node.spec)
    b.local(node.name, "aten.alias.default", b.all_reduce(own), like=node.spec)
