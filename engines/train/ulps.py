"""Perturb weights, images and low-precision results by an ulp, a unit in the last place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from engines.graph.model_graph import ModelGraph
from engines.train.oracle import ReferenceTraining

__all__ = ["DOUBLE", "UlpNoiseMode", "find_lowest_precision", "nudge_images", "nudge_weights"]

DOUBLE = torch.finfo(torch.float64).eps
"""Machine epsilon of float64."""


def find_lowest_precision(graph: ModelGraph) -> tuple[float, str]:
    """Return the machine epsilon of a graph's least precise operator, and the operator's place in the user's model."""
    found = [
        (torch.finfo(getattr(torch, node.spec.dtype)).eps, f"{node.spec.dtype} ({node.where})")
        for node in graph.nodes
        if node.spec is not None and node.spec.dtype in ("float64", "float32", "float16", "bfloat16")
    ]
    return max(found, key=lambda each: each[0], default=(DOUBLE, ""))


def nudge_images(batch: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the batch with every element of its images changed by an ulp. Labels, which may have bounds, stay."""
    random = torch.Generator().manual_seed(seed)
    return {name: _nudge(t, random) if name == "images" and t.is_floating_point() else t for name, t in batch.items()}


def nudge_weights(process: ReferenceTraining, seed: int) -> None:
    """Change every element of the weights of a process by an ulp."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in process.weights.values():
            if weight.is_floating_point():
                weight.copy_(_nudge(weight, random))


def _nudge(tensor: Tensor, random: torch.Generator) -> Tensor:
    up = torch.randint(2, tensor.shape, generator=random).bool()
    # Each element moves to its next neighbour above or below.
    far = torch.full_like(tensor, torch.inf)
    return torch.nextafter(tensor, torch.where(up, far, -far))


class UlpNoiseMode(TorchDispatchMode):
    """Changes every result computed in a lower precision than float64 by an ulp, forward and backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and perturb its results, except views and in-place results, which were perturbed before."""
        out = func(*args, **(kwargs or {}))
        # Noise on a view or an in-place result would be added to the same memory a second time.
        fresh = not any(result.alias_info for result in func._schema.returns)
        return tree_map_only(Tensor, self._add_noise, out) if fresh else out

    def _add_noise(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).eps <= DOUBLE:
            return tensor
        # Times 1 + eps or 1 - eps: `nextafter` does not exist for half precisions on all devices.
        sign = 2 * torch.randint(2, tensor.shape, generator=self.random, dtype=torch.int8) - 1
        return tensor * (1 + sign.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)
