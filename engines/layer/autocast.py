"""Mixed precision as data: the casts of `torch.autocast` become operators of the traced graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engines.layer.export_reader import is_check
from engines.layer.functionalise import WRITTEN
from engines.layer.inline import AUTOCAST, MARKS

__all__ = ["insert_casts"]

_TO = torch.ops.aten._to_copy.default


class _CastRecorder(TorchDispatchMode):
    """Records casts between floating types while an operator runs: id of the tensor -> the type that it is cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is _TO and args[0].is_floating_point() and made.is_floating_point():
            self.casts[id(args[0])] = made.dtype
        return made


@dataclass(frozen=True)
class _OperatorRun:
    """One run of an operator on tensors without memory."""

    made: Any
    casts: dict[int, torch.dtype]

    @property
    def types(self) -> list[torch.dtype]:
        """Types of the tensors that the operator returns."""
        return [tensor.dtype for tensor in _iterate_tensors(self.made)]


def insert_casts(module: fx.GraphModule, precision: torch.dtype | None, device: str) -> fx.GraphModule:
    """Insert the casts of autocast as nodes, so that the graph needs no autocast, and return the module.

    `precision` is that of `torch.autocast` around the whole graph, None if there is none. The model's own autocast
    regions (see `engines.layer.inline`) override it.

    PyTorch's own table decides which operators run in which type: each node runs without memory under autocast of that
    `device` type, and its casts are recorded. `val` of every node is updated. A model that reads the type of a tensor
    while it is traced sees float32.
    """
    if precision is None and not any(_has_own_autocast(node, device) for node in module.graph.nodes):
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
            self.values[node] = self._make_fake_like(self._get_tensor(node))
        elif node.op == "call_function" and not is_check(node):
            self._call(node)
            node.meta["val"] = self.values[node]

    def _get_tensor(self, node: fx.Node) -> Tensor:
        if node.op == "placeholder":
            return node.meta["val"]  # type: ignore[no-any-return]
        found: Any = self.module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]

    def _make_fake_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def _call(self, node: fx.Node) -> None:
        casts = self._find_casts(node)
        for argument, dtype in casts.items():
            node.replace_input_with(argument, self._insert_cast(node, argument, dtype))
        self.values[node] = self._run(node).made

    def _find_casts(self, node: fx.Node) -> dict[fx.Node, torch.dtype]:
        """Return the arguments to cast, and the type of each.

        These are the casts of autocast to arguments. If autocast casts inside the operator, or changes the type of its
        result, all arguments are cast to the widest of these types. Casts that the operator does without autocast stay
        inside it.
        """
        floating = [item for item in node.all_input_nodes if _is_floating(self.values[item])]
        if (written := node.meta.get(WRITTEN)) is not None:
            kind = self.values[written].dtype
            return {item: kind for item in floating if self.values[item].dtype != kind}
        if (precision := self._get_precision(node)) is None:
            return {}
        with torch.autocast(self.device, precision, cache_enabled=False):
            automatic = self._run(node)
        plain = self._try_run(node)
        if plain and (plain.types, plain.casts) == (automatic.types, automatic.casts):
            return {}
        known = {item: dtype for item in floating if (dtype := automatic.casts.get(id(self.values[item])))}
        if known:
            return known
        widest = max([*automatic.casts.values(), *automatic.types], key=lambda dtype: dtype.itemsize)
        return {item: widest for item in floating if self.values[item].dtype != widest}

    def _get_precision(self, node: fx.Node) -> torch.dtype | None:
        """Return the type that autocast casts to at this node; None if there is no autocast."""
        if AUTOCAST in node.meta and node.meta[AUTOCAST][0] == self.device:
            _, precision, casts = node.meta[AUTOCAST]
            return precision if casts else None
        return self.precision

    def _run(self, node: fx.Node) -> _OperatorRun:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._resolve_argument)
        with _CastRecorder() as seen:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        return _OperatorRun(made, seen.casts)

    def _try_run(self, node: fx.Node) -> _OperatorRun | None:
        """Run the node; return None if the operator refuses arguments of several types."""
        try:
            return self._run(node)
        except (RuntimeError, ValueError):
            return None

    def _resolve_argument(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device(self.device)
        return self.values[item] if isinstance(item, fx.Node) else item

    def _insert_cast(self, node: fx.Node, argument: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert a cast right before `node`, with the node's module and source line."""
        with self.module.graph.inserting_before(node):
            cast = self.module.graph.call_function(_TO, (argument,), {"dtype": dtype})
        cast.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", *MARKS) if key in node.meta}
        self.values[cast] = cast.meta["val"] = self._run(cast).made
        return cast


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_own_autocast(node: fx.Node, device: str) -> bool:
    """Return whether a node is in an autocast region of the model itself."""
    kind, _, casts = node.meta.get(AUTOCAST, ("", None, False))
    return bool(casts) and kind == device


def _iterate_tensors(made: Any) -> Iterator[Tensor]:
    for item in made if isinstance(made, list | tuple) else (made,):
        if isinstance(item, Tensor):
            yield item
