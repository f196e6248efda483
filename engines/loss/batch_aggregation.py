"""What a value that the loss computes for one micro-batch is of the same value for the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

from engines.layer.graph import TensorSpec

__all__ = [
    "CONSTANT",
    "AggregationKind",
    "BatchAggregation",
    "compute_reduced_axis",
    "find_batch_axis",
    "is_batch_axis_kept",
    "normalise_dims",
]


class AggregationKind(Enum):
    """How the values of all micro-batches make that of the whole batch."""

    ROWS = "concatenated"
    SUM = "added"
    SAME = "equal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BatchAggregation:
    """A value of one of M micro-batches. Joined as `kind` says, and divided by M `degree` times, they are the whole.

    So a sum has degree 0 and a mean over the batch degree 1. `axis` is that of the images, from the front. `known`:
    it follows from the labels and from what is not trained, without other micro-batches. `derived`: it follows from a
    total over all micro-batches. `over` are the denominators of a loss: "" where a mean divides by a constant.
    """

    kind: AggregationKind
    degree: int = 0
    axis: int = 0
    known: bool = False
    derived: bool = False
    over: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether a function of it, linear or not, is the same function of the whole."""
        return self.kind in (AggregationKind.ROWS, AggregationKind.SAME) and self.degree == 0

    def combine(self, *others: BatchAggregation, **changes: object) -> BatchAggregation:
        """What is computed from it and `others`: known if all are, derived if any is, over all their denominators."""
        every = (self, *others)
        return replace(
            self, known=all(each.known for each in every), derived=any(each.derived for each in every),
            over=frozenset().union(*(each.over for each in every)), **changes,
        )  # fmt: skip


CONSTANT = BatchAggregation(AggregationKind.SAME, known=True)


def find_batch_axis(one: TensorSpec | None, two: TensorSpec | None) -> int | None:
    """The axis along which a micro-batch of twice as many images has twice as many entries, if it is the only one.

    >>> find_batch_axis(TensorSpec((3, 2, 8), "float32"), TensorSpec((3, 4, 8), "float32"))
    1
    """
    if one is None or two is None or len(one.shape) != len(two.shape):
        return None
    apart = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return apart[0] if len(apart) == 1 and two.shape[apart[0]] == 2 * one.shape[apart[0]] else None


def is_batch_axis_kept(before: TensorSpec, axis: int, after: TensorSpec, new_axis: int) -> bool:
    """Whether a view keeps the images of micro-batches apart: as many entries lie before their axis as did.

    >>> is_batch_axis_kept(TensorSpec((2, 3, 8), "float32"), 0, TensorSpec((16, 3), "float32"), 0)
    True
    """
    return prod(before.shape[:axis]) == prod(after.shape[:new_axis])


def compute_reduced_axis(axis: int, dims: Iterable[int], keepdim: bool) -> int:
    """Where the images lie when the dimensions `dims` (from the front) are gone."""
    return axis if keepdim else axis - sum(dim < axis for dim in dims)


def normalise_dims(given: Any, count: int) -> tuple[int, ...]:
    """The dimensions among `count` that an argument names, from the front."""
    listed: Iterable[int] = [given] if isinstance(given, int) else given or ()
    return tuple(dim % count for dim in listed) if count else ()
