"""Operators that work along axes other than rows and columns: each pixel by itself, with its channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.reshaping import join
from engines.spatial.entries.sampling import copies, resampled
from engines.spatial.kernels import operator_of
from engines.spatial.ops import entry
from engines.spatial.places import axes_without, lined_up, whole_axes
from engines.spatial.plain import as_it_is, split_arguments
from engines.spatial.refusals import apart

__all__ = ["check_along_other_axes", "only_first_is_tiled"]


def check_along_other_axes(b: Builder, node: Node, ref: Ref, dims: Sequence[int] | int | None) -> list[int]:
    """The dimensions counted from the front.

    Raises TraceError where one of them is spatial; None is all of them.
    """
    rows, cols, count = whole_axes(b, ref)
    given = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    found = [dim % count for dim in given]
    if {rows, cols} & set(found) or not found:
        raise apart(node, f"works along a spatial axis (dim={dims})")
    return found


def only_first_is_tiled(b: Builder, node: Node) -> Ref:
    """The first argument. Raises WholeError where another one is tiled, or that one is not."""
    first, *others = node.arguments.values()
    if not b.is_tiled(first) or any(b.is_tiled(other) for other in others):
        raise apart(node, "reads pixels in an argument for which there is no rule")
    return first  # type: ignore[no-any-return]


@entry(
    *(
        f"aten.{name}"
        for name in (
            "cumsum.default", "cumprod.default", "glu.default", "sort.default", "topk.default",
            "narrow.default",
        )
    )
)  # fmt: skip
def along(b: Builder, node: Node) -> None:
    """Values of one pixel, in an order or a number of their own."""
    source = only_first_is_tiled(b, node)
    dims = node.arguments.get("dim", node.arguments.get("dims"))
    check_along_other_axes(b, node, source, dims)
    as_it_is(b, node, b.value(source).axes)


@entry("aten.flip.default", "aten.roll.default", "aten.repeat_interleave.self_int")
def reordered(b: Builder, node: Node) -> None:
    """The same values in another order, or again and again: of rows and columns each output reads one."""
    source = only_first_is_tiled(b, node)
    rows, cols, count = whole_axes(b, source)
    dims = node.arguments.get("dim", node.arguments.get("dims"))
    found = [dim % count for dim in ([dims] if isinstance(dims, int) else dims or ())]
    if not found or not set(found) <= {rows, cols}:
        along(b, node)
        return
    sizes = zip((rows, cols), b.value(source).size_px, strict=True)
    resampled(b, node, source, *(copies(_order(node, found, axis, size)) for axis, size in sizes))


def _order(node: Node, dims: Sequence[int], axis: int, size_px: int) -> list[int]:
    """Which pixel along an axis lies at each place of the result."""
    pixels = torch.arange(size_px)
    for number in (number for number, dim in enumerate(dims) if dim == axis):
        if node.operator == "aten.flip.default":
            pixels = pixels.flip(0)
        elif node.operator == "aten.roll.default":
            pixels = pixels.roll(node.arguments["shifts"][number])
        else:
            pixels = pixels.repeat_interleave(node.arguments["repeats"])
    return pixels.tolist()  # type: ignore[no-any-return]


@entry(
    *(
        f"aten.{name}"
        for name in (
            "max.dim", "min.dim", "argmax.default", "argmin.default", "median.dim", "prod.dim_int",
            "any.dim", "all.dim",
        )
    )
)  # fmt: skip
def reduced(b: Builder, node: Node) -> None:
    """One value for all channels of a pixel."""
    source = only_first_is_tiled(b, node)
    reduce_other_axes(b, node, source)


def reduce_other_axes(b: Builder, node: Node, source: Ref) -> None:
    """Run the node's own reduction along axes that are not spatial."""
    dims = check_along_other_axes(b, node, source, node.arguments.get("dim"))
    as_it_is(b, node, axes_without(b, source, [] if node.arguments.get("keepdim") else dims))


@entry("aten.gather.default", "aten.cosine_similarity.default")
def pixel_on_pixel(b: Builder, node: Node) -> None:
    """Two images, of which each pixel's channels meet."""
    parts = lined_up(b, node)
    source = next(Ref(name) for name in node.reads if b.is_tiled(Ref(name)))
    dims = check_along_other_axes(b, node, source, node.arguments["dim"])
    gone = dims if node.operator == "aten.cosine_similarity.default" else []
    as_it_is(b, node, axes_without(b, source, gone), **parts)


@entry("aten.channel_shuffle.default", images=("self",))
def shuffle_channels(b: Builder, node: Node) -> None:
    """Channels lie along axis 1."""
    as_it_is(b, node, (-2, -1))


@entry("aten.one_hot.default")
def one_hot(b: Builder, node: Node) -> None:
    """A new last axis."""
    rows, cols = b.value(node.arguments["self"]).axes or (-2, -1)
    as_it_is(b, node, (rows - 1, cols - 1))


@entry("aten.stack.default")
def stack(b: Builder, node: Node) -> None:
    """A new axis, in front of the spatial ones or behind."""
    parts = lined_up(b, node)
    source = next(ref for ref in node.arguments["tensors"] if b.is_tiled(ref))
    rows, cols, count = whole_axes(b, source)
    new = node.arguments["dim"] % (count + 1)
    axes = (rows + (new <= rows) - count - 1, cols + (new <= cols) - count - 1)
    as_it_is(b, node, axes, **parts)


entry("aten.concat.default")(join)


@entry(
    *(
        f"aten.{name}"
        for name in (
            "transpose.int", "swapaxes.default", "swapdims.default", "movedim.int", "movedim.intlist",
            "moveaxis.int", "mT.default",
        )
    )
)  # fmt: skip
def reorder(b: Builder, node: Node) -> None:
    """The spatial axes move with the others; where to, ATen itself is asked."""
    rows, cols, count = whole_axes(b, node.arguments["self"])
    positional, keywords = split_arguments(node, {"self": torch.empty(tuple(range(1, count + 1)), device="meta")})
    order = [size - 1 for size in operator_of(node.operator)(*positional, **keywords).shape]
    as_it_is(b, node, (order.index(rows) - count, order.index(cols) - count))


@entry("aten.avg_pool3d.default", images=("self",))
def pool_of_channels(b: Builder, node: Node) -> None:
    """A pool along the axis before rows and columns, as local response norm has it."""
    a = node.arguments
    settings = [a["kernel_size"], a["stride"] or (1, 1, 1)]
    if any(tuple(setting)[-2:] != (1, 1) for setting in settings) or any(tuple(a["padding"])[-2:]):
        raise apart(node, "pools three axes")
    as_it_is(b, node, (-2, -1))
