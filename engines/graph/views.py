"""Views: values that share the storage of others, and how a write through a view changes these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

__all__ = [
    "Make",
    "find_storages",
    "invert_view",
    "is_idle_dropout",
    "is_inplace_view",
    "is_replayable",
    "make_masked_where",
]

Make = Callable[..., fx.Node]
"""`make(target, *arguments)` appends an operator to the graph and returns its node."""

_ATEN = torch.ops.aten

_RENAMES = {f"aten.{name}_.default" for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")} | {
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
}


def find_storages(module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """Map each node of a traced graph to the storages of its value or values.

    Two nodes share a storage exactly if they are views of the same memory. The map must be made before the graph is
    changed, since replacements of a node have storages of their own.
    """
    # Fake tensors have no data pointers, but their storages are objects: views share one, as real tensors do.
    found = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, list | tuple) else (value,)
        found[node] = frozenset(part.untyped_storage()._cdata for part in parts if isinstance(part, Tensor))
    return found


def is_idle_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout that drops nothing: it returns its input itself, unseen in a trace."""
    if "dropout" not in str(node.target):
        return False
    return not (_get_argument(node, "train") and _get_argument(node, "p"))


def is_inplace_view(node: fx.Node) -> bool:
    """Return whether an operator changes the shape of its argument in place, as `unsqueeze_` does."""
    return str(node.target) in _RENAMES


def is_replayable(node: fx.Node) -> bool:
    """Return whether a node is a view in every memory format, so that it can be replayed on new contents."""
    name = str(node.target)
    return name in _BACK or name in ("aten.detach.default", "aten.expand.default")


def invert_view(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node | None:
    """Return the contents of a view's argument after the view was set to `part`; None if they are not known.

    `base` holds the contents before. A copy, a detached value or an expanded one has no inverse, and autograd forbids
    writes through one of several views (`chunk`, `unbind`).
    """
    invert = _BACK.get(str(view.target))
    return invert(make, view, base, part) if invert else None


# Inverses. A part of the base is written back into the base; a view of all of it is turned back into the base's shape:
#
#     view = base[2:4]         base' = slice_scatter(base, part, 0, 2, 4)
#     view = base.permute(p)   base' = part.permute(inverse of p)
#
# After `base'` is computed, every other view of the same storage is replayed from it.


def _get_argument(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by the name in its schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next(index for index, each in enumerate(schema) if each.name == name)
    given = node.kwargs.get(name, schema[place].default_value)
    return node.args[place] if place < len(node.args) else given


def _scatter(target: Any, *names: str) -> Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]:
    """Return the inverse of a view of a part: `target` with the view's own arguments `names`."""
    return lambda make, view, base, part: make(target, base, part, *(_get_argument(view, name) for name in names))


def _invert_narrow(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    dim, start = _get_argument(view, "dim"), _get_argument(view, "start")
    return make(_ATEN.slice_scatter.default, base, part, dim, start, start + _get_argument(view, "length"))


def _invert_permute(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    count = base.meta["val"].dim()
    order = [dim % count for dim in _get_argument(view, "dims")]
    return make(_ATEN.permute.default, part, [order.index(dim) for dim in range(count)])


def _list_names(names: str) -> list[str]:
    return [f"aten.{name}" for name in names.split()]


_BACK: dict[str, Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    "aten.alias.default": lambda make, view, base, part: part,
    "aten.slice.Tensor": _scatter(_ATEN.slice_scatter.default, "dim", "start", "end", "step"),
    "aten.narrow.default": _invert_narrow,
    "aten.select.int": _scatter(_ATEN.select_scatter.default, "dim", "index"),
    "aten.diagonal.default": _scatter(_ATEN.diagonal_scatter.default, "offset", "dim1", "dim2"),
    "aten.permute.default": _invert_permute,
    **dict.fromkeys(  # the same elements in the same order
        _list_names(
            "view.default view_as.default unflatten.int unsqueeze.default squeeze.default squeeze.dim squeeze.dims"
        ),
        lambda make, view, base, part: make(_ATEN.reshape.default, part, list(base.meta["val"].shape)),
    ),
    **dict.fromkeys(  # their own inverses
        _list_names("transpose.int swapaxes.default swapdims.default t.default mT.default"),
        lambda make, view, base, part: make(view.target, part, *view.args[1:]),
    ),
    **dict.fromkeys(
        _list_names("movedim.int movedim.intlist moveaxis.int"),
        lambda make, view, base, part: make(view.target, part, view.args[2], view.args[1]),
    ),
}


# Assignments by a boolean mask: `y[y < 0] = 0` becomes a `torch.where` at each position.


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
