"""A segment ready to run: its kernels resolved once, its arguments looked up by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mpi4dl_nb.engines.graph.model_graph import Ref, find_ref_names
from mpi4dl_nb.engines.program.effects import LocalOp
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner
from mpi4dl_nb.engines.program.instructions import SEED, Compute
from mpi4dl_nb.engines.program.kernels import get_kernel, has_kernel
from mpi4dl_nb.engines.program.program import DirectionProgram

# ReLUs that overwrite their input where neither later operators nor the backward pass read it again.
#
# A ReLU's gradient follows from its result, bit for bit. That is not so for other activations.


IN_PLACE = {"aten.relu.default": "aten.relu_.default"}
"""Kernels, and the variants that overwrite their argument."""

FORGETFUL = (
    *(f"aten.conv{count}d.default" for count in (1, 2, 3)),
    *("tile.conv_transpose", "aten.add.Tensor"),
    *("tile.batch_norm", "tile.whole_batch_norm", "aten.batch_norm.default"),
)
"""Kernels that allocate their result, and whose backward does not read it."""


def find_in_place(segment: Compute) -> frozenset[str]:
    """Return the results of a segment that may overwrite the values they are computed from.

    >>> from mpi4dl_nb.engines.graph.model_graph import Ref
    >>> ops = LocalOp("y", "aten.add.Tensor", (Ref("a"), Ref("b"))), LocalOp("z", "aten.relu.default", (Ref("y"),))
    >>> sorted(find_in_place(Compute("s", ops, ("a", "b"), ("z",), True)))
    ['z']
    >>> sorted(find_in_place(Compute("s", ops, ("a", "b"), ("y", "z"), True)))
    []
    """
    active = [op for op in segment.ops if op.kernel in IN_PLACE and not _is_replaced(op)]
    if not active:
        return frozenset()
    writers = {op.out: op for op in segment.ops}
    # Readers of each value, the world outside the segment included. A ReLU may overwrite what nobody else reads:
    #
    #   y = conv(x); z = relu(y)              z in y's memory
    #   y = conv(x); z = relu(y); w = y + z   a second reader: z gets its own
    #   y = sigmoid(x); z = relu(y)           the backward pass of sigmoid reads y: z gets its own
    asked_for = Counter(segment.outputs) + Counter(name for op in segment.ops for name in op.reads)
    return frozenset(op.out for op in active if asked_for[op.reads[0]] == 1 and _is_free(op.reads[0], writers))


def _is_free(name: str, made: dict[str, LocalOp]) -> bool:
    """Return whether a value that is read once has memory of its own, of which autograd keeps no reference."""
    op = made.get(name)
    if op is not None and op.kernel == "getitem":  # one of several results, unless it is taken twice
        alike = sum(local_op.kernel == op.kernel and local_op.arguments == op.arguments for local_op in made.values())
        op = made.get(op.reads[0]) if alike == 1 else None
    return op is not None and op.kernel in FORGETFUL and not _is_replaced(op)


def _is_replaced(op: LocalOp) -> bool:
    """Return whether a user's own kernel replaces one of ATen's."""
    return op.kernel.startswith("aten.") and has_kernel(op.kernel)


# Outputs written in place into the window of the next exchange, which saves a copy and a second buffer.
#
# A kernel that can write to given memory gets the middle of that window; the exchange then only adds the halo around
# it.


OutputAllocator = Callable[[], Tensor]
"""Returns a new tensor for a value, the middle of a larger allocation."""

Rooms = Mapping[str, OutputAllocator]
"""The allocators of the values of a segment that may be the middle of a window, by name."""


def _allocate_out(room: OutputAllocator, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the tensor of `room` if it has that shape and type, else a new one."""
    middle = room()
    fits = (middle.shape, middle.dtype) == (shape, dtype)
    return middle if fits else torch.empty(shape, dtype=dtype, device=middle.device)


@dataclass(frozen=True, slots=True)
class _PointwiseRule:
    """How to write an activation to given memory, and how to compute its gradient.

    The gradient is computed from the input or (`by_result`) from the result. Both functions take the operator's other
    arguments in ATen's order.
    """

    write: Callable[..., object]
    gradient: Callable[..., Tensor]
    by_result: bool = False

    def __call__(self, room: OutputAllocator, x: Tensor, *arguments: Any) -> Tensor:
        return _PointwiseOut.apply(x, room, self, *arguments)


