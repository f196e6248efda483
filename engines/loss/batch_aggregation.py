"""How the values that a loss computes for each micro-batch combine to the value for the whole batch."""

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
    """How the values of all micro-batches combine to that of the whole batch."""

    ROWS = "concatenated"
    SUM = "added"
    SAME = "equal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BatchAggregation:
    """How a value of M micro-batches aggregates: whole = combine(values by `kind`) / M ** `degree`.

    A sum over the batch has degree 0, a mean degree 1. `axis` is the image axis, counted from the front. `known`: the
    value depends only on the labels and untrained tensors, not on other micro-batches. `derived`: it depends on a
    total over all micro-batches. `over` are the denominators of a loss; "" stands for a mean over a constant count.
    """

    kind: AggregationKind
    degree: int = 0
    axis: int = 0
    known: bool = False
    derived: bool = False
    over: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether any pointwise function, linear or not, may be applied to each micro-batch separately."""
        return self.kind in (AggregationKind.ROWS, AggregationKind.SAME) and self.degree == 0

    def combine(self, *others: BatchAggregation, **changes: object) -> BatchAggregation:
        """Return the aggregation of a value computed from this one and `others`.

        It is known if all are, derived if any is, and has the denominators of all. `changes` replace fields.
        """
        every = (self, *others)
        known, derived = all(each.known for each in every), any(each.derived for each in every)
        over = frozenset().union(*(each.over for each in every))
        return replace(self, known=known, derived=derived, over=over, **changes)


# Two micro-batches (M = 2) of four images, and the mean squared error of their predictions p:
#
#     value               micro-batch 0      micro-batch 1      whole batch                   aggregation
#     (p - y) ** 2        [a b]              [c d]              [a b c d]                     ROWS
#     .sum()              a + b              c + d              their sum                     SUM, degree 0
#     .mean()             (a + b) / 2        (c + d) / 2        their sum / 2                 SUM, degree 1
#     weight.norm()       w                  w                  w                             SAME
#     (p - y).sum() ** 2  ...                ...                no function of the two above  UNKNOWN
#
# A loss of degree 1 is what training needs: the mean of the micro-batches' losses is that of the whole batch.
CONSTANT = BatchAggregation(AggregationKind.SAME, known=True)


def find_batch_axis(one: TensorSpec | None, two: TensorSpec | None) -> int | None:
    """Return the axis whose size doubles with the number of images, or None unless it is the only axis that differs.

    >>> find_batch_axis(TensorSpec((3, 2, 8), "float32"), TensorSpec((3, 4, 8), "float32"))
    1
    """
    if one is None or two is None or len(one.shape) != len(two.shape):
        return None
    apart = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return apart[0] if len(apart) == 1 and two.shape[apart[0]] == 2 * one.shape[apart[0]] else None


def is_batch_axis_kept(before: TensorSpec, axis: int, after: TensorSpec, new_axis: int) -> bool:
    """Return whether a view keeps images separate: the element count before their axis is unchanged.

    >>> is_batch_axis_kept(TensorSpec((2, 3, 8), "float32"), 0, TensorSpec((16, 3), "float32"), 0)
    True
    """
    return prod(before.shape[:axis]) == prod(after.shape[:new_axis])


def compute_reduced_axis(axis: int, dims: Iterable[int], keepdim: bool) -> int:
    """Return the image axis after a reduction over `dims` (counted from the front)."""
    return axis if keepdim else axis - sum(dim < axis for dim in dims)


def normalise_dims(given: Any, count: int) -> tuple[int, ...]:
    """Return the dimensions that an argument names as non-negative numbers, for a tensor of `count` dimensions."""
    listed: Iterable[int] = [given] if isinstance(given, int) else given or ()
    return tuple(dim % count for dim in listed) if count else ()
