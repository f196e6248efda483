"""Whether a forward or a loss does the same in each call: a trace has what it did in one.

Random numbers that are not torch's, and counters in a list, a global or a closure, change what Python code computes
from call to call. The operators of several runs without memory are compared, with their numbers and constant tensors.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.constant_propagation import disable_tracing
from mpi4dl_nb.engines.graph.exported_nodes import find_current_line
from mpi4dl_nb.engines.graph.outside_tensors import is_real
from mpi4dl_nb.engines.graph.watch_forward import silence_exporter

_COMPARED = bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format

_MOST_HASHED = 1 << 20
"""Of a larger constant tensor, only as many elements are compared."""


class _OperatorLog(TorchDispatchMode):
    """Records each operator with its numbers and constant tensors, and the line that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and run one ATen operator. Called by torch."""
        kwargs = kwargs or {}
        self.calls.append((str(func), *map(_describe, tree_leaves((args, kwargs)))))
        self.lines.append(find_current_line())
        return func(*args, **kwargs)


def _describe(argument: object) -> object:
    if isinstance(argument, Tensor):
        if not is_real(argument) or argument.requires_grad:
            return tuple(map(_describe, argument.shape))
        with disable_tracing():
            elements = argument.detach().reshape(-1)[:_MOST_HASHED].cpu().contiguous()
            return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).digest()
    # All else has another name or address in each run: a symbol of a number that is not known, a profiler's handle.
    return repr(argument) if isinstance(argument, _COMPARED) else type(argument)


def _list_numbers(state: dict[str, Any]) -> list[object]:
    """Return the numbers of a state of NumPy's generator."""
    return [np.asarray(part).tolist() for part in (*state["state"].values(), state["has_gauss"], state["gauss"])]


@dataclass
class RepeatedRun:
    """Several runs of the model or the loss (`what`) on the same inputs; `run` enters a mode that it is given."""

    run: Callable[[_OperatorLog], object]
    what: str
    logs: list[_OperatorLog] = field(default_factory=list)
    drawn: list[set[str]] = field(default_factory=list)

    def rerun(self) -> None:
        """Run once more, and restore the states of the random generators of Python and NumPy."""
        # The states are restored, so that a check does not change what the user draws next.
        python, numpy_state = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 (the one that users may draw from)
        self.logs.append(_OperatorLog())
        try:
            with silence_exporter():
                self.run(self.logs[-1])
            after = np.random.get_state(legacy=False)  # noqa: NPY002
            generators = {"Python's random"} if random.getstate() != python else set()
            if _list_numbers(after) != _list_numbers(numpy_state):
                generators.add("numpy.random")
            self.drawn.append(generators)
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002

    def settle(self) -> None:
        """Run a third time if the second run differed from the first, which may have set up what later runs use."""
        if self.logs[0].calls != self.logs[1].calls:
            self.rerun()

    def check_generators(self) -> None:
        """Raise TraceError if each run drew from a random generator other than torch's."""
        if drawn := set.intersection(*self.drawn):
            raise TraceError(
                f"The {self.what} draws random numbers by {' and '.join(sorted(drawn))} while it runs. Ranks run what "
                "was traced once, with the numbers of then. Draw them with torch (torch.rand, dropout), and choose "
                "with torch.where."
            )

    def check_operators(self) -> None:
        """Raise TraceError if the last two runs had other operators, numbers or constant tensors."""
        before, now = self.logs[-2], self.logs[-1]
        if before.calls == now.calls:
            return
        pairs = zip(before.calls, now.calls, strict=False)
        first = next((index for index, (call, other) in enumerate(pairs) if call != other), -1)
        raise TraceError(
            f"The {self.what} computes something else in each call, with inputs of the same shapes, first in "
            f"{(now.lines or before.lines)[first]}. Ranks run what was traced once, in which a counter, a list or a "
            "random generator of Python stands still. Draw random numbers with torch, and count in a buffer."
        )
