"""Offloads tensors while other work computes: the tensors stay, and their memory becomes that of a file.

A tensor keeps its shape, its strides and its place in autograd's graph, so no other code is affected. Small tensors
stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engines.offload.min_bytes import LEAST_BYTES
from engines.offload.offload_store import OffloadStore

__all__ = ["Offloader"]


class Offloader:
    """Offloads the tensors of one tile or rank, except those of `stays`.

    The CPU computes directly on memory that a file backs. For a device that cannot (`reads_files=False`), a tensor is
    copied back when an instruction uses it.
    """

    def __init__(self, store: OffloadStore, stays: Iterable[Tensor] = (), reads_files: bool = True) -> None:
        self.store, self.reads_files = store, reads_files
        # A storage is identified by its C++ object: two tensors that are views of one storage move together.
        #
        #   in use (`_used`) --next call (`_later`)--> in the file --fetch--> in use
        #
        # On the CPU, "in the file" means that the tensor's memory is the file's; on a GPU, that the tensor has no
        # memory and `_away` knows its copy in the file.
        self._stay = {tensor.untyped_storage()._cdata for tensor in stays}
        self._used: set[int] = set()
        self._later: list[Tensor] = []
        self._away = WeakTensorKeyDictionary()

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors available until the current instruction ends."""
        back: dict[tuple[object, ...], Tensor] = {}
        for tensor in tensors:
            stored = self._away.pop(tensor, None)
            if stored is not None:
                # Tensors that were views of the same memory must share it again.
                place = stored.data_ptr(), stored.size(), stored.stride()
                if place not in back:
                    back[place] = stored.to(tensor.device, copy=True)
                tensor.data = back[place]
            self._used.add(tensor.untyped_storage()._cdata)

    def end_instruction(self) -> None:
        """Mark the end of the current instruction."""
        self._used.clear()

    def offload(self, touched: Iterable[Tensor]) -> None:
        """Offload these tensors; those in use are offloaded by the next call.

        Tensors that share memory must come in one call, or they no longer share it afterwards.
        """
        stored: dict[int, torch.UntypedStorage] = {}
        tensors, self._later = [*self._later, *touched], []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if (
                storage.nbytes() < LEAST_BYTES
                or key in self._stay
                or tensor in self._away
                or self.store.has_storage(storage)
            ):
                continue
            # Kernels may hold addresses of memory in use; such a tensor is moved by the next call.
            if key in self._used:
                self._later.append(tensor)
                continue
            if key not in stored:
                stored[key] = self.store.put(storage)
            there = torch.empty(0, dtype=tensor.dtype)
            there.set_(stored[key], tensor.storage_offset(), tensor.size(), tensor.stride())
            # `data` is replaced, not the tensor: autograd's nodes, and all names, still refer to the same object.
            if self.reads_files:
                tensor.data = there
            else:
                self._away[tensor] = there
                strides = tensor.stride()
                tensor.data = tensor.new_empty(()).expand(tensor.size())  # free the old memory before allocating anew
                tensor.data = _make_storageless(tensor, strides)

    def clear(self) -> None:
        """Forget all tensors."""
        self._used.clear()
        self._later.clear()
        self._away.clear()


def _make_storageless(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor without memory, of the same shape and those strides, by which autograd lays out gradients."""
    hollow = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    hollow.untyped_storage().resize_(0)
    return hollow
