"""Assignments by a boolean mask: `y[y < 0] = 0` becomes a `torch.where` at each position."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from engines.layer.views import Make

__all__ = ["make_masked_where"]


def make_masked_where(make: Make, node: fx.Node, value: fx.Node) -> fx.Node | None:
    """Return `value` after an `index_put_` with one boolean mask, as a `torch.where`; None if that is not possible.

    It is possible if all masked positions get the same number, the same vector along the axes after the mask, or the
    values of another tensor at the same positions (`y[mask] = z[mask]`).
    """
    if node.target is not torch.ops.aten.index_put_.default:
        return None
    if node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False):
        return None
    indices, new = node.args[1], node.args[2]
    given = [(place, index) for place, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    if len(given) != 1 or given[0][1].meta["val"].dtype != torch.bool:
        return None
    place, mask = given[0]
    behind = value.meta["val"].dim() - place - mask.meta["val"].dim()
    picked = None
    if new.target is torch.ops.aten.index.Tensor and _is_same(new.args[1], indices):  # y[mask] = z[mask]
        source = new.args[0]
        if source.meta["val"].shape == value.meta["val"].shape:
            picked = source
    picked = picked or _make_broadcastable(make, new, behind)
    if picked is None:
        return None
    if behind:
        mask = make(torch.ops.aten.reshape.default, mask, [*mask.meta["val"].shape, *[1] * behind])
    return make(torch.ops.aten.where.self, mask, picked, value)


def _is_same(one: object, other: object) -> bool:
    """Return whether two arguments are equal for all images: `y < 0` may be computed once for each side."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)) or one is other:
        return type(one) is type(other) and one == other
    is_computed = one.op == other.op == "call_function" and one.target is other.target
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    return is_computed and not is_drawn and _is_same(one.args, other.args) and one.kwargs == other.kwargs


def _make_broadcastable(make: Make, new: fx.Node, behind: int) -> fx.Node | None:
    """Return `new` so that it broadcasts over all masked positions; None if it differs between them."""
    found = new.meta["val"]
    if not isinstance(found, Tensor) or any(not isinstance(size, int) for size in found.shape):
        return None
    if found.dim() <= behind:
        return new
    return make(torch.ops.aten.reshape.default, new, []) if found.numel() == 1 else None
