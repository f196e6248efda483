"""A library of a user's that keeps tensors, for `test_kept_tensors.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

KEPT: dict[tuple[int, int], Tensor] = {}


@functools.cache
def keep_positions(h: int, w: int) -> Tensor:
    return torch.arange(h * w).view(1, 1, h, w).float() / (h * w)


def get_positions(h: int, w: int) -> Tensor:
    return keep_positions(h, w)


def import_positions(h: int, w: int) -> Tensor:
    from tests.graph.keeping import KEPT as known  # noqa: N811

    if (h, w) not in known:
        known[h, w] = keep_positions(h, w)
    return known[h, w]
