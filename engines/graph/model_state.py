"""What a trace of a model depends on beside its code and its inputs: modes, trained weights, and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from mpi4dl_nb.engines.graph.python_values import iterate_plain_attributes


@dataclass(frozen=True)
class ModelState:
    """The state of a model and its loss that a trace takes over, to be compared with a later one.

    By name: the type of each module and its mode (training or evaluation), whether each weight is trained, and the text
    of each plain attribute.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout())
    >>> state = ModelState.of(model)
    >>> _ = model[1].eval()
    >>> ModelState.of(model) == state
    False
    """

    modes: frozenset[tuple[str, type, bool]]
    trained: tuple[tuple[str, bool], ...]
    attributes: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, *owners: object) -> ModelState:
        """Return the present state of a model, and of its loss if that is a module."""
        modes = frozenset((name, type(module), module.training) for name, module in _iterate_modules(owners))
        parts = nn.ModuleList(owner for owner in owners if isinstance(owner, nn.Module))
        trained = tuple((name, weight.requires_grad) for name, weight in parts.named_parameters())
        attributes = (attribute for module in parts for attribute in iterate_plain_attributes(module))
        return cls(modes, trained, tuple((path, repr(value)) for _, _, value, path in attributes))

    @contextmanager
    def apply_modes(self, *owners: object) -> Iterator[None]:
        """Within the context, put the same modules into the modes that this state recorded."""
        modules = _iterate_modules(owners)
        changed = [module for name, module in modules if (name, type(module), not module.training) in self.modes]
        for module in changed:
            module.training = not module.training
        try:
            yield
        finally:
            for module in changed:
                module.training = not module.training


def _iterate_modules(owners: tuple[object, ...]) -> Iterator[tuple[str, nn.Module]]:
    for index, owner in enumerate(owners):
        if isinstance(owner, nn.Module):
            yield from owner.named_modules(prefix=str(index))
