"""Operators along axes other than rows and columns: each pixel by itself, with its channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import align_arguments, get_axes_without, get_spatial_axes, get_spec
from engines.spatial.entries.sampling import lower_resample, make_copy_taps
from engines.spatial.kernels import get_operator
from engines.spatial.local_rules import apply_locally, lower_pointwise, split_arguments
from engines.spatial.operator_table import register_rule
from engines.spatial.unsupported import make_gather_error

__all__ = ["check_along_other_axes", "check_only_first_tiled"]


def check_along_other_axes(b: Builder, node: Node, ref: Ref, dims: Sequence[int] | int | None) -> list[int]:
    """Return the dimensions counted from the front; None means all.

    Raises TraceError if one of them is spatial.
    """
    rows, cols, count = get_spatial_axes(b, ref)
    given = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    found = [dim % count for dim in given]
    if {rows, cols} & set(found) or not found:
        raise make_gather_error(node, f"works along a spatial axis (dim={dims})")
    return found


def check_only_first_tiled(b: Builder, node: Node) -> Ref:
    """Return the first argument. Raises NeedsGatherError if it is not tiled, or if another one is."""
    first, *others = node.arguments.values()
    if not b.is_tiled(first) or any(b.is_tiled(other) for other in others):
        raise make_gather_error(node, "reads pixels in an argument for which there is no rule")
    return first  # type: ignore[no-any-return]


@register_rule(
    *(f"aten.{name}.default" for name in ("cumsum", "cumprod", "glu", "sort", "topk", "narrow")),
    *("aten.softmax.int", "aten.log_softmax.int"),
    *("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"),
)
def lower_per_pixel(b: Builder, node: Node) -> None:
    """Reorder, accumulate, select or split the values of each pixel by itself. (`getitem` picks the parts.)"""
    source = check_only_first_tiled(b, node)
    dims = node.arguments.get("dim", node.arguments.get("dims"))
    check_along_other_axes(b, node, source, dims)
    apply_locally(b, node, b.get_value(source).axes)


@register_rule("aten.flip.default", "aten.roll.default", "aten.repeat_interleave.self_int")
def reorder_pixels(b: Builder, node: Node) -> None:
    """Reorder or repeat values; along rows and columns each output reads one input."""
    source = check_only_first_tiled(b, node)
    rows, cols, count = get_spatial_axes(b, source)
    dims = node.arguments.get("dim", node.arguments.get("dims"))
    found = [dim % count for dim in ([dims] if isinstance(dims, int) else dims or ())]
    if not found or not set(found) <= {rows, cols}:
        lower_per_pixel(b, node)
        return
    # The operator is applied to the pixels' numbers along one axis at a time.
    pixels = {axis: torch.arange(size) for axis, size in zip((rows, cols), b.get_value(source).size_px, strict=True)}
    for number, axis in enumerate(found):
        if node.operator == "aten.flip.default":
            pixels[axis] = pixels[axis].flip(0)
        elif node.operator == "aten.roll.default":
            pixels[axis] = pixels[axis].roll(node.arguments["shifts"][number])
        else:
            pixels[axis] = pixels[axis].repeat_interleave(node.arguments["repeats"])
    lower_resample(b, node, source, *(make_copy_taps(pixels[axis].tolist()) for axis in (rows, cols)))


@register_rule(
    *(f"aten.{name}.dim" for name in ("max", "min", "median", "any", "all")),
    *("aten.argmax.default", "aten.argmin.default", "aten.prod.dim_int"),
)
def reduce_channels(b: Builder, node: Node) -> None:
    """Reduce the channels of each pixel to one value."""
    reduce_other_axes(b, node, check_only_first_tiled(b, node))


def reduce_other_axes(b: Builder, node: Node, source: Ref) -> None:
    """Run the node's own reduction along non-spatial axes."""
    dims = check_along_other_axes(b, node, source, node.arguments.get("dim"))
    apply_locally(b, node, get_axes_without(b, source, [] if node.arguments.get("keepdim") else dims))


