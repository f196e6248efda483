"""The nodes of an exported graph: the user's module and line, and the regions of `torch.no_grad()` and autocast."""

from __future__ import annotations

import itertools
import linecache
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import MODEL

_OURS = ("/torch/", *(str(Path(__file__).parents[1] / package) for package in ("graph", "compiler")))
_CHECKS = ("_guards_fn", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")

WRITTEN = "written"
"""Key in `node.meta` of the result of a write: the node whose type the result keeps, whatever it is computed from."""


def get_module_path(node: fx.Node) -> str:
    """Return the dotted path of the user's module; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path if path.startswith("loss") else f"{path}.".removeprefix(MODEL).rstrip(".")


def find_source_line(node: fx.Node) -> str:
    """Return file, line and text of the deepest frame in the user's code; empty if unknown."""
    return find_user_line(node.meta.get("stack_trace") or "", _OURS)


def find_user_line(frames: str, ours: Sequence[str]) -> str:
    """Return file, line and text of the last of some formatted frames whose path contains none of `ours`, if any."""
    lines = frames.strip().splitlines()
    theirs = [
        f"{head.strip().split(', in ')[0].replace('File ', '')}: {text.strip()}"
        for head, text in itertools.pairwise(lines)
        if head.strip().startswith("File ") and not any(folder in head.split(", in ")[0] for folder in ours)
    ]
    return theirs[-1] if theirs else ""


def describe_location(node: fx.Node) -> str:
    """Return module and line, for messages."""
    return f"{get_module_path(node) or 'the model itself'}, {find_source_line(node) or 'source unknown'}"


def find_current_line() -> str:
    """Return file, line and text of the deepest frame of the running code that is the user's."""
    # The frame itself, not a formatted traceback: this runs at each read of numbers, and most of these succeed.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not any(ours in file for ours in _OURS):
            return f'"{file}", line {line}: {linecache.getline(file, line).strip()}'
        frame = frame.f_back
    return "source unknown"


def is_check(node: fx.Node) -> bool:
    """Return whether a node is only a check."""
    return any(check in str(node.target) for check in _CHECKS)


# Nested graphs are inlined: `torch.no_grad()` and local `torch.autocast` become marks of the operators within.
#
# `torch.export` makes a nested graph of each such region. A mark is an entry of a node's `meta`, and is copied to the
# nodes that are made from that node.


UNGRADED, AUTOCAST = "without_gradient", "autocast"
"""Marks: the operator records no gradient; of the autocast regions around it, by device type: (precision, whether it
casts)."""

MARKS = (UNGRADED, AUTOCAST)


def is_no_grad(node: fx.Node) -> bool:
    """Return whether an operator was traced under `torch.no_grad()`."""
    return bool(node.meta.get(UNGRADED))


def inline_subgraphs(module: fx.GraphModule) -> fx.GraphModule:
    """Inline all nested graphs and return the module. Raises TraceError for an unknown kind of nested graph."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            results = _inline_subgraph(module, module, node, {})
            for pick in list(node.users):  # each picks one of the results
                pick.replace_all_uses_with(results[pick.args[1]])
                module.graph.erase_node(pick)
            module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users and _is_graph(module, node):
            module.graph.erase_node(node)
    return module


def _inline_subgraph(top: fx.GraphModule, owner: torch.nn.Module, node: fx.Node, around: dict[str, Any]) -> list[Any]:
    """Insert the operators of a nested graph, an attribute of `owner`, before `node`; return its results."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        graded, nested, *arguments = node.args
        marks: dict[str, Any] = {**around, UNGRADED: not graded}
    elif node.target is torch.ops.higher_order.wrap_with_autocast:
        kind, precision, casts, _, nested, *arguments = node.args
        marks = {**around, AUTOCAST: {**around.get(AUTOCAST, {}), kind: (precision, casts)}}
    else:
        raise TraceError(
            f"{node.target} in {describe_location(node)} takes functions as arguments, for which there is no rule. "
            "Call what it calls directly."
        )
    # The results of a nested graph are a list, of which `getitem` nodes pick:
    #
    #     x ----> [wrap_with_set_grad_enabled(False, inner, x)] --getitem 0--> y      inner: a -> relu -> exp -> (out,)
    #
    # becomes x -> relu -> exp -> y, with both operators marked as without gradient.
    inner = _get_attribute(owner, nested)  # type: ignore[arg-type]
    inlined: dict[fx.Node, Any] = {}
    remaining = iter(arguments)
    for inner_node in inner.graph.nodes:
        if inner_node.op == "placeholder":
            inlined[inner_node] = next(remaining)
        elif inner_node.op == "output":
            return [inlined[item] if isinstance(item, fx.Node) else item for item in inner_node.args[0]]
        elif _is_graph(inner, inner_node):
            inlined[inner_node] = inner_node
        elif inner_node.target is operator.getitem and isinstance(inlined[inner_node.args[0]], list):
            inlined[inner_node] = inlined[inner_node.args[0]][inner_node.args[1]]
        else:
            # Attributes of a nested graph are those of its own module: they move to the top under a name that is free.
            with top.graph.inserting_before(node):
                inlined[inner_node] = copied = top.graph.node_copy(inner_node, lambda item: inlined[item])
            if inner_node.op == "get_attr":
                copied.target = f"of_{copied.name}"
                setattr(top, copied.target, _get_attribute(inner, inner_node))
            copied.meta = {**inner_node.meta, **marks}  # an inner region overrides the marks of the one around it
            if isinstance(inner_node.target, torch._ops.HigherOrderOperator):
                inlined[inner_node] = _inline_subgraph(top, inner, copied, marks)
                top.graph.erase_node(copied)
    return []


def _get_attribute(owner: torch.nn.Module, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(owner) if node.op == "get_attr" else None


def _is_graph(owner: torch.nn.Module, node: fx.Node) -> bool:
    return isinstance(_get_attribute(owner, node), fx.GraphModule)


def drop_broadcasts(module: fx.GraphModule) -> fx.GraphModule:
    """Let readers of `torch.broadcast_tensors` read the tensors that already have the common shape; return the module.

    The module must not write to its values any more.
    """
    # `F.mse_loss` and its kind broadcast prediction and labels, mostly of the same shape. PyTorch then returns the very
    # tensors, and the exporter takes what it returns for the model's output, as if the loss were a part of the model.
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.broadcast_tensors.default:
            for item in list(node.users):
                source = node.args[0][item.args[1]]
                if source.meta["val"].shape == item.meta["val"].shape:
                    item.replace_all_uses_with(source)
                    module.graph.erase_node(item)
            if not node.users:
                module.graph.erase_node(node)
    return module


def insert_detaches(module: fx.GraphModule) -> fx.GraphModule:
    """Insert a `detach` of each value that enters a region without gradients, and return the module.

    Weights are read directly, since the region's operators record nothing.
    """
    # Ranks run the whole graph with autograd on. A `detach` at the border gives the same gradients as `torch.no_grad()`
    # inside: none flows back, and what is computed from detached values only records nothing.
    away: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_no_grad(node) or node.op != "call_function":
            continue
        for value in node.all_input_nodes:
            made_here, tensor = value.op == "get_attr" or is_no_grad(value), value.meta.get("val")
            if made_here or not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if value not in away:
                with module.graph.inserting_before(node):
                    away[value] = detach = module.graph.call_function(torch.ops.aten.detach.default, (value,))
                detach.meta = {**node.meta, "val": value.meta["val"].detach()}
            node.replace_input_with(value, away[value])
    return module


# Mixed precision: the casts of `torch.autocast` become operators of the graph.


_TO = torch.ops.aten._to_copy.default


class _CastRecorder(TorchDispatchMode):
    """Records casts between floating types while an operator runs: id of the tensor -> the type that it is cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is _TO and args[0].is_floating_point() and output.is_floating_point():
            self.casts[id(args[0])] = output.dtype
        return output


@dataclass(frozen=True)
class _OperatorRun:
    """One run of an operator on tensors without memory: its result, the result's types, and the casts inside."""

    made: Any
    types: list[torch.dtype]
    casts: dict[int, torch.dtype]


def insert_casts(module: fx.GraphModule, precision: torch.dtype | None, device: str) -> fx.GraphModule:
    """Insert the casts of autocast as nodes, so that the graph needs no autocast, and return the module.

    `precision` is that of `torch.autocast` around the whole graph, None if there is none. The model's own autocast
    regions override it.

    PyTorch's own table decides which operators run in which type: each node runs without memory under autocast of that
    `device` type, and its casts are recorded. `val` of every node is updated. A model that reads the type of a tensor
    while it is traced sees float32.

    Raises TraceError if a region of autocast on CPUs would matter, on ranks that compute on another device.
    """
    # A model is traced with tensors on the CPU: `torch.autocast(x.device.type)` cannot be told from `"cpu"`.
    for node in module.graph.nodes if device != "cpu" else ():
        _, casts = node.meta.get(AUTOCAST, {}).get("cpu", (None, False))
        if casts or (precision is not None and "cpu" in node.meta.get(AUTOCAST, {})):
            raise TraceError(
                f"{describe_location(node)} stands under torch.autocast for the CPU, and ranks compute on a GPU. If "
                'forward asks a tensor for its device (x.device.type): this is "cpu" while it is traced. Name the '
                'device, torch.autocast("cuda", ...); or train with device="cpu".'
            )
    autocasts = [regions[device] for node in module.graph.nodes if device in (regions := node.meta.get(AUTOCAST, {}))]
    if precision is None and not any(casts for _, casts in autocasts):
        return module
    with FakeTensorMode() as mode, torch.no_grad():
        caster = _Caster(module, precision, device, mode)
        for node in list(module.graph.nodes):
            caster.visit(node)
    return module


@dataclass
class _Caster:
    module: fx.GraphModule
    precision: torch.dtype | None
    device: str
    mode: FakeTensorMode
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        """Compute the node's value, and insert casts before it if it needs them."""
        if node.op in ("placeholder", "get_attr"):
            is_input = node.op == "placeholder"
            tensor = node.meta["val"] if is_input else operator.attrgetter(str(node.target))(self.module)
            self.values[node] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        elif node.op == "call_function" and not is_check(node):
            for argument, dtype in self._find_casts(node).items():
                with self.module.graph.inserting_before(node):
                    cast = self.module.graph.call_function(_TO, (argument,), {"dtype": dtype})
                # The cast belongs to the user's line and module that made it necessary.
                inherited = ("nn_module_stack", "stack_trace", *MARKS)
                cast.meta = {key: node.meta[key] for key in inherited if key in node.meta}
                self.values[cast] = cast.meta["val"] = self._run(cast).made
                node.replace_input_with(argument, cast)
            self.values[node] = node.meta["val"] = self._run(node).made

    def _find_casts(self, node: fx.Node) -> dict[fx.Node, torch.dtype]:
        """Return the arguments to cast, and the type of each."""
        values = self.values
        tensors = [item for item in node.all_input_nodes if isinstance(values[item], Tensor)]
        floating = [item for item in tensors if values[item].is_floating_point()]
        # A write keeps the type of the tensor that is written, whatever autocast says.
        if (written := node.meta.get(WRITTEN)) is not None:
            kind = values[written].dtype
            return {item: kind for item in floating if values[item].dtype != kind}
        precision = self.precision
        if self.device in (regions := node.meta.get(AUTOCAST, {})):
            inner, casts = regions[self.device]
            precision = inner if casts else None
        if precision is None:
            return {}
        with torch.autocast(self.device, precision, cache_enabled=False):
            automatic = self._run(node)
        try:
            plain = self._run(node)
        except (RuntimeError, ValueError):  # it takes arguments of several types under autocast only
            plain = None
        # Casts that the operator does without autocast, too, stay inside it.
        if plain and (plain.types, plain.casts) == (automatic.types, automatic.casts):
            return {}
        known = {item: dtype for item in floating if (dtype := automatic.casts.get(id(values[item])))}
        if known:
            return known
        # Autocast casts a tensor inside the operator, or changes the type of its result. The graph can express neither:
        # all arguments are cast to the widest of these types instead.
        widest = max([*automatic.casts.values(), *automatic.types], key=lambda dtype: dtype.itemsize)
        return {item: widest for item in floating if values[item].dtype != widest}

    def _run(self, node: fx.Node) -> _OperatorRun:
        def resolve(item: Any) -> Any:
            if isinstance(item, torch.device):
                return torch.device(self.device)
            return self.values[item] if isinstance(item, fx.Node) else item

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), resolve)
        with _CastRecorder() as seen:
            output = node.target(*args, **kwargs)  # type: ignore[operator]
        results = output if isinstance(output, list | tuple) else (output,)
        return _OperatorRun(output, [item.dtype for item in results if isinstance(item, Tensor)], seen.casts)
