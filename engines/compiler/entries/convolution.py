"""Convolutions, along one to three axes: each output reads a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import get_spec, make_gather_error
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.windows import SlidingWindow, TransposedWindow, Window, compute_window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref


def list_for_axes(*names: str) -> list[str]:
    """Return the operators of these names along one, two and three axes.

    >>> list_for_axes("max_pool{}d.default")
    ['aten.max_pool1d.default', 'aten.max_pool2d.default', 'aten.max_pool3d.default']
    """
    return [f"aten.{name.format(count)}" for name in names for count in (1, 2, 3)]


def to_axes(value: Any, count: int) -> tuple[int, ...]:
    """Return a setting for each of `count` axes: of two, `(3,)` and `3` mean `(3, 3)`."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values if len(values) == count else values * count


def count_whole_axes(b: Builder, node: Node, kernel: Sequence[object]) -> int:
    """Return how many axes of a kernel are before the sharded ones: each rank has these whole.

    Raises NeedsGatherError if it has fewer axes than the images.
    """
    if len(kernel) < len(b.image_axes):
        raise make_gather_error(node, f"has a kernel of {len(kernel)} axes on images cut along {len(b.image_axes)}")
    return len(kernel) - len(b.image_axes)


def fold_padding(
    b: Builder, window: Window, rules: Sequence[SlidingWindow], out_px: tuple[int, ...]
) -> tuple[Ref, tuple[int, ...]]:
    """Return the kernel's input and padding: the kernel pads by itself if that yields exactly the tile's outputs.

    A kernel pads both sides alike, so its padding can replace a fill before the tile only if the number of outputs is
    still right; otherwise the fill is written into the tensor.
    """
    padding, out = tuple(before for before, _ in window.margins), b.get_output_tiles(out_px)[b.rank].shape
    for size_px, pad_px, rule, wanted in zip(window.held.shape, padding, rules, out, strict=True):
        outputs = (size_px + 2 * pad_px - rule.dilation * (rule.kernel - 1) - 1) // rule.stride + 1
        # Pools refuse a padding of more than half the kernel.
        if not 0 <= pad_px <= rule.kernel // 2 * rule.dilation or outputs != wanted:
            return b.pad_window(window), (0,) * len(padding)
    return Ref(window.name), padding


@register_rule(*list_for_axes("conv{}d.default", "conv{}d.padding"), images=("input",))
def convolve(b: Builder, node: Node) -> None:
    """Convolve with any kernel, stride, dilation and groups; `same` pads the odd pixel below and right."""
    a = node.arguments
    kernel = get_spec(b, a["weight"].name).shape[2:]
    whole = count_whole_axes(b, node, kernel)
    stride, dilation = (to_axes(a[name], len(kernel)) for name in ("stride", "dilation"))
    if a["padding"] == "same":
        borders = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
        if any(border % 2 for border in borders[:whole]):
            raise make_gather_error(node, "pads an axis that is not cut by one more pixel behind than before")
        padding = tuple(border // 2 for border in borders)
    else:
        padding = to_axes(0 if a["padding"] == "valid" else a["padding"], len(kernel))
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, dilation, strict=True)][whole:]
    out_px = b.get_image_px(node.result)
    window = b.read_window(a["input"], out_px, *rules)
    x, native = fold_padding(b, window, rules, out_px)
    settings = a["weight"], a["bias"], stride, (*padding[:whole], *native), dilation, a["groups"]
    kernel_name = f"aten.conv{len(kernel)}d.default"
    b.add_local_op(node.name, kernel_name, x, *settings, like=node.result, axes=b.image_axes)


@register_rule(
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), images=("input",)
)
def convolve_transposed(b: Builder, node: Node) -> None:
    """Convolve transposed: each output tile reads the inputs that write to it, and the surplus outputs are cropped."""
    a = node.arguments
    kernel = get_spec(b, a["weight"].name).shape[2:]
    whole = count_whole_axes(b, node, kernel)
    stride, padding, dilation, extra = (
        to_axes(a[name], len(kernel)) for name in ("stride", "padding", "dilation", "output_padding")
    )
    axes = list(zip(kernel, stride, padding, dilation, strict=True))[whole:]
    out_px = b.get_image_px(node.result)
    window = b.read_window(a["input"], out_px, *(TransposedWindow(*axis) for axis in axes))
    # The inputs write those outputs that they would read in a convolution. The difference from the tile's outputs is
    # cropped on each side (negative) or, where no input writes, padded (positive).
    written = compute_window(window.held, [SlidingWindow(*axis) for axis in axes])
    margins = Window(window.name, written, b.get_output_tiles(out_px)[b.rank], 0.0).margins
    none = (0,) * len(axes)
    borders = (*padding[:whole], *none), (*extra[:whole], *none)
    settings = a["weight"], a["bias"], stride, *borders, a["groups"], dilation, margins
    b.add_local_op(node.name, "tile.conv_transpose", Ref(window.name), *settings, like=node.result, axes=b.image_axes)
