"""Views: values that lie in the memory of others, and what a write through one does to these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["Make", "find_storages", "invert_view", "is_idle_dropout", "is_inplace_view", "is_replayable"]

Make = Callable[..., fx.Node]
"""`make(target, *arguments)` appends an operator to the graph."""

_ATEN = torch.ops.aten

_RENAMES = {f"aten.{name}_.default" for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")} | {
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
}


def find_storages(module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """Of each node of a traced graph the memory in which its value lies, or in which its several values lie.

    Two nodes have the same memory exactly where one is a view of the other. It must be asked for before the graph is
    changed, since what takes a node's place later has memory of its own.
    """
    return {node: frozenset(_iterate_storages(node)) for node in module.graph.nodes}


def _iterate_storages(node: fx.Node) -> Iterator[int]:
    value = node.meta.get("val")
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Tensor):
            yield part.untyped_storage()._cdata


def is_idle_dropout(node: fx.Node) -> bool:
    """Whether a node is a dropout that drops nothing: it answers with its input itself, which a trace does not show."""
    if "dropout" not in str(node.target):
        return False
    return not (_get_argument(node, "train") and _get_argument(node, "p"))


def is_inplace_view(node: fx.Node) -> bool:
    """Whether an operator gives its argument another shape in place: `unsqueeze_` and the like."""
    return str(node.target) in _RENAMES


def is_replayable(node: fx.Node) -> bool:
    """Whether a node is a view in every memory format, so that what is read through it later can be read anew."""
    name = str(node.target)
    return name in _BACK or name in ("aten.detach.default", "aten.expand.default")


def invert_view(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node | None:
    """What the memory of a view's argument holds once the view holds `part`.

    `base` is what the memory held. None where that is not known: nothing leads from a copy, a detached value or an
    expanded one to where it came from; and through one of several views (`chunk`, `unbind`) autograd lets nobody write.
    """
    back = _BACK.get(str(view.target))
    return back(make, view, base, part) if back else None


def _get_argument(node: fx.Node, name: str) -> Any:
    """An argument of an operator by its schema's name."""
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
