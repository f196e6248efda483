"""Mixed precision as data: the casts of `torch.autocast` become operators of the traced graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engines.graph.export_reader import is_check
from engines.graph.exported_nodes import AUTOCAST, MARKS
from engines.graph.functionalise import WRITTEN

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
    """One run of an operator on tensors without memory: its result, the result's types, and the casts inside."""

    made: Any
    types: list[torch.dtype]
    casts: dict[int, torch.dtype]


def insert_casts(module: fx.GraphModule, precision: torch.dtype | None, device: str) -> fx.GraphModule:
    """Insert the casts of autocast as nodes, so that the graph needs no autocast, and return the module.

    `precision` is that of `torch.autocast` around the whole graph, None if there is none. The model's own autocast
    regions (see `engines.graph.exported_nodes`) override it.

    PyTorch's own table decides which operators run in which type: each node runs without memory under autocast of that
    `device` type, and its casts are recorded. `val` of every node is updated. A model that reads the type of a tensor
    while it is traced sees float32.
    """
    own = (node.meta[AUTOCAST] for node in module.graph.nodes if AUTOCAST in node.meta)
    if precision is None and not any(casts and kind == device for kind, _, casts in own):
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
        floating = [
            item
            for item in node.all_input_nodes
            if isinstance(values[item], Tensor) and values[item].is_floating_point()
        ]
        # A write keeps the type of the tensor that is written, whatever autocast says.
        if (written := node.meta.get(WRITTEN)) is not None:
            kind = values[written].dtype
            return {item: kind for item in floating if values[item].dtype != kind}
        precision = self.precision
        if AUTOCAST in node.meta and node.meta[AUTOCAST][0] == self.device:
            _, inner, casts = node.meta[AUTOCAST]
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
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        results = made if isinstance(made, list | tuple) else (made,)
        return _OperatorRun(made, [item.dtype for item in results if isinstance(item, Tensor)], seen.casts)
