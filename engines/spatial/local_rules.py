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

_COMPARED = "divide multiply subtract greater greater_equal less less_equal not_equal"
_UNTAGGED = {
    "default": (
        "alias broadcast_tensors clone contiguous detach _to_copy type_as lift_fresh_copy "
        "zeros_like ones_like full_like empty_like "
        "leaky_relu log_sigmoid hardswish special_expit special_erf "  # leaky_relu: not tagged in torch 2.11
        "isclose negative absolute arctan2"
    ),
    "Tensor": f"masked_fill __and__ __or__ __xor__ {_COMPARED}",
    "Scalar": f"where {_COMPARED}",
    "ScalarSelf": "where",
    "ScalarOther": "where",
    **dict.fromkeys(("device", "dtype", "dtype_layout", "other"), "to"),
}
"""Pointwise operators that ATen does not tag as such, by overload."""

_POINTWISE = {f"aten.{name}.{overload}" for overload, names in _UNTAGGED.items() for name in names.split()}


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
    spec = node.spec
    if spec is None:  # several outputs: only the type, and the rows and columns of tiled values, are known
        tiled = [b.values[name] for name in node.reads if b.is_tiled(Ref(name))]
        spec = TensorSpec((), "float32")
        if tiled and axes:
            shape = [1] * -min(axes)
            shape[axes[0]], shape[axes[1]] = tiled[0].size_px
            spec = TensorSpec(tuple(shape), tiled[0].spec.dtype)
    return b.add_local_op(node.name, kernel, *positional, like=spec, axes=axes, **keywords)


def split_arguments(node: Node, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the node's arguments as its operator takes them. A device becomes the rank's device."""
    arguments = {**node.arguments, **changes}
    if arguments.get("device") is not None:
        arguments["device"] = DEVICE
    if has_kernel(node.operator):
        return list(arguments.values()), {}
    # A type, a device and the like are passed by name; None is their default.
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
    tiled = next(Ref(name) for name in node.reads if b.is_tiled(Ref(name)))
    apply_locally(b, node, b.get_value(tiled).axes, **changes)
