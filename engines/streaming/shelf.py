"""What a tile holds while others compute: its tensors stay, their memory goes to a store and comes back in time.

A tensor whose storage is emptied keeps its shape, its place in autograd's graph and its views; so nothing that runs
has to know. Small tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.streaming.store import Slot, Store

__all__ = ["Shelf"]

LEAST_BYTES = 1 << 14


@dataclass(slots=True)
class _Entry:
    """A storage that has a copy in the store; `away`: only there."""

    storage: torch.UntypedStorage
    slot: Slot
    away: bool = False


class Shelf:
    """The storages of one tile, by their address as objects; those of `stays` never leave."""

    def __init__(self, store: Store, stays: Iterable[Tensor] = ()) -> None:
        self.store = store
        self._stay = {tensor.untyped_storage()._cdata for tensor in stays}
        self._entries: dict[int, _Entry] = {}
        self._used: set[int] = set()
        self._back: set[int] = set()

    def use(self, tensors: Iterable[Tensor], changes: bool = False) -> None:
        """Bring them back, for as long as the present instruction runs; `changes`: their copies are of no use then."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self._used.add(key)
            entry = self._entries.get(key)
            if entry is not None and entry.away:
                entry.storage.resize_(entry.slot.size_bytes)
                self.store.get(entry.slot, entry.storage)
                entry.away = False
                self._back.add(key)
            if entry is not None and changes:
                self._forget(key)

    def done(self) -> None:
        """The present instruction has ended."""
        self._used.clear()

    def put_away(self, touched: Iterable[Tensor]) -> None:
        """All that was made, or brought back, since the last time, but for what is in use."""
        for key in self._back - self._used:
            self._empty(self._entries[key])
        self._back &= self._used
        for tensor in touched:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._entries and key not in self._used | self._stay and _is_worth_it(storage):
                self._entries[key] = entry = _Entry(storage, self.store.put(storage))
                self._empty(entry)

    @staticmethod
    def _empty(entry: _Entry) -> None:
        entry.storage.resize_(0)
        entry.away = True

    def _forget(self, key: int) -> None:
        self.store.free(self._entries.pop(key).slot)
        self._back.discard(key)

    def clear(self) -> None:
        """Nothing is needed any more."""
        for key in list(self._entries):
            self._forget(key)
        self._used.clear()


def _is_worth_it(storage: torch.UntypedStorage) -> bool:
    """Small ones stay; so does memory that others look into, which cannot be resized."""
    return storage.nbytes() >= LEAST_BYTES and storage.resizable()
