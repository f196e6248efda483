"""Patches of images, in columns of a matrix or along an axis of their own, and images added up from patches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.convolution import to_axes
from mpi4dl_nb.engines.compiler.local_rules import apply_locally, find_sharded_dims, get_sharded_axes, make_gather_error
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.places import Place, Places
from mpi4dl_nb.engines.geometry.windows import (
    Margins,
    Shift,
    SlidingWindow,
    TransposedWindow,
    Window,
    compute_window,
)
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.kernels import pad_pixels, register_kernel


def _get_settings(node: Node) -> list[tuple[int, int, int, int]]:
    """Return kernel, stride, padding and dilation for rows and for columns."""
    settings = (to_axes(node.arguments[name], 2) for name in ("kernel_size", "stride", "padding", "dilation"))
    return list(zip(*settings, strict=True))


def _place_patches(patches_px: tuple[int, ...]) -> Places:
    """Return the places of rows and columns of patches in the last axis, which has all of them."""
    rows, cols = patches_px
    return Place(-1, 1, cols), Place(-1, rows, 1)


@register_rule("aten.im2col.default", images=("self",))
def take_patches(b: Builder, node: Node) -> None:
    """Make a column of each patch: (N, C, H, W) to (N, C * kernel, patches)."""
    a, settings = node.arguments, _get_settings(node)
    if len(b.image_axes) != 2:
        raise make_gather_error(node, "takes patches of rows and columns")
    rules = [SlidingWindow(*axis) for axis in settings]
    sizes = zip(rules, b.get_value(a["self"]).size_px, strict=True)
    patches_px = tuple(
        (size + 2 * rule.padding - rule.dilation * (rule.kernel - 1) - 1) // rule.stride + 1 for rule, size in sizes
    )
    window = b.pad_window(b.read_window(a["self"], patches_px, *rules))
    apply_locally(b, node, _place_patches(patches_px), self=window, padding=(0, 0))


@register_rule("aten.col2im.default")
def add_up_patches(b: Builder, node: Node) -> None:
    """Add up patches where they overlap: (N, C * kernel, patches) to (N, C, H, W)."""
    a, settings = node.arguments, _get_settings(node)
    value, out_px = b.get_value(a["self"]), b.get_image_px(node.result)
    if value.places != _place_patches(value.size_px) or len(value.spec.shape) != 3:
        raise make_gather_error(node, "reads patches whose rows and columns are not its last axis")
    window = b.read_window(a["self"], out_px, *(TransposedWindow(*axis) for axis in settings))
    written = compute_window(window.held, [SlidingWindow(*axis) for axis in settings])
    margins = Window(window.name, written, b.get_output_tiles(out_px)[b.rank], 0.0).margins
    kernel, stride, _, dilation = zip(*settings, strict=True)
    patches = b.split_axes(Ref(window.name))
    b.add_local_op(
        node.name, "tile.fold", patches, kernel, dilation, stride, margins, like=node.result, axes=b.image_axes
    )


@register_kernel("tile.fold")
def fold(x: Tensor, kernel: Any, dilation: Any, stride: Any, margins: Margins) -> Tensor:
    """Return the image that patches (N, C * kernel, rows, columns) write to, cropped (or padded) by `margins`."""
    axes = zip(x.shape[2:], kernel, dilation, stride, strict=True)
    size: Any = [(count - 1) * step + spread * (taps - 1) + 1 for count, taps, spread, step in axes]
    return pad_pixels(functional.fold(x.flatten(2), size, kernel, dilation, 0, stride), margins, 0.0)


@register_rule("aten.unfold.default")
def unfold(b: Builder, node: Node) -> None:
    """Give the windows along one axis an axis of their own, the last one."""
    a, value = node.arguments, b.get_value(node.arguments["self"])
    places = [place._replace(dim=place.dim - 1) for place in value.places]
    dim = a["dimension"] % len(value.spec.shape)
    if dim not in find_sharded_dims(b, a["self"]):
        apply_locally(b, node, places)
        return
    cut = get_sharded_axes(b, a["self"])
    rules = [SlidingWindow(a["size"], a["step"]) if axis == dim else Shift(0) for axis in cut]
    out_px = tuple(node.result.shape[axis] for axis in cut)
    window = b.pad_window(b.read_window(a["self"], out_px, *rules))
    apply_locally(b, node, places, self=window)
