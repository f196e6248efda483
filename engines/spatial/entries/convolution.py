"""Convolutions: windows padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.graph.model_graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.local_rules import get_spec
from engines.spatial.operator_table import register_rule
from engines.spatial.windows import SlidingWindow, TransposedWindow, Window

__all__ = ["fold_padding", "to_pair"]


def to_pair(value: Any) -> tuple[int, int]:
    """Return a setting for both axes: `(3,)` and `3` mean `(3, 3)`."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return (values[0], values[-1])


def fold_padding(
    b: Builder, window: Window, rules: Sequence[SlidingWindow], out_px: tuple[int, int]
) -> tuple[Ref, tuple[int, int]]:
    """Return the kernel's input and padding: the kernel pads by itself if that yields exactly the tile's outputs.

    A kernel pads both sides alike, so its padding can replace a fill above and left of the tile only if the number of
    outputs is still right; otherwise the fill is written into the tensor.
    """
    left, _, above, _ = window.margins
    padding, held = (above, left), window.held.shape
    out = b.get_output_tiles(out_px)[b.rank].shape
    for size_px, pad_px, rule, wanted in zip(held, padding, rules, out, strict=True):
        found = (size_px + 2 * pad_px - rule.dilation * (rule.kernel - 1) - 1) // rule.stride + 1
        # Pools refuse a padding of more than half the kernel.
        if not 0 <= pad_px <= rule.kernel // 2 * rule.dilation or found != wanted:
            return b.pad_window(window), (0, 0)
    return Ref(window.name), padding


@register_rule("aten.conv2d.default", "aten.conv2d.padding", images=("input",))
def conv2d(b: Builder, node: Node) -> None:
    """Convolve with any kernel, stride, dilation and groups; `same` pads the odd pixel below and right."""
    a = node.arguments
    value = b.get_value(a["input"])
    kernel = get_spec(b, a["weight"].name).shape[2:]
    stride, dilation = to_pair(a["stride"]), to_pair(a["dilation"])
    if a["padding"] == "valid":
        padding = (0, 0)
    elif a["padding"] == "same":
        padding = (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)
    else:
        padding = to_pair(a["padding"])
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, dilation, strict=True)]
    out_px = (node.spec.shape[-2], node.spec.shape[-1]) if node.spec else value.size_px
    window = b.read_window(a["input"], out_px, rules[0], rules[1])
    x, native = fold_padding(b, window, rules, out_px)
    settings = a["weight"], a["bias"], stride, native, dilation, a["groups"]
    b.add_local_op(node.name, "aten.conv2d.default", x, *settings, like=node.spec, axes=(-2, -1))


@register_rule("aten.conv_transpose2d.input", images=("input",))
def conv_transpose2d(b: Builder, node: Node) -> None:
    """Convolve transposed: each output tile reads the inputs that write to it, and the surplus outputs are cropped."""
    a = node.arguments
    kernel = get_spec(b, a["weight"].name).shape[2:]
    stride, padding, dilation = to_pair(a["stride"]), to_pair(a["padding"]), to_pair(a["dilation"])
    rules = [TransposedWindow(*axis) for axis in zip(kernel, stride, padding, dilation, strict=True)]
    out_px = (node.spec.shape[-2], node.spec.shape[-1])
    window = b.read_window(a["input"], out_px, rules[0], rules[1])
    out = b.get_output_tiles(out_px)[b.rank]
    # Inputs held:       start ... stop          write the outputs first ... last - 1 in full
    # Outputs of the tile:       target
    #
    # The difference on each side is cropped (negative) or, where no input writes, padded (positive).
    margins: list[int] = []
    spans = zip((out.rows, out.cols), (window.held.rows, window.held.cols), rules, strict=True)
    for target, held, rule in reversed(list(spans)):
        first = held.start * rule.stride - rule.padding
        last = (held.stop - 1) * rule.stride - rule.padding + rule.dilation * (rule.kernel - 1) + 1
        margins += [first - target.start, target.stop - last]
    settings = a["weight"], a["bias"], stride, dilation, a["groups"], tuple(margins)
    b.add_local_op(node.name, "tile.conv_transpose", Ref(window.name), *settings, like=node.spec, axes=(-2, -1))
