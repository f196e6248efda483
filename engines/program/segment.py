"""One segment, made ready to run: its kernels found once, its arguments looked up by name."""

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

Lookup = Callable[[dict[str, Any]], Any]


class Segment:
    """Calls a segment's kernels in order; `owned` are the rank's weights and buffers.

    `trained` are the weights that backward gives gradients; `late` those whose gradients may be computed after the
    inputs': all of a segment with a matrix or kernel among them. Those of a norm cost nothing by themselves, and
    kernels exist that cannot leave the input out.

    `rooms` says where values may be made so that the exchange that reads them need not copy them.
    """

    def __init__(
        self, segment: Compute, owned: Mapping[str, Tensor], rooms: Mapping[str, OutputAllocator] | None = None
    ) -> None:
        self.inputs, self.outputs, self.owned = segment.inputs, segment.outputs, owned
        read = {name for op in segment.ops if op.graded for name in op.reads}
        self.trained = [owned[name] for name in sorted(read & owned.keys()) if _is_trained(owned[name])]
        self.late = self.trained if any(weight.dim() > 1 for weight in self.trained) else []
        over = find_in_place(segment)
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
        """The outputs, with the local graph that leads back to the inputs. Random numbers follow from `seed`.

        `again`: no exchange will read them, as none does where backward computes them a second time.
        """
        scope: dict[str, Any] = {**self.owned, SEED.name: seed, **{name: values[name] for name in self.inputs}}
        for out, run, plain, arguments, keywords, of_no_use in self.calls:
            scope[out] = (plain if again else run)(*arguments(scope), **keywords(scope))
            for name in of_no_use:
                del scope[name]
        return tuple(scope[name] for name in self.outputs)

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """From gradients of what it made, those of its inputs and weights, added to what these have already."""
        torch.autograd.backward(roots, grads)


def bind_kernel(op: LocalOp, name: str) -> Callable[..., Any]:
    """The kernel of that name, as the operator runs it."""
    run = get_kernel(name)
    if op.graded:
        return run

    def run_without_gradient(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return run(*arguments, **keywords)

    return run_without_gradient


def find_last_reads(segment: Compute) -> list[list[str]]:
    """For each operator the names of what the segment makes that is of no use behind it, and may go."""
    needed, made, found = set(segment.outputs), {op.out for op in segment.ops}, []
    for op in reversed(segment.ops):
        here = dict.fromkeys((op.out, *op.reads))
        found.append([name for name in here if name in made and name not in needed])
        needed.update(here)
    return found[::-1]


def _is_trained(owned: Any) -> bool:
    return isinstance(owned, Tensor) and owned.requires_grad


def _make_lookup(value: Any) -> Lookup:
    """A function that puts live tensors where the `Ref`s are."""
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
