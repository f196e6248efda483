"""Rewrite in-place operators: the same graph without operators that mutate a tensor.

Each value is tracked through its views. A write creates a new value of the written view and, from it, a new value of
the storage that the view shares. Later reads of that storage, through any view, are replayed from the new value (view
replay, as in PyTorch's own functionalisation). Gradients are those of autograd, which rewrites its graph in the same
way.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.exported_nodes import WRITTEN, describe_location, find_source_line, is_no_grad
from mpi4dl_nb.engines.graph.model_graph import WITHOUT_GRADIENT, to_user_name

_MADE, _VIEW = "made_here", "view"
_ATEN = torch.ops.aten

Make = Callable[..., fx.Node]
"""`make(target, *arguments)` appends an operator to the graph and returns its node."""

_RENAMED = {  # in-place operators whose out-of-place form has a different name
    "bernoulli_.float": "bernoulli.p",
    "bernoulli_.Tensor": "bernoulli.Tensor",
    "normal_.default": "normal_functional.default",
    "fill_.Scalar": "full_like.default",
    "zero_.default": "zeros_like.default",
    **{f"__i{name}__.{of}": f"__{name}__.{of}" for name in ("and", "or", "xor") for of in ("Tensor", "Scalar")},
}

_INPLACE_VIEWS = {  # they change the shape of their argument in place
    *(f"aten.{name}_.default" for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")),
    *("aten.squeeze_.dim", "aten.squeeze_.dims"),
}


@dataclass
class _Memory:
    """A storage that aliases share. `outlives` is set if the storage persists after a step.

    `version` counts the writes to the storage, and `writer` is the last of them.
    """

    outlives: bool
    version: int = 0
    writer: fx.Node | None = None


@dataclass
class _Alias:
    """A view of a `memory`: all of it, or `view` of `parent`. `value` holds its contents as of `version`."""

    memory: _Memory
    parent: _Alias | None
    view: fx.Node
    value: fx.Node
    version: int

    @property
    def base(self) -> _Alias:
        """The alias of the whole storage."""
        return self.parent.base if self.parent else self


def functionalise(module: fx.GraphModule, owned: Collection[str]) -> fx.GraphModule:
    """Replace the in-place operators of a module, except those that increment a buffer, and return the module.

    `owned` are the names of weights and buffers. Raises TraceError if a node reads a value that was changed through
    what may be a view or a copy of it, if a tensor with a gradient is written under `torch.no_grad()`, or if a tensor
    that outlives the step is written.
    """
    walk = _Functionaliser(module, owned)
    for node in list(module.graph.nodes):
        walk.visit(node)
    return module


def remove_dead_nodes(module: fx.GraphModule) -> fx.GraphModule:
    """Erase nodes without readers, such as written views and size checks at run time, and return the module."""
    for node in reversed(list(module.graph.nodes)):
        if node.users or node.op != "call_function" or _find_mutated_argument(node):
            continue
        name = str(node.target)
        # An operator that draws stays although nothing reads it: draws are counted, and later ones would be others.
        is_new = name.startswith("aten.new_") or (name in WITHOUT_GRADIENT and "rand" not in name)
        checks = name.startswith(("aten.sym_size", "aten.item", "aten._assert_", "aten.index.Tensor"))
        computes_sizes = not isinstance(node.target, torch._ops.OpOverload)
        if _MADE in node.meta or _VIEW in node.meta or is_new or checks or computes_sizes:
            module.graph.erase_node(node)
    return module


class _Functionaliser:
    """Walks a graph from the front and rewrites it."""

    def __init__(self, module: fx.GraphModule, owned: Collection[str]) -> None:
        self.module, self.graph, self.owned = module, module.graph, owned
        self.aliases: dict[fx.Node, _Alias] = {}
        # The storages of each node's value or values, before the graph is changed: replacements have their own. Fake
        # tensors have no data pointers, but their storages are objects: views share one, as real tensors do.
        self.memories: dict[fx.Node, frozenset[int]] = {}
        for node in self.graph.nodes:
            value = node.meta.get("val")
            parts = value if isinstance(value, list | tuple) else (value,)
            self.memories[node] = frozenset(p.untyped_storage()._cdata for p in parts if isinstance(p, Tensor))
        self.carrying: set[fx.Node] = set()
        modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in self.graph.nodes)
        self.mode = next(filter(None, modes), None) or FakeTensorMode(allow_non_fake_inputs=True)

    def visit(self, node: fx.Node) -> None:
        """Redirect the node's inputs to their current values, and make the node out-of-place if it writes."""
        # A write reads its argument, too (`y += x`): it needs the current value like any other reader. Only a buffer
        # that is counted up keeps its own node, since the increment stays in place.
        written = _find_mutated_argument(node)
        for argument in node.all_input_nodes:
            alias = self.aliases[argument]
            if not (argument is written and alias.memory.outlives):
                node.replace_input_with(argument, self._get_current_value(alias, node))
        if written is not None:
            self._write(node, self.aliases[written])
        elif node not in self.aliases:  # a `getitem` was tracked with the operator whose outputs it picks
            for output in (node, *(user for user in node.users if user.target is operator.getitem)):
                viewed = self._find_viewed_input(output, node)
                if viewed is not None:
                    self._add_view(output, self.aliases[viewed])
                else:
                    self.aliases[output] = _Alias(_Memory(node.op == "get_attr"), None, output, output, 0)
        self._track_gradient(node)

    def _find_viewed_input(self, made: fx.Node, node: fx.Node) -> fx.Node | None:
        """Return the input of `node` that `made` (it, or one of its outputs) is a view of; None for a new storage."""
        # A trace says that it returns its argument, but each call makes a new tensor of the constant.
        if node.target is _ATEN.lift_fresh_copy.default:
            return None
        # A dropout that drops nothing returns its input itself, unseen in a trace.
        if "dropout" in str(node.target) and not (_get_argument(node, "train") and _get_argument(node, "p")):
            return node.all_input_nodes[0]
        # Neither the schema nor the operator's name tells whether `reshape` or `contiguous` copied. The fake tensors of
        # the trace do: views share a storage.
        here = self.memories[made]
        return next((item for item in node.all_input_nodes if here & self.memories.get(item, frozenset())), None)

    def _add_view(self, node: fx.Node, of: _Alias) -> None:
        node.meta[_VIEW] = True
        self.aliases[node] = _Alias(of.memory, of, node, node, of.version)

    def _track_gradient(self, node: fx.Node) -> None:
        """Record whether a gradient flows back through the node. (Images have none in training.)"""
        if node.op == "get_attr":
            carries = operator.attrgetter(str(node.target))(self.module).requires_grad
        elif node.op != "call_function" or is_no_grad(node) or str(node.target) in WITHOUT_GRADIENT:
            carries = False
        else:
            value = node.meta.get("val")
            is_integral = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
            carries = not is_integral and any(argument in self.carrying for argument in node.all_input_nodes)
        if carries:
            self.carrying.add(node)

    def _get_current_value(self, alias: _Alias, reader: fx.Node) -> fx.Node:
        """Return the alias's current value, replaying its view before `reader` if the storage was written since."""
        if alias.version != alias.memory.version:
            if alias.parent is None or str(alias.view.target) not in _REPLAYABLE:
                writer = alias.memory.writer
                origin = f"{writer.target} in {describe_location(writer)}" if writer else "another operator"
                raise TraceError(
                    f"{reader.target} in {describe_location(reader)} reads memory that {origin} has changed through "
                    "another view. Make that operator out-of-place."
                )
            parent, view = self._get_current_value(alias.parent, reader), alias.view
            self._set_value(alias, self._make(reader, view, view.target, parent, *view.args[1:], **view.kwargs))
        return alias.value

    def _set_value(self, alias: _Alias, value: fx.Node) -> None:
        """Set the alias's value as of the current version."""
        alias.value, alias.version = value, alias.memory.version
        self.aliases[value], self.memories[value] = alias, self.memories[alias.view]

    # ---- writes

    def _write(self, node: fx.Node, alias: _Alias) -> None:
        if alias.memory.outlives:
            # Only an increment of a buffer stays in place. The result of any other write would not be that of one
            # process in its order.
            base, target = alias.base, str(alias.base.view.target)
            counts = node.target is _ATEN.add_.Tensor and isinstance(node.args[1], int)
            if not counts or alias.parent is not None or target not in self.owned:
                what = f"the buffer {to_user_name(target)}" if target in self.owned else "a tensor that it has not made"
                raise TraceError(
                    f"{node.target} in {describe_location(node)} changes {what} while the model runs. Only counting up "
                    "a buffer by a whole number has a rule: keep such values outside."
                )
            base.memory.version, base.memory.writer = base.memory.version + 1, node
            self.aliases[node] = alias
            return
        if str(node.target) in _INPLACE_VIEWS:  # `unsqueeze_`, say: from now on, the old name refers to the new shape
            node.target = _find_functional_target(node)
            self._add_view(node, alias)
            for name in [name for name, named in self.aliases.items() if named is alias]:
                self.aliases[name] = self.aliases[node]
            return
        base = alias.base
        # Autograd would go on with the gradient of the old values, which an out-of-place operator cannot express.
        if is_no_grad(node) and base.version == base.memory.version and base.value in self.carrying:
            raise TraceError(
                f"{node.target} in {describe_location(node)} changes, under torch.no_grad(), a tensor that has a "
                "gradient: the gradient would be that of other values. Make that operator out-of-place."
            )
        replacement = self._make_out_of_place(node, alias.value)
        # `y += x` keeps the type of y, whatever autocast makes of `y + x` (see `insert_casts`).
        replacement.meta[WRITTEN] = alias.value
        self._propagate_write(node, alias, replacement)
        node.replace_all_uses_with(replacement)
        self.graph.erase_node(node)

    def _propagate_write(self, node: fx.Node, alias: _Alias, made: fx.Node) -> None:
        """Set `made` as the written alias's value, and propagate it to the storage as far as possible."""
        # From the written view up to the base. If a view has no inverse, the walk ends early: the aliases above keep
        # their old version, and a later read of them raises TraceError instead of returning stale values.
        #
        #     x = zeros(4, 4)         base    version 0 -> 1: slice_scatter(x, select_scatter(y, z, 0, 0), 0, 2, 4)
        #     y = x[2:4]              view    version 0 -> 1: select_scatter(y, z, 0, 0)
        #     y[0].copy_(z)           written version 0 -> 1: z
        #
        # Any other view of x, such as x[:, 1], keeps version 0 and is replayed from the new x by its next reader.
        path, part = [(alias, made)], made
        while alias.parent is not None:
            whole: fx.Node | None = None
            # A view that was made without a gradient would cut off the gradient of what is now written through it.
            if is_no_grad(node) or not is_no_grad(alias.view):
                with contextlib.suppress(TraceError):
                    whole = self._get_current_value(alias.parent, node)
            invert = _BACK.get(str(alias.view.target))
            if whole is None or invert is None:
                break
            back = invert(partial(self._make, node, node), alias.view, whole, part)
            if back is not part:
                back.meta[WRITTEN] = whole
            alias, part = alias.parent, back
            path.append((alias, part))
        memory = alias.memory
        memory.version, memory.writer = memory.version + 1, made  # before `_set_value`, which records the new version
        for reached, value in path:
            self._set_value(reached, value)

    def _make_out_of_place(self, node: fx.Node, value: fx.Node) -> fx.Node:
        make, like = partial(self._make, node, node), value.meta["val"]

        def cast(result: fx.Node) -> fx.Node:
            is_alike = result.meta["val"].dtype == like.dtype
            return result if is_alike else make(_ATEN._to_copy.default, result, dtype=like.dtype)

        if node.target in (_ATEN.copy_.default, _ATEN.fill_.Tensor):  # the source, in the type and shape of `value`
            source: fx.Node = node.args[1]  # type: ignore[assignment]
            replacement = cast(source)
            if replacement.meta["val"].shape != like.shape:
                replacement = make(_ATEN.expand.default, replacement, list(like.shape))
            return replacement if replacement is not source else make(_ATEN.alias.default, replacement)
        if (masked := _make_masked_where(make, node, value)) is not None:
            return masked
        target = _find_functional_target(node)
        # Defaults are filled in: `bernoulli.p` requires an argument that `bernoulli_` has a default for.
        left_out = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
        arguments = [*node.args, *(argument.default_value for argument in left_out if not argument.kwarg_only)]
        return cast(make(target, value, *arguments[1 : len(target._schema.arguments)], **node.kwargs))

    def _make(self, reader: fx.Node, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator before `reader`, with the source location of `origin`."""
        with self.graph.inserting_before(reader):
            node = self.graph.call_function(target, args, kwargs)
        # The shape, type and storage of the new value, which later passes read: the operator runs once without memory.
        live = fx.node.map_aggregate(
            (args, kwargs), lambda argument: argument.meta["val"] if isinstance(argument, fx.Node) else argument
        )
        with self.mode, torch.no_grad():
            value = target(*live[0], **live[1])
        node.meta = {**origin.meta, "val": value, _MADE: True}
        node.meta.pop(WRITTEN, None)
        self.aliases[node] = _Alias(_Memory(False), None, node, node, 0)
        self._track_gradient(node)
        return node


def _find_mutated_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that an in-place operator writes to, or None."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema.arguments
    written = (item.name for item in schema if item.alias_info and item.alias_info.is_write)
    arguments = (_get_argument(node, name) for name in written)
    return next((argument for argument in arguments if isinstance(argument, fx.Node)), None)


def _find_functional_target(node: fx.Node) -> Any:
    """Return the out-of-place form of an operator: `relu_` -> `relu`. Raises TraceError if there is none."""
    if (name := str(node.target).removeprefix("aten.")) in _RENAMED:
        packet, overload = _RENAMED[name].split(".")
        return getattr(getattr(_ATEN, packet), overload)
    packet, overload = name.split(".")
    plain = getattr(_ATEN, packet.removesuffix("_"), None) if packet.endswith("_") else None
    if plain is None or not hasattr(plain, overload):
        raise TraceError(
            f"{node.target} in {find_source_line(node)} writes to its input and has no out-of-place form. Replace it."
        )
    return getattr(plain, overload)


# Inverses of views: how a write through a view changes the values that share its storage. A part of the base is written
# back into the base; a view of all of it is turned back into the base's shape:
#
#     view = base[2:4]         base' = slice_scatter(base, part, 0, 2, 4)
#     view = base.permute(p)   base' = part.permute(inverse of p)
#
# After `base'` is computed, every other view of the same storage is replayed from it.


def _get_argument(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by the name in its schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    index = next(index for index, argument in enumerate(schema) if argument.name == name)
    value = node.kwargs.get(name, schema[index].default_value)
    return node.args[index] if index < len(node.args) else value


def _scatter(target: Any, *names: str) -> Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]:
    """Return the inverse of a view of a part: `target` with the view's own arguments `names`."""
    return lambda make, view, base, part: make(target, base, part, *(_get_argument(view, name) for name in names))


def _invert_permute(make: Make, view: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
    count = base.meta["val"].dim()
    order = [dim % count for dim in _get_argument(view, "dims")]
    return make(_ATEN.permute.default, part, [order.index(dim) for dim in range(count)])


def _list_names(names: str) -> list[str]:
    return [f"aten.{name}" for name in names.split()]


_BACK: dict[str, Callable[[Make, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    "aten.alias.default": lambda make, view, base, part: part,
    "aten.slice.Tensor": _scatter(_ATEN.slice_scatter.default, "dim", "start", "end", "step"),
    "aten.narrow.default": lambda make, view, base, part: make(
        _ATEN.slice_scatter.default,
        *(base, part, _get_argument(view, "dim"), _get_argument(view, "start")),
        _get_argument(view, "start") + _get_argument(view, "length"),
    ),
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

# Views in every memory format, which can be replayed on new contents. Detached and expanded values have no inverse, and
# autograd forbids writes through one of several views (`chunk`, `unbind`).
_REPLAYABLE = {*_BACK, "aten.detach.default", "aten.expand.default"}


# Assignments by a boolean mask: `y[y < 0] = 0` becomes a `torch.where` at each position.


def _make_masked_where(make: Make, node: fx.Node, value: fx.Node) -> fx.Node | None:
    """Return `value` after an `index_put_` with one boolean mask, as a `torch.where`; None if that is not possible.

    It is possible if all masked positions get the same number, the same vector along the axes after the mask, or the
    values of another tensor at the same positions (`y[mask] = z[mask]`).
    """
    if node.target is not _ATEN.index_put_.default or _get_argument(node, "accumulate"):
        return None
    indices, new = _get_argument(node, "indices"), _get_argument(node, "values")
    indexed = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or indexed[0][1].meta["val"].dtype != torch.bool:
        return None
    axis, mask = indexed[0]
    trailing = value.meta["val"].dim() - axis - mask.meta["val"].dim()
    picked: fx.Node | None = None
    if new.target is _ATEN.index.Tensor and _is_same(new.args[1], indices):  # y[mask] = z[mask]
        source = new.args[0]
        if source.meta["val"].shape == value.meta["val"].shape:
            picked = source
    assigned = new.meta["val"]
    if picked is None and isinstance(assigned, Tensor) and all(isinstance(size, int) for size in assigned.shape):
        # A number, or a vector along the axes after the mask, broadcasts over all masked positions.
        if assigned.dim() <= trailing:
            picked = new
        elif assigned.numel() == 1:
            picked = make(_ATEN.reshape.default, new, [])
    if picked is None:
        return None
    if trailing:
        mask = make(_ATEN.reshape.default, mask, [*mask.meta["val"].shape, *[1] * trailing])
    return make(_ATEN.where.self, mask, picked, value)


def _is_same(one: object, other: object) -> bool:
    """Return whether two arguments are equal for all images: `y < 0` may be computed once for each side."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)) or one is other:
        return type(one) is type(other) and one == other
    is_computed = one.op == other.op == "call_function" and one.target is other.target
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    return is_computed and not is_drawn and _is_same(one.args, other.args) and one.kwargs == other.kwargs
