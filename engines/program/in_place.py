"""ReLUs that overwrite their input where neither later operators nor the backward pass read it again.

A ReLU's gradient follows from its result, bit for bit. That is not so for other activations.
"""

from __future__ import annotations

from collections import Counter

from engines.program.instructions import Compute, LocalOp
from engines.spatial.kernels import has_kernel

__all__ = ["IN_PLACE", "find_in_place"]

IN_PLACE = {"aten.relu.default": "aten.relu_.default"}
"""Kernels, and the variants that overwrite their argument."""

FORGETFUL = (
    *("aten.conv2d.default", "tile.conv_transpose", "aten.add.Tensor"),
    *("tile.batch_norm", "tile.whole_batch_norm", "aten.batch_norm.default"),
)
"""Kernels that allocate their result, and whose backward does not read it."""


def find_in_place(segment: Compute) -> frozenset[str]:
    """Return the results of a segment that may overwrite the values they are computed from.

    >>> from engines.layer.graph import Ref
    >>> ops = LocalOp("y", "aten.add.Tensor", (Ref("a"), Ref("b"))), LocalOp("z", "aten.relu.default", (Ref("y"),))
    >>> sorted(find_in_place(Compute("s", ops, ("a", "b"), ("z",), True)))
    ['z']
    >>> sorted(find_in_place(Compute("s", ops, ("a", "b"), ("y", "z"), True)))
    []
    """
    active = [op for op in segment.ops if op.kernel in IN_PLACE and not _is_replaced(op)]
    if not active:
        return frozenset()
    made = {op.out: op for op in segment.ops}
    # Readers of each value, the world outside the segment included. A ReLU may overwrite what nobody else reads:
    #
    #   y = conv(x); z = relu(y)              z in y's memory
    #   y = conv(x); z = relu(y); w = y + z   a second reader: z gets its own
    #   y = sigmoid(x); z = relu(y)           the backward pass of sigmoid reads y: z gets its own
    asked_for = Counter(segment.outputs) + Counter(name for op in segment.ops for name in op.reads)
    return frozenset(op.out for op in active if asked_for[op.reads[0]] == 1 and _is_free(op.reads[0], made))


def _is_free(name: str, made: dict[str, LocalOp]) -> bool:
    """Return whether a value that is read once has memory of its own, of which autograd keeps no reference."""
    op = made.get(name)
    if op is not None and op.kernel == "getitem":  # one of several results, unless it is taken twice
        alike = sum(each.kernel == op.kernel and each.arguments == op.arguments for each in made.values())
        op = made.get(op.reads[0]) if alike == 1 else None
    return op is not None and op.kernel in FORGETFUL and not _is_replaced(op)


def _is_replaced(op: LocalOp) -> bool:
    """Return whether a user's own kernel replaces one of ATen's."""
    return op.kernel.startswith("aten.") and has_kernel(op.kernel)
