"""Operators that refuse tensors of two floating types: a trace, which has no numbers, does not notice them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from mpi4dl_nb.engines.compiler.local_rules import is_pointwise, map_refs, split_arguments
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.default_type import use_default_type
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref
from mpi4dl_nb.engines.program.kernels import get_operator

TYPE_ERROR = re.compile("same dtype|should be the same|expected scalar type|expected m1 and m2 to have the same")
"""What PyTorch says of tensors of two types, where it takes one type only."""


def check_operand_types(graph: ModelGraph) -> None:
    """Raise TraceError for an operator that PyTorch refuses because its tensors have two floating types.

    Such are class weights of float32 beside a prediction of float64.
    """
    for node in graph.nodes:
        specs = (graph.specs.get(name) for name in node.reads)
        types = {spec.dtype for spec in specs if spec is not None and spec.is_floating}
        # Half precisions mix with float32 in some operators of GPUs, which cannot be tried here.
        if types != {"float32", "float64"} or not node.operator.startswith("aten.") or is_pointwise(node.operator):
            continue
        if reason := _find_type_error(node, graph):
            raise TraceError(
                f"{node.short_operator} in {node.where} gets tensors of {' and '.join(sorted(types))}, and takes one "
                f"type only ({reason}). Give the tensor that is made there the type of the other one, as in "
                "torch.tensor([1.0, 3.0], dtype=prediction.dtype)."
            )


_LARGEST = 2, 8, 64  # sizes of the tensors of a trial: the first ones may be too small for groups of channels
_MOST = 1 << 21


def _find_type_error(node: Node, graph: ModelGraph) -> str:
    """Run an operator on a few zeros; return what PyTorch says if it refuses their types, else an empty string."""
    specs = [graph.specs[name] for name in node.reads]
    positional, keywords = split_arguments(node, {})

    def run(largest: int) -> None:
        def make(ref: Ref) -> torch.Tensor:
            spec = graph.specs[ref.name]
            return torch.zeros([min(size, largest) for size in spec.shape], dtype=getattr(torch, spec.dtype))

        def resolve(value: Any) -> Any:
            return map_refs(make, value)

        with torch.no_grad():
            get_operator(node.operator)(*map(resolve, positional), **{name: resolve(v) for name, v in keywords.items()})

    for largest in _LARGEST:
        if sum(math.prod(min(size, largest) for size in spec.shape) for spec in specs) > _MOST:
            return ""
        try:
            run(largest)
            return ""
        except Exception as error:  # any other reason is that the tensors are too small
            first = str(error).partition("\n")[0]
            if TYPE_ERROR.search(first):
                return first
    return ""


Traced = TypeVar("Traced")


def trace_in_fitting_type(precision: str, run: Callable[[], Traced]) -> Traced:
    """Return what `run`, which traces for a plan of that precision, returns.

    If constants without a type of their own, as torch.tensor([1.0, 3.0]), stop it in float64, it runs once more with
    float64 as their type. Raises the TraceError of the first run otherwise.
    """
    try:
        return run()
    except TraceError as error:
        if precision != "float64" or torch.get_default_dtype() is torch.float64 or not TYPE_ERROR.search(str(error)):
            raise
        with suppress(TraceError), use_default_type(torch.float64):
            return run()
        raise
