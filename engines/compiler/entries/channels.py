"""Operators along axes other than rows and columns: each pixel by itself, with its channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.class_tokens import add_lead, take_lead
from mpi4dl_nb.engines.compiler.entries.sampling import lower_resample, make_copy_taps, move_pixels
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    all_gather_lines,
    apply_locally,
    find_sharded_dims,
    get_places_without,
    get_sharded_axes,
    get_spec,
    make_gather_error,
    split_arguments,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.places import keep_places
from mpi4dl_nb.engines.geometry.tiles import Span
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.kernels import get_operator


def check_along_other_axes(b: Builder, node: Node, ref: Ref, dims: Sequence[int] | int | None) -> list[int]:
    """Return the dimensions counted from the front; None means all.

    Raises TraceError if one of them is spatial.
    """
    count = len(b.get_value(ref).spec.shape)
    signed_dims = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    axes = [dim % count for dim in signed_dims]
    if not axes or not find_sharded_dims(b, ref).isdisjoint(axes):
        raise make_gather_error(node, f"works along a spatial axis (dim={dims})")
    return axes


def check_only_first_tiled(b: Builder, node: Node) -> Ref:
    """Return the first argument. Raises NeedsGatherError if it is not tiled, or if another one is."""
    first, *others = node.arguments.values()
    if not b.is_tiled(first) or any(b.is_tiled(other) for other in others):
        raise make_gather_error(node, "reads pixels in an argument for which there is no rule")
    return first


@register_rule(
    *(f"aten.{name}.default" for name in ("cumsum", "cumprod", "glu", "sort", "topk", "narrow", "argmax", "argmin")),
    *(f"aten.{name}.dim" for name in ("max", "min", "median", "any", "all")),
    *("aten.prod.dim_int", "aten.unbind.int"),
    *("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"),
)
def lower_per_pixel(b: Builder, node: Node) -> None:
    """Reorder, accumulate, select, split or reduce the values of each pixel. (`getitem` picks the parts.)"""
    lower_other_axes(b, node, check_only_first_tiled(b, node))


_REMOVING = ("aten.unbind.int", "aten.cosine_similarity.default")


def lower_other_axes(b: Builder, node: Node, source: Ref, several: bool = False) -> None:
    """Run the node's own operator along non-spatial axes, on `several` images pixel by pixel.

    A reduction removes the axes unless `keepdim` is set.
    """
    a = node.arguments
    dims = check_along_other_axes(b, node, source, a.get("dim", a.get("dims")))
    keeps = a.get("keepdim", node.operator not in _REMOVING)
    changes = align_arguments(b, node) if several else {}
    apply_locally(b, node, get_places_without(b, source, [] if keeps else dims), **changes)


@register_rule("aten.flip.default", "aten.roll.default", "aten.repeat_interleave.self_int")
def reorder_pixels(b: Builder, node: Node) -> None:
    """Reorder or repeat values; along rows and columns each output reads one input."""
    source = check_only_first_tiled(b, node)
    value = b.get_value(source)
    dims = node.arguments.get("dim", node.arguments.get("dims"))
    axes = [dim % len(value.spec.shape) for dim in ([dims] if isinstance(dims, int) else dims or ())]
    if not axes or not set(axes) <= find_sharded_dims(b, source):
        lower_per_pixel(b, node)
        return
    sharded = get_sharded_axes(b, source)
    # The operator is applied to the pixels' numbers along one axis at a time.
    pixels = {axis: torch.arange(size) for axis, size in zip(sharded, value.size_px, strict=True)}
    for index, axis in enumerate(axes):
        if node.operator == "aten.flip.default":
            pixels[axis] = pixels[axis].flip(0)
        elif node.operator == "aten.roll.default":
            pixels[axis] = pixels[axis].roll(node.arguments["shifts"][index])
        else:
            pixels[axis] = pixels[axis].repeat_interleave(node.arguments["repeats"])
    move_pixels(b, node, source, [pixels[axis].tolist() for axis in sharded])


@register_rule("aten.cosine_similarity.default", "aten.cat.default", "aten.concat.default")
def combine_channels(b: Builder, node: Node) -> None:
    """Concatenate or compare the channels of each pixel of several images.

    Positions that every rank has are also put before pixels along the axis in which these are merged: class tokens.
    """
    if node.short_operator in ("cat", "concat") and _put_before_pixels(b, node):
        return
    lower_other_axes(b, node, next(Ref(name) for name in node.reads if b.is_tiled(Ref(name))), several=True)


def _put_before_pixels(b: Builder, node: Node) -> bool:
    """Join class tokens and pixels, if the node does that; return whether it does."""
    *before, pixels = node.arguments["tensors"]
    value = b.get_value(pixels)
    dim = node.arguments["dim"] % len(node.result.shape) - len(node.result.shape)
    is_joined = b.stage.shares == 1 and not value.lead and {place.dim for place in value.places} == {dim}
    if not before or not is_joined or any(map(b.is_tiled, before)):
        return False
    lead, spec = before[0], get_spec(b, before[0].name)
    if len(before) > 1:
        spec = spec.resize(dim, sum(get_spec(b, ref.name).shape[dim] for ref in before))
        lead = b.add_local_op(f"{node.name}.tokens", "aten.cat.default", before, dim, like=spec)
    add_lead(b, node.name, lead, b.crop_to_own(pixels), node.result)
    return True


@register_rule("aten.gather.default", "aten.scatter.value", "aten.scatter.src", "aten.scatter_add.default")
def index_channels(b: Builder, node: Node) -> None:
    """Pick or write the channels of each pixel by an index.

    Raises NeedsGatherError if an argument has fewer pixels: it is not broadcast, but belongs to the first of them.
    """
    image = b.get_value(next(Ref(name) for name in node.reads if b.is_tiled(Ref(name))))
    for name in node.reads:
        shape = get_spec(b, name).shape
        if len(shape) < -min(image.axes) or tuple(shape[axis] for axis in image.axes) != image.size_px:
            raise make_gather_error(
                node, f"does not broadcast {name} of shape {shape}: expand it, if it is meant for all pixels"
            )
    combine_channels(b, node)


@register_rule("aten.channel_shuffle.default", images=("self",))
def shuffle_channels(b: Builder, node: Node) -> None:
    """Shuffle channels, which are along axis 1."""
    check_along_other_axes(b, node, node.arguments["self"], 1)
    apply_locally(b, node, b.image_axes)


@register_rule("aten.one_hot.default")
def one_hot(b: Builder, node: Node) -> None:
    """Encode class numbers along a new last axis."""
    places = b.get_value(node.arguments["self"]).places
    apply_locally(b, node, (place._replace(dim=place.dim - 1) for place in places))


@register_rule("aten.type_as.default", "aten.to.other")
def cast_like(b: Builder, node: Node) -> None:
    """Cast to the type of another value, of which no pixel is read: the result is tiled, or not, as `self` is."""
    source, kind = node.arguments["self"], getattr(torch, node.result.dtype)
    places = b.get_value(source).places
    b.add_local_op(node.name, "aten.to.dtype", b.align_to_output(source), kind, like=node.result, axes=places)


@register_rule("aten.stack.default")
def stack(b: Builder, node: Node) -> None:
    """Stack along a new axis, before or after the spatial ones."""
    parts = align_arguments(b, node)
    source = next(ref for ref in node.arguments["tensors"] if b.is_tiled(ref))
    value = b.get_value(source)
    count = len(value.spec.shape)
    # Counted from the end, an axis moves by one if the new one comes after it.
    new = node.arguments["dim"] % (count + 1)
    places = keep_places(value.places, [dim + (new <= dim) - count - 1 for dim in range(count)])
    apply_locally(b, node, places, **parts)


@register_rule("aten.prelu.default")
def prelu(b: Builder, node: Node) -> None:
    """Apply one slope for each channel, which are along axis 1, or one for all."""
    source = node.arguments["self"]
    if get_spec(b, node.arguments["weight"].name).numel > 1:
        check_along_other_axes(b, node, source, 1)
    apply_locally(b, node, b.get_value(source).places)


_MOVED = ("transpose.int", "swapaxes.default", "swapdims.default", "movedim.int", "movedim.intlist", "moveaxis.int")


@register_rule(*(f"aten.{name}" for name in (*_MOVED, "mT.default", "t.default", "numpy_T.default", "permute.default")))
def transpose(b: Builder, node: Node) -> None:
    """Move the spatial axes with the others. ATen itself, run on a meta tensor, determines their order."""
    source = node.arguments["self"]
    count = len(b.get_value(source).spec.shape)
    positional, keywords = split_arguments(node, {"self": torch.empty(tuple(range(1, count + 1)), device="meta")})
    order = [size - 1 for size in get_operator(node.operator)(*positional, **keywords).shape]
    places = keep_places(b.get_value(source).places, [order.index(dim) - count for dim in range(count)])
    apply_locally(b, node, places)


# Selections along an axis: one index, or those of a list.


@register_rule("aten.select.int")
def select(b: Builder, node: Node) -> None:
    """Select one channel of each pixel; or one row or column, which every rank then holds."""
    source, signed_dim = node.arguments["self"], node.arguments["dim"]
    shape = b.get_value(source).spec.shape
    dim = signed_dim % len(shape)
    if dim not in find_sharded_dims(b, source):
        apply_locally(b, node, get_places_without(b, source, [dim]))
        return
    index = node.arguments["index"] % shape[dim]
    if index < b.get_value(source).lead:
        lead = take_lead(b, b.crop_to_own(source))
        b.add_local_op(node.name, "aten.select.int", lead, signed_dim, index, like=node.result)
        return
    line = all_gather_lines(b, node, source, dim, Span(index, index + 1))
    b.add_local_op(node.name, "aten.select.int", line, signed_dim, 0, like=node.result)


@register_rule("aten.index.Tensor")
def pick_channels(b: Builder, node: Node) -> None:
    """Pick channels by a list of their numbers; or rows and columns by a constant list."""
    source, indices = node.arguments["self"], node.arguments["indices"]
    picked = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(picked) == 1 and b.is_tiled(source) and not b.is_tiled(picked[0][1]):
        (dim, index), spec = picked[0], get_spec(b, picked[0][1].name)
        if len(spec.shape) == 1 and spec.dtype != "bool":
            pick_lines(b, node, source, dim, index)
            return
    raise make_gather_error(node, "picks by something other than one list of channels, rows or columns")


@register_rule("aten.index_select.default")
def pick_along(b: Builder, node: Node) -> None:
    """Pick values along one axis, by a list."""
    pick_lines(b, node, check_only_first_tiled(b, node), node.arguments["dim"], node.arguments["index"])


def pick_lines(b: Builder, node: Node, source: Ref, dim: int, index: Ref) -> None:
    """Pick values along one axis by a list of their numbers."""
    value = b.get_value(source)
    dim %= len(value.spec.shape)
    if dim not in find_sharded_dims(b, source):
        if (constant := b.graph.constants.get(index.name)) is not None and constant.dtype != torch.bool:
            read_line_numbers(b, node, index, value.spec.shape[dim])  # the trace has not looked at the numbers
        apply_locally(b, node, value.places)
        return
    sizes = zip(get_sharded_axes(b, source), value.size_px, strict=True)
    taken = (read_line_numbers(b, node, index, size) if dim == axis else range(size) for axis, size in sizes)
    lower_resample(b, node, source, *map(make_copy_taps, taken))


def read_line_numbers(b: Builder, node: Node, index: Ref, size_px: int) -> list[int]:
    """Return the numbers of rows or columns in a list, counted from the first one.

    Raises NeedsGatherError if the list is no constant, and TraceError if it has numbers of which there is no line.
    """
    # Windows are computed before any pixel is known: only a list that the trace knows can tell which lines to fetch.
    constant = b.graph.constants.get(index.name)
    if constant is None or constant.dtype == torch.bool:
        raise make_gather_error(node, "picks rows or columns that are not known before")
    numbers = constant.flatten().tolist()
    if beyond := [line for line in numbers if not -size_px <= line < size_px]:
        raise TraceError(
            f"{node.operator} in {node.where} picks number {beyond[0]} of {size_px} along that axis. "
            f"Use numbers from {-size_px} to {size_px - 1}."
        )
    return [line % size_px for line in numbers]
