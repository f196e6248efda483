"""Views: operators whose result lies in the memory of their first argument, and what a write through one does to it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["Make", "is_certain", "is_view", "renames", "written_base"]

Make = Callable[..., fx.Node]
"""`make(target, *arguments)` appends an operator to the graph."""

_ATEN = torch.ops.aten

_MAYBE = ("chunk", "split")
"""Parts of the names of operators that return several views."""

_RENAMES = {f"aten.{name}_.default" for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")} | {
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
}


def is_view(node: fx.Node) -> bool:
    """Whether the result lies, or may lie, in the memory of the first input."""
    if _is_pick(node):
        several = node.args[0] if node.target is operator.getitem else None
        return isinstance(several, fx.Node) and is_view(several)
    if node.target._schema.is_mutable or node.target is _ATEN.lift_fresh_copy.default:  # type: ignore[union-attr]
        return False
    if "dropout" in str(node.target):
        return not (_argument(node, "train") and _argument(node, "p"))
    if isinstance(node.meta.get("val"), Tensor):
        return _shares_memory(node)
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return bool(returns and returns[0].alias_info) or any(name in str(node.target) for name in _MAYBE)


def _shares_memory(node: fx.Node) -> bool:
    """Whether the result of an operator turned out to lie in the memory of what it read first."""
    made = node.meta.get("val")
    first = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(first, Tensor):
        return False
    parts = made if isinstance(made, list | tuple) else (made,)
    memory = first.untyped_storage()._cdata
    return any(part.untyped_storage()._cdata == memory for part in parts if isinstance(part, Tensor))


def renames(node: fx.Node) -> bool:
    """Whether an operator gives its argument another shape in place: `unsqueeze_` and the like."""
    return str(node.target) in _RENAMES


def is_certain(node: fx.Node) -> bool:
    """Whether a node is a view in every memory format, so that what is read through it later can be read anew."""
    name = str(node.target)
    return name in _BACK or name in ("aten.detach.default", "aten.expand.default")


def written_base(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node | None:
    """What the memory of a view's argument holds once the view holds `part`.

    `base` is what the memory held. None where that is not known: nothing leads from a copy, a detached value or an
    expanded one to where it came from; and through one of several views (`chunk`, `unbind`) autograd lets nobody write.
    """
    back = _BACK.get(str(view.target))
    return back(make, view, base, part) if back else None


def _is_pick(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload)


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of an operator by its schema's name."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    place = next(index for index, each in enumerate(schema) if each.name == name)
    given = node.kwargs.get(name, schema[place].default_value)
    return node.args[place] if place < len(node.args) else given


def _sliced(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    settings = (_argument(view, name) for name in ("dim", "start", "end", "step"))
    return make(_ATEN.slice_scatter.default, base, part, *settings)


def _narrowed(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    start = _argument(view, "start")
    settings = _argument(view, "dim"), start, start + _argument(view, "length")
    return make(_ATEN.slice_scatter.default, base, part, *settings)


def _selected(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(_ATEN.select_scatter.default, base, part, _argument(view, "dim"), _argument(view, "index"))


def _on_diagonal(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    settings = (_argument(view, name) for name in ("offset", "dim1", "dim2"))
    return make(_ATEN.diagonal_scatter.default, base, part, *settings)


def _reshaped(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(_ATEN.reshape.default, part, list(base.meta["val"].shape))


def _permuted(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    count = base.meta["val"].dim()
    order = [dim % count for dim in _argument(view, "dims")]
    return make(_ATEN.permute.default, part, [order.index(dim) for dim in range(count)])


def _swapped(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(view.target, part, *view.args[1:])


def _moved(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return make(view.target, part, view.args[2], view.args[1])


def _itself(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    return part


_BACK: dict[str, Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    "aten.alias.default": _itself,
    "aten.slice.Tensor": _sliced,
    "aten.narrow.default": _narrowed,
    "aten.select.int": _selected,
    "aten.diagonal.default": _on_diagonal,
    "aten.permute.default": _permuted,
    **dict.fromkeys(
        [f"aten.{name}" for name in ("view.default", "view_as.default", "unflatten.int", "unsqueeze.default",
                                     "squeeze.default", "squeeze.dim", "squeeze.dims")],
        _reshaped,
    ),
    **dict.fromkeys(
        [f"aten.{name}" for name in ("transpose.int", "swapaxes.default", "swapdims.default", "t.default",
                                     "mT.default")],
        _swapped,
    ),
    **dict.fromkeys([f"aten.{name}" for name in ("movedim.int", "movedim.intlist", "moveaxis.int")], _moved),
}  # fmt: skip
