"""Pickling for ranks: functions and classes by name if ranks can import them, otherwise by value."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

__all__ = ["pack"]

_registry = RLock()  # cloudpickle's list of modules is shared by all threads


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self.modules = modules

    def reducer_override(self, obj: Any) -> Any:
        # Pickling a view would send the storage of its whole image to every rank: send a copy of the tile.
        if (
            type(obj) is Tensor
            and not obj.requires_grad
            and obj.layout is torch.strided
            and obj.untyped_storage().nbytes() > obj.nbytes
        ):
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        # By these names the sender knows which modules ranks will import.
        if isinstance(obj, FunctionType | type):
            self.modules.add(obj.__module__)
        elif isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        return super().reducer_override(obj)


def pack(value: Any, by_value: Collection[str] = (), modules: set[str] | None = None) -> bytes:
    """Pickle a value, by value for functions and classes of notebook cells and of the modules `by_value`.

    The names of modules in the value, and of the modules of its functions and classes, are added to `modules`.
    """
    with io.BytesIO() as file, _pickle_by_value(by_value):
        _Pickler(file, set() if modules is None else modules).dump(value)
        return file.getvalue()


@contextmanager
def _pickle_by_value(by_value: Collection[str]) -> Iterator[None]:
    """Within the context, cloudpickle sends the contents of these modules instead of their names."""
    if not by_value:
        yield
        return
    with _registry:
        # A module that the user has registered already stays registered afterwards.
        named = {module.__name__: module for module in map(sys.modules.__getitem__, by_value)}  # some have two names
        mine = [named[name] for name in named.keys() - cloudpickle.list_registry_pickle_by_value()]
        for module in mine:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in mine:
                cloudpickle.unregister_pickle_by_value(module)
