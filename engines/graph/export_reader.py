"""Read the output of `torch.export` into a `ModelGraph`, and count the floating-point operations of its operators."""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.exported_nodes import (
    describe_location,
    find_source_line,
    get_module_path,
    is_check,
    is_no_grad,
)
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref, TensorSpec, find_gradient_targets, find_ref_names

# Floating-point operations of one operator; a multiply-add counts as two.
#
# PyTorch itself is the table: the operator runs once without memory, and the ATen operators that it calls are counted
# by the formulas of `torch.utils.flop_counter`, which cover convolutions, matrix products and attention. A formula that
# a user registers there for a custom operator is used here, too.

_KNOWN: dict[str, int] = {}


class FlopCount(TorchDispatchMode):
    """Adds up in `total` the FLOPs of all operators that run within it, on any device; 0 for those without a formula.

    >>> with FlopCount() as count:
    ...     product = torch.empty(8, 64, 64, device="meta") @ torch.empty(8, 64, 64, device="meta")
    >>> count.total
    4194304
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one ATen operator. Called by torch."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=output))
        elif packet in _OURS:
            self.total += _OURS[packet](*args)
        return output


def count_flops(node: fx.Node) -> int:
    """Return the forward FLOPs of a traced operator from its shapes: one per output element if there is no formula."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0

    def describe(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return tree_map_only(Tensor, make_tensor_spec, item.meta.get("val"))
        return torch.device("meta") if isinstance(item, torch.device) else item

    # A deep model has few different operators: the key has shapes and settings, but no names.
    arguments = tree_map(describe, (list(node.args), dict(node.kwargs)))
    key = f"{node.target}{arguments}"
    if key in _KNOWN:
        return _KNOWN[key]
    counted = 0
    if any(isinstance(item, TensorSpec) for item in tree_leaves(arguments)):

        def make_meta(spec: TensorSpec) -> Tensor:
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

        args, kwargs = tree_map_only(TensorSpec, make_meta, arguments)
        # An operator that cannot run on the meta device is not refused for want of a count.
        with contextlib.suppress(Exception), torch.no_grad(), FlopCount() as count:
            node.target(*args, **kwargs)  # type: ignore[operator]
            counted = count.total
    _KNOWN[key] = resolve_flops(str(node.target), counted, value.shape)
    return _KNOWN[key]


def resolve_flops(operator: str, counted: int, out: Sequence[int]) -> int:
    """Return `counted`; if it is 0, return one FLOP per output element, and 0 for a cast."""
    return counted or (0 if "_to_copy" in operator else math.prod(out))


def _count_matvec(matrix: Tensor, vector: Tensor) -> int:
    return 2 * matrix.numel()


def _count_trilinear(one: Tensor, two: Tensor, three: Tensor, *expanded_and_summed: Sequence[int]) -> int:
    """Count two products and a sum for each element of the three tensors, broadcast against each other."""
    shapes = []
    for tensor, new_axes in zip((one, two, three), expanded_and_summed, strict=False):
        for axis in new_axes:
            tensor = tensor.unsqueeze(axis)
        shapes.append(tensor.shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


_OURS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _count_matvec,
    torch.ops.aten.dot: _count_matvec,
    torch.ops.aten.vdot: _count_matvec,
    torch.ops.aten.addmv: lambda added, matrix, vector: _count_matvec(matrix, vector),
    torch.ops.aten.addbmm: lambda added, one, other: 2 * one.numel() * other.shape[-1],
    # (queries x keys) scores of `key size` products each, and as many weighted sums of values
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_: (
        2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    ),
    torch.ops.aten._trilinear: _count_trilinear,
}
"""Formulas for products that PyTorch's registry lacks."""


# Reads the output of `torch.export` into a `ModelGraph`.


_BY_VALUE = (
    "{} a tensor whose shape follows from the values of a tensor; only shapes are known. Choose with torch.where, or "
    "assign numbers or whole tensors (y[mask] = 0, y[mask] = z[mask])."
)


_UNCHANGED = tuple(f"aten.{name}." for name in ("contiguous", "flatten", "sum_to_size", "to", "type_as"))
"""Operators that return their argument itself where it has the wanted shape and type already."""


class ExportReader:
    """Reads an exported module without in-place operators into a `ModelGraph`.

    `first_names` maps every name of a weight or buffer to the first name of the same tensor. `has_loss`: the first
    output is the loss.
    """

    def __init__(self, module: fx.GraphModule, first_names: Mapping[str, str], has_loss: bool = True) -> None:
        self.module, self.first_names, self.has_loss = module, first_names, has_loss
        self.names: dict[str, str] = {}  # fx name -> name of the value
        self.nodes: list[Node] = []
        self.inputs: dict[str, TensorSpec] = {}
        self.owned: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}

    def read_graph(self) -> ModelGraph:
        outputs: tuple[str, ...] = ()
        # Each `getitem` comes right after the operator whose outputs it picks. Otherwise a stage could be cut between
        # them, and the outputs would have to travel as a list.
        nodes = (
            member
            for node in self.module.graph.nodes
            if node.target is not operator.getitem
            for member in (node, *(user for user in node.users if user.target is operator.getitem))
        )
        for node in nodes:
            if node.op == "placeholder":
                self.inputs[node.name] = make_tensor_spec(node.meta["val"])
                self.names[node.name] = node.name
            elif node.op == "get_attr":
                tensor = operator.attrgetter(str(node.target))(self.module)
                name = self.first_names.get(str(node.target))
                if name is None:  # not a weight or buffer of the user's: forward made or found it
                    # A name by content: two traces, with other numbers of images, call the same constant the same.
                    numbers = tensor.detach().cpu().contiguous()
                    content = f"{tuple(numbers.shape)} {numbers.dtype} ".encode()
                    content += numbers.view(-1).view(torch.uint8).numpy().tobytes()
                    name = f"constant.{hashlib.sha256(content).hexdigest()[:16]}"
                    self.constants[name] = tensor.detach()
                self.owned[name], self.names[node.name] = tensor, name
            elif node.op == "output":
                outputs = tuple(find_ref_names(self._to_refs(node.args[0])))
            elif not is_check(node):
                self._read_call(node)
        return self._build_graph(outputs[0], outputs[1:]) if self.has_loss else self._build_graph(None, outputs)

    def _build_graph(self, loss: str | None, answers: Sequence[str]) -> ModelGraph:
        specs = {name: make_tensor_spec(tensor) for name, tensor in self.owned.items()}
        # A parameter that forward finds outside the user's module, as in a closure, is a constant: no optimiser has it.
        weights = {name for name, tensor in self.owned.items() if isinstance(tensor, nn.Parameter)} - {*self.constants}
        if loss:
            answers = tuple(map(self._find_unchanged, answers))
        positions = [index for index, node in enumerate(self.nodes) if node.name in answers]
        if not positions:
            raise TraceError("The model answers with its own input: there is nothing to compute.")
        # What follows the model's last output and is in none of its modules is the loss.
        nodes = tuple(
            replace(node, module="loss") if index > positions[-1] and not node.module else node
            for index, node in enumerate(self.nodes)
        )
        # A weight that the loss does not depend on has no gradient, and the ranks must not wait for one.
        reached = find_gradient_targets(loss, nodes) if loss else set()
        graph = ModelGraph(
            inputs=self.inputs,
            weights={name: specs[name] for name in specs if name in weights},
            trainable=frozenset(n for n in weights & reached if self.owned[n].requires_grad),
            buffers={name: specs[name] for name in specs if name not in weights},
            nodes=nodes,
            answers=tuple(answers),
            loss=loss,
            constants=self.constants,
        )
        if loss and graph.specs[loss].shape != ():
            raise TraceError(f"The loss must be one number, but its shape is {graph.specs[loss].shape}. Reduce it.")
        if loss and not graph.trainable and any(self.owned[name].requires_grad for name in weights):
            raise TraceError(
                "No gradient of the loss reaches a weight of the model: the loss is constant, detached, or computed by "
                "an operator without a gradient (argmax, a comparison), and training would change nothing."
            )
        return graph

    def _find_unchanged(self, answer: str) -> str:
        """Return the value of which an answer of the model is an unchanged copy, made by none of its modules."""
        # `prediction.contiguous()` or `prediction.double()` in a loss may return the prediction itself. The exporter
        # then calls the result the model's output, although the loss may have read the prediction before, too.
        nodes = {node.name: node for node in self.nodes}
        while (node := nodes.get(answer)) and not node.module and node.operator.startswith(_UNCHANGED):
            before = nodes.get(node.arguments["self"].name)
            if before is None or before.spec != node.spec:
                break
            answer = before.name
        return answer

    def _to_refs(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(self.names[value.name])
        if isinstance(value, list | tuple):
            return tuple(self._to_refs(item) for item in value)
        return value

    def _read_call(self, node: fx.Node) -> None:
        name, output = str(node.target), node.meta["val"]
        schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
        if schema is None:
            if node.target is not operator.getitem:
                raise TraceError(
                    f"{name} in {find_source_line(node)} computes with values of a tensor; only shapes are known."
                )
            arguments = {str(position): self._to_refs(value) for position, value in enumerate(node.args)}
        else:
            values = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
            values.update(node.kwargs)
            arguments = {
                argument.name: self._to_refs(values.get(argument.name, argument.default_value))
                for argument in schema.arguments
            }
        # A copy of a constant, to which no operator writes, is the constant.
        if name == "aten.lift_fresh_copy.default" or (
            name == "aten.detach.default" and arguments["self"].name in self.constants
        ):
            self.names[node.name] = arguments["self"].name
            return
        if isinstance(output, Tensor) and arguments.get("dtype", 0) is None and not any(find_ref_names(arguments)):
            arguments["dtype"] = output.dtype  # of torch.ones(3): PyTorch's default here, which ranks may not have
        if isinstance(output, Tensor) and any(not isinstance(size, int) for size in output.shape):
            raise TraceError(_BY_VALUE.format(f"{node.target} in {describe_location(node)} makes"))
        if self.has_loss and (flag := next((key for key in ("sparse", "sparse_grad") if arguments.get(key)), "")):
            raise TraceError(
                f"{name} in {describe_location(node)} makes a sparse gradient, and ranks have dense ones only. "
                f"Say {flag}=False, as in nn.Embedding(..., sparse=False): the gradient has the same numbers."
            )
        if name.startswith("aten.as_strided"):
            _check_memory(node)
        # The only operator in place that is left counts up a buffer: its readers read the buffer.
        counts_up = schema is not None and schema.is_mutable
        self.names[node.name] = arguments["self"].name if counts_up else node.name
        self.nodes.append(
            Node(
                name=node.name,
                operator="getitem" if schema is None else name,
                arguments=arguments,
                spec=make_tensor_spec(output) if isinstance(output, Tensor) else None,
                module=get_module_path(node),
                source=find_source_line(node),
                flops=count_flops(node),
                graded=not is_no_grad(node),
            )
        )


def _check_memory(node: fx.Node) -> None:
    """Raise TraceError if a node takes elements out of the memory of a view: ranks have the view's elements only."""
    (source, *_) = node.args
    value = source.meta["val"]  # type: ignore[union-attr]
    if not value.is_contiguous() or value.untyped_storage().nbytes() != value.numel() * value.element_size():
        raise TraceError(
            f"{node.target} in {describe_location(node)} reads the memory of a view {tuple(value.shape)}, whose order "
            "may be another one on ranks. Call .contiguous() or .clone() before it, and choose the strides for that; "
            "or use indexing, unfold or permute."
        )


def make_tensor_spec(value: Tensor) -> TensorSpec:
    """Return the shape and type of a tensor. Raises TraceError if the shape depends on values."""
    if any(not isinstance(size, int) for size in value.shape):
        raise TraceError(_BY_VALUE.format("The answer is"))
    return TensorSpec(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
