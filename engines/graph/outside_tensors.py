"""Tensors that a traced model or loss reads without owning them: constants of the trace, unless training changes them.

A trace holds such a tensor with its present values. That is wrong for a weight or buffer of the model that the loss
reads, and for any other tensor that is trained: no gradient would reach it, and it would never change.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import is_fake

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.exported_nodes import find_current_line, find_source_line
from mpi4dl_nb.engines.graph.model_graph import MODEL
from mpi4dl_nb.engines.graph.owners import iterate_owners

_REMEDY = (
    "Compute this in the model's forward and return it beside the prediction, for a loss of both; for an L2 penalty, "
    "use the optimiser's weight_decay."
)


@dataclass(frozen=True)
class OwnedMemory:
    """The memory of the weights and buffers of a model and its loss, and of other tensors that require a gradient.

    Tensors are found by their addresses, so that views, `.detach()`, `.data` and NumPy's arrays of a weight count too.
    `owned` maps "model" and "loss" to their tensors by name. `trained` are other tensors that a trace has read and that
    require a gradient. `lines` maps the names of the model's tensors to the first line that reads their real values.
    """

    owned: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    trained: list[Tensor] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *owners: object) -> OwnedMemory:
        """Return the memory of a model, and of its loss if given. Raises TraceError if two tensors overlap."""
        owned = {
            prefix.removesuffix("."): {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
            for prefix, owner in iterate_owners(*owners)
        }
        # A loss that holds the model's parameters themselves is refused with its parameters.
        distinct = {
            id(tensor): (f"{name} of the {what}", tensor)
            for what, tensors in owned.items()
            for name, tensor in tensors.items()
            if is_real(tensor) and tensor.numel()
        }
        ends: dict[object, tuple[int, str]] = {}
        for name, tensor in sorted(distinct.values(), key=lambda pair: _get_addresses(pair[1])):
            start, end = _get_addresses(tensor)
            before, other = ends.get(tensor.device, (0, ""))
            if start < before:
                raise TraceError(
                    f"{name} shares memory with {other}, which ranks hold as two tensors: a change of one would not be "
                    "seen in the other. Register one of them, and derive the other from it in forward."
                )
            ends[tensor.device] = end, name
        return cls(owned)

    def find_name(self, tensor: Tensor) -> str | None:
        """Return the name of a weight or buffer that shares memory with a tensor."""
        for tensors in self.owned.values():
            for name, owned in tensors.items():
                if _share_memory(tensor, owned):
                    return name
        return None

    def note_read(self, tensor: Tensor) -> None:
        """Record that the trace reads a real tensor, if training would change it."""
        if name := self.find_name(tensor):
            self.lines.setdefault(name, find_current_line())
        elif tensor.requires_grad and not any(tensor is known for known in self.trained):
            self.trained.append(tensor)

    def is_trained(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with one that is trained elsewhere."""
        return any(_share_memory(tensor, known) for known in self.trained)

    def make_memo(self) -> dict[int, Any]:
        """Return a memo for `deepcopy` that keeps all weights and buffers, and the memory of their views."""
        tensors = [tensor for named in self.owned.values() for tensor in named.values()]
        storages = [tensor.untyped_storage() for tensor in tensors if is_real(tensor)]
        memo: dict[Any, Any] = {id(tensor): tensor for tensor in tensors}
        memo["torch"] = {storage._cdata: storage for storage in storages}
        return memo


def is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has values in memory, unlike those of a trace."""
    return not is_fake(tensor) and not tensor.is_meta and tensor.layout is torch.strided


def _get_addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel() or not is_real(one) or not is_real(other) or one.device != other.device:
        return False
    (first, end), (start, stop) = _get_addresses(one), _get_addresses(other)
    return first < stop and start < end


def check_lifted_tensors(module: fx.GraphModule, names: Mapping[str, str], memory: OwnedMemory) -> None:
    """Raise TraceError if an exported module reads a tensor as a constant that training changes.

    `names` are those of the weights and buffers that the module owns.
    """
    reads = (node for node in module.graph.nodes if node.op == "get_attr" and str(node.target) not in names)
    values = ((node, operator.attrgetter(str(node.target))(module)) for node in reads if node.users)
    lifted = [(node, value) for node, value in values if isinstance(value, Tensor)]
    if owned := [(name, node) for node, tensor in lifted if (name := memory.find_name(tensor))]:
        first, node = owned[0]
        owner = "model" if first in memory.owned["model"] else "loss"
        read = f"{format_names([name for name, _ in owned])} of the {owner}"
        read += _describe_line(node, memory.lines.get(first, ""))
        if _is_in_loss(node):
            raise TraceError(
                f"The loss reads {read}. Ranks would take the present values for constants: no gradient would reach "
                f"them from there, and they would not follow training. {_REMEDY}"
            )
        raise TraceError(
            f"The model's forward reads {read}, but not as an attribute of a module (rather in a closure, or by a view "
            "that was made before). Ranks would take the present values for constants. Read it as an attribute, such "
            "as self.weight, in forward."
        )
    for node, tensor in lifted:
        if memory.is_trained(tensor):
            raise TraceError(
                f"The {'loss' if _is_in_loss(node) else 'model'} reads a tensor of shape {tuple(tensor.shape)} that "
                f"requires a gradient but is no parameter of the model or the loss{_describe_line(node, '')}. Ranks "
                "would not train it. Make it a parameter of the model, or of a loss that is an nn.Module; if it is "
                "fixed, call its requires_grad_(False) before."
            )


def _describe_line(lifted: fx.Node, line: str) -> str:
    line = line or find_source_line(next(iter(lifted.users)))
    return f" ({line})" if line else ""


def _is_in_loss(lifted: fx.Node) -> bool:
    stack = list((next(iter(lifted.users)).meta.get("nn_module_stack") or {}).values())
    return not (stack and f"{stack[-1][0]}.".startswith(MODEL))
