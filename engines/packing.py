"""Values made into bytes for ranks: functions and classes by name where ranks can import them, else as they are."""

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

_registry = RLock()  # cloudpickle has one list of modules, for all threads


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self.modules = modules

    def reducer_override(self, obj: Any) -> Any:
        # A tile that is a view takes the storage of its whole image along, to every rank: send a copy.
        if type(obj) is Tensor and not obj.requires_grad and _is_part(obj):
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, FunctionType | type):
            self.modules.add(obj.__module__)
        elif isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        return super().reducer_override(obj)


def _is_part(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def pack(value: Any, by_value: Collection[str] = (), modules: set[str] | None = None) -> bytes:
    """Pickled, functions and classes of a notebook's cells included, and those of the modules `by_value`.

    `modules` gets the names of those whose functions and classes, or which themselves, are in it.
    """
    with io.BytesIO() as file, _pickle_by_value(by_value):
        _Pickler(file, set() if modules is None else modules).dump(value)
        return file.getvalue()


@contextmanager
def _pickle_by_value(by_value: Collection[str]) -> Iterator[None]:
    """Within it cloudpickle sends what these modules hold, and not its name."""
    if not by_value:
        yield
        return
    with _registry:
        named = {module.__name__: module for module in map(sys.modules.__getitem__, by_value)}  # some have two names
        mine = [named[name] for name in named.keys() - cloudpickle.list_registry_pickle_by_value()]
        for module in mine:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in mine:
                cloudpickle.unregister_pickle_by_value(module)
