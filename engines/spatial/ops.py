"""The operator table: what each ATen operator needs so that tiles give exactly the whole image's result.

An entry is called only where an argument is tiled. It says which window a tile of outputs reads, with which
local kernel, and what is summed over ranks; everything else runs as it is. To add an operator, write a
function like those in `engines/spatial/entries/` under `@entry("aten.name.overload")`: see `entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.errors import TraceError
from engines.layer.graph import Node, Ref, TensorSpec, references
from engines.program.builder import Builder, Value
from engines.program.instructions import DEVICE
from engines.spatial.kernels import has_kernel, operator_of

__all__ = [
    "Rule",
    "as_it_is",
    "axes_without",
    "entry",
    "lined_up",
    "local_shape",
    "lower",
    "no_rule",
    "pointwise",
    "refuse_if_read",
    "rules",
    "spec_of",
    "whole_axes",
    "whole_to_tile",
]

Rule = Callable[[Builder, Node], None]

_TABLE: dict[str, Rule] = {}
_EVERYWHERE: set[str] = set()
_IMAGES: dict[str, tuple[str, ...]] = {}
_SHARED: set[str] = set()

# One value in, one value out at the same pixel, though ATen does not tag them so.
_POINTWISE = {
    f"aten.{name}"
    for name in (
        "alias.default", "broadcast_tensors.default", "clone.default", "contiguous.default", "detach.default",
        "to.device", "to.dtype", "to.dtype_layout", "to.other", "_to_copy.default", "type_as.default",
        "lift_fresh_copy.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default",
        "log_sigmoid.default", "hardswish.default", "special_expit.default", "special_erf.default",
        "masked_fill.Tensor", "where.Scalar", "where.ScalarSelf", "where.ScalarOther", "isclose.default",
        "divide.Tensor", "divide.Scalar", "multiply.Tensor", "multiply.Scalar", "subtract.Tensor", "subtract.Scalar",
        "negative.default", "absolute.default", "arctan2.default", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor",
        "greater.Tensor", "greater.Scalar", "greater_equal.Tensor", "greater_equal.Scalar",
        "less.Tensor", "less.Scalar", "less_equal.Tensor", "less_equal.Scalar", "not_equal.Tensor", "not_equal.Scalar",
    )
}  # fmt: skip


# Tensors lie with their channels last here, where a view may have to be a copy.
_ANY_LAYOUT = {"aten.view.default": "aten.reshape.default"}


def entry(
    *operators: str, everywhere: bool = False, images: tuple[str, ...] = (), shared: bool = False
) -> Callable[[Rule], Rule]:
    """Add a rule to the table: a function of a `Builder` and a `Node`, called where an argument is tiled.

    `everywhere`: also where no argument is tiled. `images` names the only arguments that the rule takes tiled, and
    only with rows and columns last. `shared`: also where ranks share the images of a micro-batch, and one result is
    made of all of them. A cell of a notebook may add rules: the ranks of a `Training` made after
    that get them, and the kernels of `local_kernel`, by value.

    A custom operator that blurs over 3 x 3 pixels. Outputs read one pixel further than their tile, and what lies
    outside the image is 0; the kernel gets the window, and makes the tile of outputs of it:

    >>> from torch.nn.functional import avg_pool2d
    >>> from engines.spatial.kernels import local_kernel
    >>> from engines.spatial.windows import SlidingWindow
    >>> @local_kernel("mine.blur")
    ... def blur(window):
    ...     return avg_pool2d(window, 3, stride=1)
    >>> @entry("mine.blur.default", images=("x",))
    ... def blur_on_tiles(b, node):
    ...     rule = SlidingWindow(kernel=3, padding=1)
    ...     window = b.window(node.arguments["x"], node.spec.shape[-2:], rule, rule)
    ...     b.local(node.name, "mine.blur", b.padded(window), like=node.spec, axes=(-2, -1))
    """

    def add(rule: Rule) -> Rule:
        for name in operators:
            _TABLE[name] = rule
            _IMAGES[name] = images
            for names, holds in ((_EVERYWHERE, everywhere), (_SHARED, shared)):
                names.add(name) if holds else names.discard(name)
        return rule

    return add


def rules() -> dict[str, tuple[Rule, dict[str, Any]]]:
    """The table: for each operator its rule, and the arguments of `entry`."""
    return {
        name: (rule, {"everywhere": name in _EVERYWHERE, "images": _IMAGES[name], "shared": name in _SHARED})
        for name, rule in _TABLE.items()
    }


def lower(b: Builder, node: Node) -> None:
    """Append what one node of the graph is on this rank.

    Raises TraceError where a tiled value meets an operator that has no rule.
    """
    b.at(node)
    try:
        _lower(b, node)
    except TraceError:
        if len(b.stage.ranks) > 1:
            raise
        b.forget(node)
        as_it_is(b, node, axes=None)  # one rank holds all of it, and needs no rule


def _lower(b: Builder, node: Node) -> None:
    tiled = any(b.is_tiled(Ref(name)) for name in node.reads)
    joins = any(b.is_parted(Ref(name)) for name in node.reads) and not b.is_parted(Ref(node.name))
    if joins and node.operator not in _SHARED:
        raise no_rule(node, "joins images that ranks share (local_dp), for which there is no rule")
    if node.operator in _TABLE and (tiled or joins or node.operator in _EVERYWHERE):
        _check_images(b, node)
        _TABLE[node.operator](b, node)
    elif not tiled:
        _check_deterministic(b, node)
        as_it_is(b, node, axes=None)
    elif is_pointwise(node.operator):
        pointwise(b, node)
    else:
        raise no_rule(node)


def _check_images(b: Builder, node: Node) -> None:
    """Raises TraceError where a rule for images would read something else."""
    allowed = _IMAGES[node.operator]
    for name, argument in node.arguments.items() if allowed else ():
        for tiled in (Ref(read) for read in references(argument) if b.is_tiled(Ref(read))):
            if name not in allowed:
                raise no_rule(node, f"takes pixels as its {name}, for which there is no rule")
            if b.value(tiled).axes != (-2, -1):
                raise no_rule(node, f"reads {tiled.name}, whose rows and columns are not its last two axes")


def as_it_is(b: Builder, node: Node, axes: tuple[int, int] | None, **changes: Any) -> Ref:
    """Run the node's own operator on local values, some arguments replaced.

    A tiled result is computed from the pixels beneath it, any other from the pixels that the rank owns; what is
    given in `changes` is taken as it is.
    """
    pick = b.beneath if axes else b.owned
    changes = {name: _each(pick, value) for name, value in node.arguments.items() if name not in changes} | changes
    positional, keywords = split_arguments(node, changes)
    kernel = _ANY_LAYOUT.get(node.operator, node.operator)
    return b.local(node.name, kernel, *positional, like=node.spec or _several(b, node, axes), axes=axes, **keywords)


def _several(b: Builder, node: Node, axes: tuple[int, int] | None) -> TensorSpec:
    """Of several outputs no more is known than the type, and the rows and columns of what is tiled."""
    tiled = [b.values[name] for name in node.reads if b.is_tiled(Ref(name))]
    if not (tiled and axes):
        return TensorSpec((), "float32")
    shape = [1] * -min(axes)
    shape[axes[0]], shape[axes[1]] = tiled[0].size_px
    return TensorSpec(tuple(shape), tiled[0].spec.dtype)


def _each(pick: Callable[[Ref], Ref], argument: Any) -> Any:
    """`pick` of every value in nested arguments."""
    if isinstance(argument, list | tuple):
        return type(argument)(_each(pick, item) for item in argument)
    return pick(argument) if isinstance(argument, Ref) else argument


def split_arguments(node: Node, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A node's arguments as the operator takes them. The device of whatever it makes is the rank's."""
    arguments = {**node.arguments, **changes}
    if arguments.get("device") is not None:
        arguments["device"] = DEVICE
    if has_kernel(node.operator):
        return list(arguments.values()), {}
    schema = operator_of(node.operator)._schema.arguments
    keyword_only = {argument.name for argument in schema if argument.kwarg_only}
    positional = [value for name, value in arguments.items() if name not in keyword_only]
    keywords = {name: value for name, value in arguments.items() if name in keyword_only and value is not None}
    return positional, keywords


