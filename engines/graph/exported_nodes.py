"""The nodes of an exported graph: the user's module and line, and the marks that remain of nested graphs."""

from __future__ import annotations

import itertools
import linecache
import operator
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from engines.errors import TraceError
from engines.graph.model_graph import MODEL

__all__ = [
    "AUTOCAST",
    "MARKS",
    "UNGRADED",
    "describe_location",
    "find_current_line",
    "find_source_line",
    "get_module_path",
    "inline_subgraphs",
    "insert_detaches",
    "is_no_grad",
]

_OURS = ("/torch/", str(Path(__file__).parent))


def get_module_path(node: fx.Node) -> str:
    """Return the dotted path of the user's module; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path if path.startswith("loss") else f"{path}.".removeprefix(MODEL).rstrip(".")


def find_source_line(node: fx.Node) -> str:
    """Return file, line and text of the deepest frame in the user's code; empty if unknown."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    theirs = [
        f"{head.strip().split(', in ')[0].replace('File ', '')}: {text.strip()}"
        for head, text in itertools.pairwise(lines)
        if head.strip().startswith("File ") and not any(ours in head.split(", in ")[0] for ours in _OURS)
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


# Nested graphs are inlined: `torch.no_grad()` and local `torch.autocast` become marks of the operators within.
#
# `torch.export` makes a nested graph of each such region. A mark is an entry of a node's `meta`, and is copied to the
# nodes that are made from that node.


UNGRADED, AUTOCAST = "without_gradient", "autocast"
"""Marks: the operator records no gradient; the (device type, precision, whether it casts) of an autocast region."""

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
        marks = {**around, AUTOCAST: (kind, precision, casts)}
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
    made: dict[fx.Node, Any] = {}
    given = iter(arguments)
    for each in inner.graph.nodes:
        if each.op == "placeholder":
            made[each] = next(given)
        elif each.op == "output":
            return [made[item] if isinstance(item, fx.Node) else item for item in each.args[0]]
        elif _is_graph(inner, each):
            made[each] = each
        elif each.target is operator.getitem and isinstance(made[each.args[0]], list):
            made[each] = made[each.args[0]][each.args[1]]
        else:
            # Attributes of a nested graph are those of its own module: they move to the top under a name that is free.
            with top.graph.inserting_before(node):
                made[each] = copied = top.graph.node_copy(each, lambda item: made[item])
            if each.op == "get_attr":
                copied.target = f"of_{copied.name}"
                setattr(top, copied.target, _get_attribute(inner, each))
            copied.meta = {**each.meta, **marks}  # an inner region overrides the marks of the one around it
            if isinstance(each.target, torch._ops.HigherOrderOperator):
                made[each] = _inline_subgraph(top, inner, copied, marks)
                top.graph.erase_node(copied)
    return []


def _get_attribute(owner: torch.nn.Module, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(owner) if node.op == "get_attr" else None


def _is_graph(owner: torch.nn.Module, node: fx.Node) -> bool:
    return isinstance(_get_attribute(owner, node), fx.GraphModule)


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
                    away[value] = made = module.graph.call_function(torch.ops.aten.detach.default, (value,))
                made.meta = {**node.meta, "val": value.meta["val"].detach()}
            node.replace_input_with(value, away[value])
    return module
