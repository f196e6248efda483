"""Views: values that share the storage of others, and how a write through a view changes these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["Make", "find_storages", "invert_view", "is_idle_dropout", "is_inplace_view", "is_replayable"]

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
    return {node: frozenset(_iterate_storages(node)) for node in module.graph.nodes}


def _iterate_storages(node: fx.Node) -> Iterator[int]:
    value = node.meta.get("val")
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Tensor):
            yield part.untyped_storage()._cdata


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
    back = _BACK.get(str(view.target))
    return back(make, view, base, part) if back else None


def _get_argument(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by the name in its schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next(index for index, each in enumerate(schema) if each.name == name)
    given = node.kwargs.get(name, schema[place].default_value)
    return node.args[place] if place < len(node.args) else given


def _invert_slice(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    settings = (_get_argument(view, name) for name in ("dim", "start", "end", "step"))
    return make(_ATEN.slice_scatter.default, base, part, *settings)


def _invert_narrow(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    start = _get_argument(view, "start")
    settings = _get_argument(view, "dim"), start, start + _get_argument(view, "length")
    return make(_ATEN.slice_scatter.default, base, part, *settings)


def _invert_select(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(_ATEN.select_scatter.default, base, part, _get_argument(view, "dim"), _get_argument(view, "index"))


def _invert_diagonal(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    settings = (_get_argument(view, name) for name in ("offset", "dim1", "dim2"))
    return make(_ATEN.diagonal_scatter.default, base, part, *settings)


def _invert_reshape(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(_ATEN.reshape.default, part, list(base.meta["val"].shape))


def _invert_permute(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    count = base.meta["val"].dim()
    order = [dim % count for dim in _get_argument(view, "dims")]
    return make(_ATEN.permute.default, part, [order.index(dim) for dim in range(count)])


def _invert_transpose(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(view.target, part, *view.args[1:])


def _invert_movedim(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(view.target, part, view.args[2], view.args[1])


def _invert_alias(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return part


_BACK: dict[str, Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    "aten.alias.default": _invert_alias,
    "aten.slice.Tensor": _invert_slice,
    "aten.narrow.default": _invert_narrow,
    "aten.select.int": _invert_select,
    "aten.diagonal.default": _invert_diagonal,
    "aten.permute.default": _invert_permute,
    **dict.fromkeys(
        [f"aten.{name}" for name in ("view.default", "view_as.default", "unflatten.int", "unsqueeze.default",
                                     "squeeze.default", "squeeze.dim", "squeeze.dims")],
        _invert_reshape,
    ),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("transpose.int", "swapaxes.default", "swapdims.default", "t.default",
                                     "mT.default")],
        _invert_transpose,
    ),
    **dict.fromkeys([f"aten.{name}" for name in ("movedim.int", "movedim.intlist", "moveaxis.int")], _invert_movedim),
}  # fmt: skip