def is_pointwise(name: str) -> bool:
    """Whether each output pixel depends on the same pixel of the inputs only."""
    return name in _POINTWISE or (not has_kernel(name) and torch.Tag.pointwise in operator_of(name).tags)


def pointwise(b: Builder, node: Node) -> None:
    """One generic rule: every tiled argument has the output's pixels, every other argument has none or all of them."""
    if _is_random(node.operator):
        raise no_rule(node, "draws random numbers, which the tiles of a stage do not share")
    changes = lined_up(b, node)
    as_it_is(b, node, next(b.value(Ref(name)).axes for name in node.reads if b.is_tiled(Ref(name))), **changes)


def lined_up(b: Builder, node: Node) -> dict[str, Any]:
    """The node's arguments, pixel on pixel: of what every rank holds wholly, each takes its own tile.

    Raises TraceError where the arguments do not lie pixel on pixel.
    """
    tiled = next(b.value(Ref(name)) for name in node.reads if b.is_tiled(Ref(name)))
    for name in node.reads:
        if not _lines_up(b, name, tiled):
            raise TraceError(
                f"{node.operator} in {node.where} joins a tiled value of {tiled.size_px} pixels with {name} of shape "
                f"{spec_of(b, name).shape}, which has other pixels. "
                "Make it a function of the image, or end the spatial stages before this layer (spatial_size, balance)."
            )
    parts = {
        name: b.beneath(Ref(name)) if b.is_tiled(Ref(name)) else whole_to_tile(b, node, Ref(name), tiled)
        for name in dict.fromkeys(node.reads)
    }
    return {name: _each(lambda ref: parts[ref.name], argument) for name, argument in node.arguments.items()}