@register_rule("aten.gather.default", "aten.cosine_similarity.default")
def combine_channels(b: Builder, node: Node) -> None:
    """Combine the channels of each pixel of two images."""
    parts = align_arguments(b, node)
    source = next(Ref(name) for name in node.reads if b.is_tiled(Ref(name)))
    dims = check_along_other_axes(b, node, source, node.arguments["dim"])
    gone = dims if node.operator == "aten.cosine_similarity.default" else []
    apply_locally(b, node, get_axes_without(b, source, gone), **parts)


@register_rule("aten.channel_shuffle.default", images=("self",))
def shuffle_channels(b: Builder, node: Node) -> None:
    """Shuffle channels, which are along axis 1."""
    apply_locally(b, node, (-2, -1))


@register_rule("aten.one_hot.default")
def one_hot(b: Builder, node: Node) -> None:
    """Encode class numbers along a new last axis."""
    rows, cols = b.get_value(node.arguments["self"]).axes or (-2, -1)
    apply_locally(b, node, (rows - 1, cols - 1))


@register_rule("aten.stack.default")
def stack(b: Builder, node: Node) -> None:
    """Stack along a new axis, before or after the spatial ones."""
    parts = align_arguments(b, node)
    source = next(ref for ref in node.arguments["tensors"] if b.is_tiled(ref))
    rows, cols, count = get_spatial_axes(b, source)
    # Counted from the end, an axis moves by one if the new one comes after it.
    new = node.arguments["dim"] % (count + 1)
    axes = (rows + (new <= rows) - count - 1, cols + (new <= cols) - count - 1)
    apply_locally(b, node, axes, **parts)


@register_rule("aten.cat.default", "aten.concat.default")
def join(b: Builder, node: Node) -> None:
    """Concatenate channels; pixels stay in place."""
    first = next(ref for ref in node.arguments["tensors"] if b.is_tiled(ref))
    check_along_other_axes(b, node, first, node.arguments["dim"])
    lower_pointwise(b, node)


@register_rule("aten.unbind.int")
def unbind(b: Builder, node: Node) -> None:
    """Split channels and remove their axis; pixels stay in place."""
    source = node.arguments["self"]
    apply_locally(b, node, get_axes_without(b, source, check_along_other_axes(b, node, source, node.arguments["dim"])))


@register_rule("aten.prelu.default")
def prelu(b: Builder, node: Node) -> None:
    """Apply one slope for each channel, which are along axis 1, or one for all."""
    source = node.arguments["self"]
    if get_spec(b, node.arguments["weight"].name).numel > 1:
        check_along_other_axes(b, node, source, 1)
    apply_locally(b, node, b.get_value(source).axes)


_MOVED = ("transpose.int", "swapaxes.default", "swapdims.default", "movedim.int", "movedim.intlist", "moveaxis.int")


@register_rule(*(f"aten.{name}" for name in (*_MOVED, "mT.default")))
def transpose(b: Builder, node: Node) -> None:
    """Move the spatial axes with the others. ATen itself, run on a meta tensor, determines their order."""
    rows, cols, count = get_spatial_axes(b, node.arguments["self"])
    positional, keywords = split_arguments(node, {"self": torch.empty(tuple(range(1, count + 1)), device="meta")})
    order = [size - 1 for size in get_operator(node.operator)(*positional, **keywords).shape]
    apply_locally(b, node, (order.index(rows) - count, order.index(cols) - count))


@register_rule("aten.avg_pool3d.default", images=("self",))
def avg_pool3d(b: Builder, node: Node) -> None:
    """Pool along the axis before rows and columns, as in local response norm."""
    a = node.arguments
    settings = [a["kernel_size"], a["stride"] or (1, 1, 1)]
    if any(tuple(setting)[-2:] != (1, 1) for setting in settings) or any(tuple(a["padding"])[-2:]):
        raise make_gather_error(node, "pools three axes")
    apply_locally(b, node, (-2, -1))