class _PointwiseOut(torch.autograd.Function):
    """Applies a pointwise operator, (N, C, h, w) -> the same shape, in the memory that `room` allocates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: OutputAllocator, rule: _PointwiseRule, *arguments: Any) -> Tensor:
        out = _allocate_out(room, x.shape, x.dtype)
        rule.write(x, *arguments, out=out)
        ctx.rule, ctx.arguments = rule, arguments
        ctx.save_for_backward(out if rule.by_result else x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return ctx.rule.gradient(grad, kept, *ctx.arguments), None, None, *(None for _ in ctx.arguments)


class _CatOut(torch.autograd.Function):
    """Concatenates tensors along `dim` in the memory that `room` allocates."""

    @staticmethod
    def forward(ctx: Any, room: OutputAllocator, dim: int, *tensors: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return torch.cat(tensors, dim, out=_allocate_out(room, torch.Size(shape), dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grad.split(ctx.sizes, ctx.dim)


# Only kernels whose result is bitwise the same in strided memory; that is not so for exponentials.
_aten = torch.ops.aten
_INTO: Mapping[str, Callable[..., Tensor]] = {
    "aten.relu.default": _PointwiseRule(
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda grad, out: _aten.threshold_backward(grad, out, 0),
        by_result=True,
    ),
    "aten.leaky_relu.default": _PointwiseRule(
        _aten.leaky_relu.out, lambda grad, x, slope=0.01: _aten.leaky_relu_backward(grad, x, slope, False)
    ),
    "aten.hardswish.default": _PointwiseRule(_aten.hardswish.out, _aten.hardswish_backward),
    "aten.cat.default": lambda room, tensors, dim=0: _CatOut.apply(room, dim, *tensors),
}


def find_output_allocators(way: DirectionProgram, carriers: Mapping[str, ExchangeRunner]) -> dict[str, OutputAllocator]:
    """Return allocators for the values that may be computed inside a window."""
    return {name: carriers[item.name].allocate_source for name, item in way.rooms.items()}


def has_out_kernel(segment: Compute, op: LocalOp, rooms: Container[str]) -> bool:
    """Return whether there is memory in a window for what `op` makes, and a variant of its kernel that writes there.

    An op of the same segment that also read the value would get strided memory: a convolution would then make the very
    copy that is saved.
    """
    if op.out not in rooms or op.kernel not in _INTO or _is_replaced(op):
        return False
    return not any(op.out in other.reads for other in segment.ops)


class Segment:
    """Calls a segment's kernels in order; `owned` are the rank's weights and buffers.

    `trained` are the weights that get gradients in the backward pass. `late` are those whose gradients may be computed
    after the inputs' (zero bubble): all of a segment that has a matrix or a convolution kernel among them, else none.
    The gradients of a norm alone cost next to nothing, and some backward kernels cannot skip the input's gradient.

    `rooms` give memory for outputs inside the window of the exchange that reads them, which saves the copy.
    """

    def __init__(self, segment: Compute, owned: Mapping[str, Any], rooms: Rooms | None = None) -> None:
        rooms = rooms or {}
        self.inputs, self.outputs = segment.inputs, segment.outputs
        # Only what it reads, since each call copies it.
        self.owned = {name: owned[name] for op in segment.ops for name in op.reads if name in owned}
        read = sorted({name for op in segment.ops if op.graded for name in op.reads} & self.owned.keys())
        # `owned` also has entries that are no tensors, such as the device.
        mine = [owned[name] for name in read]
        self.trained = [weight for weight in mine if isinstance(weight, Tensor) and weight.requires_grad]
        self.late = self.trained if any(weight.dim() > 1 for weight in self.trained) else []
        over = find_in_place(segment)
        # What a step would look up again and again is resolved here, once: the kernel, its variants (in place, into a
        # window), where its arguments come from, and which values nobody reads after it.
        self.calls = []
        for op, of_no_use in zip(segment.ops, find_last_reads(segment), strict=True):
            plain = bind_kernel(op, IN_PLACE[op.kernel] if op.out in over else op.kernel)
            has_room = op.graded and has_out_kernel(segment, op, rooms)
            run = partial(_INTO[op.kernel], rooms[op.out]) if has_room else plain
            lookups = make_lookup(op.arguments), make_lookup(dict(op.keywords))
            self.calls.append((op.out, run, plain, *lookups, of_no_use))

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

    def backward(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
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
    needed, written, last_reads = set(segment.outputs), {op.out for op in segment.ops}, []
    for op in reversed(segment.ops):
        here = dict.fromkeys((op.out, *op.reads))
        last_reads.append([name for name in here if name in written and name not in needed])
        needed.update(here)
    return last_reads[::-1]


def make_lookup(value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that replaces each `Ref` in `value` by the tensor of that name."""
    match value:
        case Ref(name):
            return lambda scope: scope[name]
        case list() | tuple():
            if next(find_ref_names(value), None) is None:
                fixed = list(value)
                return lambda scope: fixed
            parts = [make_lookup(item) for item in value]
            return lambda scope: [part(scope) for part in parts]
        case dict():
            entries = {key: make_lookup(item) for key, item in value.items()}
            return lambda scope: {key: part(scope) for key, part in entries.items()}
        case _:
            return lambda scope: value
