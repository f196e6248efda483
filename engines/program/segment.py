"""A segment ready to run: its kernels resolved once, its arguments looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engines.layer.graph import Ref
from engines.program.in_place import IN_PLACE, find_in_place
from engines.program.instructions import SEED, Compute, LocalOp
from engines.program.output_buffers import OutputAllocator, find_out_kernel
from engines.spatial.kernels import get_kernel

__all__ = ["Segment", "bind_kernel", "find_last_reads"]


class Segment:
    """Calls a segment's kernels in order; `owned` are the rank's weights and buffers.

    `trained` are the weights that get gradients in the backward pass. `late` are those whose gradients may be computed
    after the inputs' (zero bubble): all of a segment that has a matrix or a convolution kernel among them, else none.
    The gradients of a norm alone cost next to nothing, and some backward kernels cannot skip the input's gradient.

    `rooms` give memory for outputs inside the window of the exchange that reads them, which saves the copy.
    """

    def __init__(
        self, segment: Compute, owned: Mapping[str, Tensor], rooms: Mapping[str, OutputAllocator] | None = None
    ) -> None:
        self.inputs, self.outputs, self.owned = segment.inputs, segment.outputs, owned
        read = {name for op in segment.ops if op.graded for name in op.reads}
        # `owned` also has entries that are no tensors, such as the device.
        mine = [owned[name] for name in sorted(read & owned.keys())]
        self.trained = [weight for weight in mine if isinstance(weight, Tensor) and weight.requires_grad]
        self.late = self.trained if any(weight.dim() > 1 for weight in self.trained) else []
        over = find_in_place(segment)
        # What a step would look up again and again is resolved here, once: the kernel, its variants (in place, into a
        # window), where its arguments come from, and which values nobody reads after it.
        plain = [bind_kernel(op, IN_PLACE[op.kernel] if op.out in over else op.kernel) for op in segment.ops]
        self.calls = [
            (
                op.out,
                (find_out_kernel(segment, op, rooms or {}) if op.graded else None) or run,
                run,
                _make_lookup(op.arguments),
                _make_lookup(dict(op.keywords)),
                of_no_use,
            )
            for op, run, of_no_use in zip(segment.ops, plain, find_last_reads(segment), strict=True)
        ]

    def __call__(self, values: Mapping[str, Tensor], seed: int, again: bool = False) -> tuple[Tensor, ...]:
        """Return the outputs, with the local graph that leads back to the inputs. `seed` determines random numbers.

        `again`: recomputation for the backward pass, whose outputs no exchange reads; they do not go into a window.
        """
        scope: dict[str, Any] = {**self.owned, SEED.name: seed, **{name: values[name] for name in self.inputs}}
        for out, run, plain, arguments, keywords, of_no_use in self.calls:
            scope[out] = (plain if again else run)(*arguments(scope), **keywords(scope))
            # Freed as early as possible; autograd keeps its own references to what it saves.
            for name in of_no_use:
                del scope[name]
        return tuple(scope[name] for name in self.outputs)

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Compute the gradients of inputs and weights from those of the outputs, and add them to the existing ones."""
        torch.autograd.backward(roots, grads)


def bind_kernel(op: LocalOp, name: str) -> Callable[..., Any]:
    """Return the kernel of that name, without gradient if the op is not graded."""
    run = get_kernel(name)
    if op.graded:
        return run

    def run_without_gradient(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return run(*arguments, **keywords)

    return run_without_gradient


def find_last_reads(segment: Compute) -> list[list[str]]:
    """Return for each operator the names of the segment's values that may be freed after it."""
    # From the last operator backward: a value is needed if it is an output or a later operator reads it.
    needed, made, found = set(segment.outputs), {op.out for op in segment.ops}, []
    for op in reversed(segment.ops):
        here = dict.fromkeys((op.out, *op.reads))
        found.append([name for name in here if name in made and name not in needed])
        needed.update(here)
    return found[::-1]


def _make_lookup(value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that replaces each `Ref` in `value` by the tensor of that name."""
    match value:
        case Ref(name):
            return lambda scope: scope[name]
        case list() | tuple():
            if not any(_has_ref(item) for item in value):
                fixed = list(value)
                return lambda scope: fixed
            parts = [_make_lookup(item) for item in value]
            return lambda scope: [part(scope) for part in parts]
        case dict():
            entries = {key: _make_lookup(item) for key, item in value.items()}
            return lambda scope: {key: part(scope) for key, part in entries.items()}
        case _:
            return lambda scope: value


def _has_ref(value: Any) -> bool:
    return isinstance(value, Ref) or (isinstance(value, list | tuple) and any(_has_ref(item) for item in value))
