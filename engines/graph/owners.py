"""The owners of tensors, a model and its loss, and the names of their weights and buffers in a trace and on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mpi4dl_nb.engines.graph.model_graph import LOSS, MODEL

OWNERS = {"model": MODEL, "loss": LOSS}
"""The owners of tensors, and the prefixes of their names on the ranks."""


def iterate_owners(*owners: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model and its loss, as far as they are modules, each with the prefix of its tensors' names on ranks."""
    for prefix, owner in zip(OWNERS.values(), owners, strict=False):
        if isinstance(owner, nn.Module):
            yield prefix, owner


def collect_buffers(*owners: object) -> dict[str, Tensor]:
    """Return the buffers of a model and its loss, by their names in the trace."""
    buffers: dict[str, Tensor] = {}
    for prefix, owner in iterate_owners(*owners):
        buffers |= {prefix + name: buffer for name, buffer in owner.named_buffers(remove_duplicate=False)}
    return buffers


def iterate_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """Yield all attributes of a model's modules: the module, the name, the value, and the path from the model."""
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):  # another thread may be tracing the model
            yield module, name, value, f"{path}.{name}".lstrip(".")


def find_first_names(*owners: object) -> dict[str, str]:
    """Map every name of a weight or buffer of a model, and of its loss if given, to the first name of that tensor."""
    names: dict[str, str] = {}
    for prefix, owner in iterate_owners(*owners):
        first: dict[int, str] = {}
        for named in (owner.named_parameters, owner.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                names[prefix + name] = first.setdefault(id(tensor), prefix + name)
    return names
