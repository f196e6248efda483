"""Rules that run a node's own operator on the local values of a rank."""

from __future__ import annotations

from typing import Any

import torch

from engines.layer.graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.program.instructions import DEVICE
from engines.spatial.align import align_arguments, map_refs
from engines.spatial.kernels import get_operator, has_kernel
from engines.spatial.unsupported import check_deterministic

__all__ = ["apply_locally", "is_pointwise", "lower_pointwise", "split_arguments"]

# Pointwise operators that ATen does not tag as such.
_POINTWISE = {
    f"aten.{name}"
    for name in (
        "alias.default", "broadcast_tensors.default", "clone.default", "contiguous.default", "detach.default",
        "to.device", "to.dtype", "to.dtype_layout", "to.other", "_to_copy.default", "type_as.default",
        "lift_fresh_copy.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default",
        "leaky_relu.default",  # not tagged in torch 2.11
        "log_sigmoid.default", "hardswish.default", "special_expit.default", "special_erf.default",
        "masked_fill.Tensor", "where.Scalar", "where.ScalarSelf", "where.ScalarOther", "isclose.default",
        "divide.Tensor", "divide.Scalar", "multiply.Tensor", "multiply.Scalar", "subtract.Tensor", "subtract.Scalar",
        "negative.default", "absolute.default", "arctan2.default", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor",
        "greater.Tensor", "greater.Scalar", "greater_equal.Tensor", "greater_equal.Scalar",
        "less.Tensor", "less.Scalar", "less_equal.Tensor", "less_equal.Scalar", "not_equal.Tensor", "not_equal.Scalar",
    )
}  # fmt: skip


# Tensors are stored with channels last here, so a view may have to be a copy.
_ANY_LAYOUT = {"aten.view.default": "aten.reshape.default"}


def apply_locally(b: Builder, node: Node, axes: tuple[int, int] | None, **changes: Any) -> Ref:
    """Run the node's own operator on local values, with some arguments replaced by `changes`.

    A tiled result is computed from the pixels under it, any other from the pixels that the rank owns. Values in
    `changes` are passed as they are.
    """
    pick = b.align_to_output if axes else b.crop_to_own
    changes = {name: map_refs(pick, value) for name, value in node.arguments.items() if name not in changes} | changes
    positional, keywords = split_arguments(node, changes)
    kernel = _ANY_LAYOUT.get(node.operator, node.operator)
    return b.add_local_op(
        node.name, kernel, *positional, like=node.spec or _make_partial_spec(b, node, axes), axes=axes, **keywords
    )


def _make_partial_spec(b: Builder, node: Node, axes: tuple[int, int] | None) -> TensorSpec:
    """Return a spec for several outputs: only the type, and the rows and columns of tiled values, are known."""
    tiled = [b.values[name] for name in node.reads if b.is_tiled(Ref(name))]
    if not (tiled and axes):
        return TensorSpec((), "float32")
    shape = [1] * -min(axes)
    shape[axes[0]], shape[axes[1]] = tiled[0].size_px
    return TensorSpec(tuple(shape), tiled[0].spec.dtype)


def split_arguments(node: Node, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the node's arguments as its operator takes them. A device becomes the rank's device."""
    arguments = {**node.arguments, **changes}
    if arguments.get("device") is not None:
        arguments["device"] = DEVICE
    if has_kernel(node.operator):
        return list(arguments.values()), {}
    schema = get_operator(node.operator)._schema.arguments
    keyword_only = {argument.name for argument in schema if argument.kwarg_only}
    positional = [value for name, value in arguments.items() if name not in keyword_only]
    keywords = {name: value for name, value in arguments.items() if name in keyword_only and value is not None}
    return positional, keywords


def is_pointwise(name: str) -> bool:
    """Return whether each output pixel depends only on the same pixel of the inputs."""
    return name in _POINTWISE or (not has_kernel(name) and torch.Tag.pointwise in get_operator(name).tags)


def lower_pointwise(b: Builder, node: Node) -> None:
    """Lower a pointwise node: tiled arguments have the output's pixels, all others have none or all of them."""
    check_deterministic(b, node)
    changes = align_arguments(b, node)
    apply_locally(b, node, next(b.get_value(Ref(name)).axes for name in node.reads if b.is_tiled(Ref(name))), **changes)
