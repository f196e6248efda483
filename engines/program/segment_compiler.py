"""Segments compiled to fewer kernels by `torch.compile` (Ansel et al., 2024, PyTorch 2, section 4: TorchInductor).

Many small kernels leave a GPU idle between launches; pointwise operators are fused into their neighbours.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge

from mpi4dl_nb.engines.errors import PlanError, RankError, iterate_causes
from mpi4dl_nb.engines.program.effects import LocalOp
from mpi4dl_nb.engines.program.instructions import DEVICE, SEED, Compute
from mpi4dl_nb.engines.program.kernels import get_kernel
from mpi4dl_nb.engines.program.segment import Rooms, Segment, bind_kernel, make_lookup

# Compile in this process: worker processes might outlive it. Read when TorchInductor is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

Function = Callable[..., Any]


def check_compiler(device: str) -> None:
    """Raise PlanError if there is no compiler for this host's CPU. (Ranks on a GPU report what they lack.)"""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise PlanError(
            f"compile_segments=True needs a C++ compiler, and there is no {compiler} here. "
            "Install one, name it in CXX, or set compile_segments=False."
        )


@dataclass
class SegmentCompiler:
    """Makes the segments of one rank; segments with weights that run the same code share one function.

    The function is compiled when it is first called. Segments of a single kernel are not compiled, as there is nothing
    to fuse. Neither are segments that draw random numbers: each seed would be compiled in as a constant.
    """

    _functions: dict[object, Function] = field(default_factory=dict)

    def __post_init__(self) -> None:
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # (constants)

    def __call__(self, segment: Compute, owned: Mapping[str, Any], rooms: Rooms | None = None) -> Segment:
        kernels = [op.kernel for op in segment.ops if op.kernel != "getitem"]
        if len(kernels) < 2 or any(SEED.name in op.reads for op in segment.ops):
            return Segment(segment, owned, rooms)
        read = dict.fromkeys(name for op in segment.ops for name in op.reads if name in owned and name != DEVICE.name)
        names = (*segment.inputs, *read)
        # Values are numbered, so that segments that run the same code have the same source text.
        graph = fx.Graph()
        nodes: dict[str, Any] = {name: graph.placeholder(f"value_{index}") for index, name in enumerate(names)}
        nodes[DEVICE.name] = owned[DEVICE.name]
        for op in segment.ops:
            arguments, keywords = make_lookup(op.arguments)(nodes), make_lookup(dict(op.keywords))(nodes)
            nodes[op.out] = graph.call_function(_make_function(op), tuple(arguments), keywords)
        graph.output(tuple(nodes[name] for name in segment.outputs))
        traced = fx.GraphModule(nn.Module(), graph)
        # Sizes are compiled in, and torch.compile keeps only a few versions of a function. The weights' shapes separate
        # most of them; segments without weights get a function each.
        sizes = tuple(owned[name].shape for name in read)
        alike = traced.code, *map(get_kernel, kernels), sizes or segment.name
        if alike not in self._functions:
            self._functions[alike] = torch.compile(traced, dynamic=False)
        return _CompiledSegment(segment, owned, names, self._functions[alike])


class _CompiledSegment(Segment):
    """Calls one function of the values `names`. Its backward gives all gradients together, so no weight is `late`."""

    def __init__(self, segment: Compute, owned: Mapping[str, Any], names: tuple[str, ...], function: Function) -> None:
        super().__init__(segment, owned)
        self.name, self.names, self.function, self.late = segment.name, names, function, []

    def __call__(self, values: Mapping[str, Tensor], seed: int, again: bool = False) -> tuple[Tensor, ...]:
        """Return the outputs, as `Segment` does up to rounding."""
        arguments = [values[name] if name in values else self.owned[name] for name in self.names]
        with _translate_compile_errors(self.name):
            return tuple(self.function(*arguments))

    def backward(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """Run the backward pass, which is compiled on the first call."""
        with _translate_compile_errors(self.name):
            super().backward(roots, grads)


@contextmanager
def _translate_compile_errors(segment: str) -> Iterator[None]:
    """Raise RankError if the segment cannot be compiled."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        *_, cause = iterate_causes(getattr(error, "inner_exception", error))  # Dynamo wraps a kernel's own exception
        first_line = (str(cause).strip().splitlines() or [""])[0]
        raise RankError(
            f"The segment {segment} cannot be compiled: {type(cause).__name__}: {first_line} "
            "Set compile_segments=False."
        ) from error


def _make_function(op: LocalOp) -> Function:
    """Return an operator's kernel as a function with a name, which `fx` requires."""
    run = bind_kernel(op, op.kernel)
    if isinstance(run, torch._ops.OpOverload):
        return run

    def call(*arguments: Any, **keywords: Any) -> Any:
        return run(*arguments, **keywords)

    call.__name__ = call.__qualname__ = op.kernel.replace(".", "_") + "_without_gradient" * (not op.graded)
    return call
