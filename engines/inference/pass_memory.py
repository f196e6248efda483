"""Estimate the memory of a pass by running its program on the meta device, where tensors have sizes but no memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.comm.device import choose_memory_format
from engines.comm.loopback import make_loopback_worlds
from engines.layer.graph import ModelGraph, TensorSpec
from engines.program.tile_passes import TilePass
from engines.program.worker import Worker

__all__ = ["estimate_pass_bytes"]


class _MetaMemoryMode(TorchDispatchMode):
    """Counts the bytes of live tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.holders: dict[int, int] = {}

    def count(self, tensor: Tensor) -> Tensor:
        """Count this tensor's storage until the last tensor that shares it is freed."""
        storage = tensor.untyped_storage()
        memory, size = storage._cdata, storage.nbytes()
        # Views share one storage: count it once, and until its last tensor is gone.
        if memory not in self.holders:
            self.now += size
            self.most = max(self.most, self.now)
        self.holders[memory] = self.holders.get(memory, 0) + 1
        weakref.finalize(tensor, self._release, memory, size)
        return tensor

    def _release(self, memory: int, size: int) -> None:
        self.holders[memory] -= 1
        if not self.holders[memory]:
            del self.holders[memory]
            self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self.count(tensor)
        if "convolution" in func._schema.name and args[0].dtype is torch.float64:
            # In float64 ATen unfolds every window of one image (`im2col`), a workspace that is no tensor of the graph.
            # It has one column for each output pixel, or, in a transposed convolution, whose output is larger, one for
            # each input pixel.
            x, weight = args[:2]
            unfolded = tensors[0] if tensors and tensors[0].shape[-1] <= x.shape[-1] else x
            workspace = math.prod(weight.shape[1:]) * math.prod(unfolded.shape[2:]) * x.element_size()
            self.most = max(self.most, self.now + workspace)
        return made


def estimate_pass_bytes(turn: TilePass, graph: ModelGraph, sums: Mapping[str, TensorSpec]) -> int:
    """Return the peak bytes of tensors in one pass, without the weights and the image's pixels as bytes.

    The pass runs on the meta device, where tensors have sizes but no memory. `sums` are the sums known at that time.
    Raises NotImplementedError if a kernel has no meta function.
    """
    # The program that will run on the device runs here, so that no second model has to know what it frees and when.
    # Weights are made before `live` is entered, and are not counted: all passes share them.
    device = torch.device("meta")
    weights = {name: _make_empty(graph.weights[name]) for name in turn.program.weights}
    buffers = {name: _make_empty(graph.buffers[name]) for name in turn.program.buffers}
    worker = Worker(turn.program, make_loopback_worlds(1)[0], weights, buffers, device=device)
    live = _MetaMemoryMode()
    with torch.no_grad(), live:
        inputs = {name: live.count(_make_empty(spec)) for name, spec in sums.items()}
        if turn.window is not None:
            images, tile = graph.inputs["images"], turn.window.tile
            if tile is not None:
                images = TensorSpec((*images.shape[:2], *tile.shape), images.dtype)
            inputs["images"] = live.count(_make_empty(images))
        worker.run({0: inputs})
    return live.most


def _make_empty(spec: TensorSpec) -> Tensor:
    made = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    return made.to(memory_format=choose_memory_format(made.dim()))