def whole_to_tile(b: Builder, node: Node, ref: Ref, tiled: Value) -> Ref:
    """What lies beneath this rank's part of the node's result in a value that every rank holds wholly.

    Its last axes are those of `tiled`, or of size 1.
    """
    spec, tile = spec_of(b, ref.name), b.outputs(tiled.size_px)[b.rank]
    cuts = {
        axis: (span.start, span.stop)
        for axis, span in zip(tiled.axes or (), (tile.rows, tile.cols), strict=True)
        if len(spec.shape) >= -axis and spec.shape[axis] > len(span)
    }
    if not cuts:
        return ref
    return b.local(f"{node.name}.{ref.name}.tile", "tile.cut", ref, tuple(cuts), tuple(cuts.values()), like=spec)


def spec_of(b: Builder, name: str) -> TensorSpec:
    """Shape and type of any value, weight or buffer, for the whole image."""
    return b.values[name].spec if name in b.values else b.graph.specs[name]


def _lines_up(b: Builder, name: str, tiled: Value) -> bool:
    if b.is_tiled(Ref(name)):
        return b.values[name].axes == tiled.axes and b.values[name].size_px == tiled.size_px
    shape, pairs = spec_of(b, name).shape, zip(tiled.axes or (), tiled.size_px, strict=True)
    return all(len(shape) < -axis or shape[axis] in (1, size) for axis, size in pairs)


def local_shape(b: Builder, spec: TensorSpec, axes: tuple[int, int] | None) -> tuple[int, ...]:
    """The shape of this rank's part of the present node's result."""
    if axes is None:
        return spec.shape
    shape = list(spec.shape)
    tile = b.outputs((shape[axes[0]], shape[axes[1]]))[b.rank]
    shape[axes[0]], shape[axes[1]] = tile.shape
    return tuple(shape)


def whole_axes(b: Builder, ref: Ref) -> tuple[int, int, int]:
    """The two spatial axes of a tiled value counted from the front, and its number of dimensions."""
    value = b.value(ref)
    rows, cols = value.axes or (-2, -1)
    count = len(value.spec.shape)
    return rows + count, cols + count, count


def axes_without(b: Builder, ref: Ref, dims: Sequence[int]) -> tuple[int, int]:
    """The spatial axes of a tiled value, counted from the end, once the dimensions `dims` are gone."""
    rows, cols, count = whole_axes(b, ref)
    left = [axis for axis in range(count) if axis not in dims]
    return left.index(rows) - len(left), left.index(cols) - len(left)


def no_rule(node: Node, why: str = "has no entry in the operator table") -> TraceError:
    """The error for an operator that cannot run on tiles, with what to do."""
    reads = ", ".join(dict.fromkeys(references(node.arguments)))
    return TraceError(
        f"{node.operator} (reads {reads}) {why}. It is in {node.where}. Either end the spatial stages before it "
        "(a smaller spatial_size, or another balance), or write an entry: a function like those in "
        f'engines/spatial/entries, under @entry("{node.operator}").'
    )


def refuse_if_read(b: Builder, node: Node, output: int, what: str) -> None:
    """Raises TraceError where anybody reads the output of that number of an operator that has several."""
    picked = {
        other.name
        for other in b.graph.nodes
        if other.operator == "getitem" and other.arguments["0"] == Ref(node.name) and other.arguments["1"] == output
    }
    if picked & {b.graph.prediction, *(name for other in b.graph.nodes for name in other.reads)}:
        raise no_rule(node, f"is asked for {what}, for which there is no rule")


def _is_random(name: str) -> bool:
    return not has_kernel(name) and torch.Tag.nondeterministic_seeded in operator_of(name).tags


def _check_deterministic(b: Builder, node: Node) -> None:
    """A random operator would draw differently on each tile of a stage."""
    if len(b.stage.ranks) > 1 and _is_random(node.operator):
        raise no_rule(node, "draws random numbers, which the tiles of a stage do not share")
