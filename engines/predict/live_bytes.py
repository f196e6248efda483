"""Count the bytes of live tensors on one rank while it runs, for comparison with memory predictions.

The kernel's figures for a process (`engines/bench/memory.py`) include the allocator's gaps and all libraries, and do
not exist for ranks that are threads. Here each new tensor storage is counted until its last tensor is freed.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "get_storage_id"]


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes (`now`, `peak`) of tensors that operators of this thread create within the context.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     x = torch.ones(256)
    ...     del x
    ...     y = torch.ones(8)
    >>> live.now, live.peak
    (32, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Start a new peak from the current bytes."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Arguments made before the context are unknown, and must not count when an in-place operator returns them.
        given = {get_storage_id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        for item in tree_leaves(made):
            if not isinstance(item, Tensor):
                continue
            storage, place = item.untyped_storage(), get_storage_id(item)
            size = storage.nbytes()
            # A view shares its storage with a tensor that was given, or that is known: its bytes count once.
            if size and place not in given and place not in self._known:
                self._known.add(place)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._release, place, size)
        return made

    def _release(self, place: int, size: int) -> None:
        # The address may be used again by a later storage: it must be unknown by then.
        self._known.discard(place)
        self.now -= size


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return int(tensor.untyped_storage()._cdata)
