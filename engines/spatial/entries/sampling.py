"""Upsampling, pads that copy pixels, and shuffles: along each axis an output is a weighted sum of a few inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engines.graph.model_graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.kernels import get_operator, get_sum_type, register_kernel
from engines.spatial.local_rules import apply_locally, make_gather_error, make_unsupported_error
from engines.spatial.operator_table import register_rule
from engines.spatial.tiles import Span
from engines.spatial.windows import MonotoneWindow, SlidingWindow, TableWindow

__all__ = ["lower_resample", "make_copy_taps", "pad_with_copies"]

Resample = Callable[[Tensor], Tensor]
"""Maps each row (n values) of a matrix (k, n) to a row of m values, each a weighted sum of some of the n."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Taps along one axis: output i is the sum of `weights[i][k]` times input `inputs[i][k]`."""

    # Bilinear upsampling by 2:  inputs   ((0, 0), (0, 1), (0, 1), (1, 2), ...)
    #                            weights  ((1, 0), (.75, .25), (.25, .75), (.75, .25), ...)

    inputs: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def select_outputs(
        self, out: Span, held: Span
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
        """Return the taps of some outputs, tap by tap, with inputs counted from the first held one."""
        inputs = [[index - held.start for index in row] for row in self.inputs[out.start : out.stop]]
        return tuple(zip(*inputs, strict=True)), tuple(zip(*self.weights[out.start : out.stop], strict=True))


def find_taps(size_px: int, resample: Resample, reach_px: int) -> Taps:
    """Return which inputs each output reads with which weights, by probing `resample` itself.

    A row that is 1 at every `apart`-th input yields the weights of those inputs. The output for the ramp 0, 1, 2 ...
    identifies the one that is read: no tap is more than `reach_px` from it.
    """
    # reach_px 1, apart 4: of the inputs r, r + 4, ... no output reads more than one.
    #
    #     row r      1 at r, r + 4, ...    output i is the weight of the one that it reads
    #     ramp       0  1  2  3  4 ...     output i is about the place where it reads: the nearest one is meant
    apart = 2 * reach_px + 2
    places = torch.arange(size_px)
    answers = resample((places % apart == torch.arange(min(apart, size_px))[:, None]).double()).T.tolist()
    middles = resample(places[None].double())[0].tolist()
    found = []
    for row, middle in zip(answers, middles, strict=True):
        near = [(start + apart * round((middle - start) / apart), weight) for start, weight in enumerate(row) if weight]
        # An output without weights still reads an input, since a window must not be empty.
        found.append(near or [(min(max(round(middle), 0), size_px - 1), 0.0)])
    most = max(len(near) for near in found)
    filled = [near + [(near[0][0], 0.0)] * (most - len(near)) for near in found]
    return Taps(*(tuple(tuple(pair[part] for pair in near) for near in filled) for part in (0, 1)))


def lower_resample(b: Builder, node: Node, ref: Ref, rows: Taps, cols: Taps) -> None:
    """Fetch the window that each tile of outputs reads, and compute the weighted sums."""
    axes = b.get_value(ref).axes or (-2, -1)
    out_px = (node.spec.shape[axes[0]], node.spec.shape[axes[1]])
    window = b.read_window(ref, out_px, TableWindow(rows.inputs), TableWindow(cols.inputs))
    out = b.get_output_tiles(out_px)[b.rank]
    taps = (*rows.select_outputs(out.rows, window.held.rows), *cols.select_outputs(out.cols, window.held.cols))
    b.add_local_op(node.name, "tile.resample", Ref(window.name), *taps, axes, like=node.spec, axes=axes)


@register_kernel("tile.resample")
def resample_tile(
    x: Tensor,
    rows: Sequence[Sequence[int]],
    row_weights: Sequence[Sequence[float]],
    cols: Sequence[Sequence[int]],
    col_weights: Sequence[Sequence[float]],
    axes: tuple[int, int],
) -> Tensor:
    """Resample along the columns first, as ATen does."""
    wide = x.to(get_sum_type(x))
    return _sum_taps(_sum_taps(wide, axes[1], cols, col_weights), axes[0], rows, row_weights).to(x.dtype)


def _sum_taps(x: Tensor, axis: int, inputs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Tensor:
    if len(inputs) == 1 and set(weights[0]) == {1.0}:
        return x.index_select(axis, torch.tensor(inputs[0], device=x.device))
    parts = [
        x.index_select(axis, torch.tensor(index, device=x.device)) * x.new_tensor(weight).view(-1, *(1,) * (-1 - axis))
        for index, weight in zip(inputs, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])


# Reach of ATen's upsampling operators, in input pixels if the image does not shrink.
_REACH_PX = {
    "aten.upsample_nearest2d": 1,
    "aten._upsample_nearest_exact2d": 1,
    "aten.upsample_bilinear2d": 2,
    "aten.upsample_bicubic2d": 4,
    "aten._upsample_bilinear2d_aa": 3,
    "aten._upsample_bicubic2d_aa": 5,
}


@register_rule(*(f"{name}.vec" for name in _REACH_PX), images=("input",))
def upsample(b: Builder, node: Node) -> None:
    """Upsample by nearest, bilinear or bicubic interpolation, with the weights of ATen."""
    if "_aa." in node.operator and node.spec.shape[-1] == 1:
        raise make_unsupported_error(
            node, "makes one column, which ATen's antialiasing gets wrong: rows and gradients are mixed up"
        )
    size_px = b.get_value(node.arguments["input"]).size_px
    rows, cols = (_find_upsample_taps(node, size_px, axis) for axis in (0, 1))
    lower_resample(b, node, node.arguments["input"], rows, cols)


def _find_upsample_taps(node: Node, size_px: tuple[int, int], axis: int) -> Taps:
    """Return the taps of one axis. The other axis changes size only if the image does: ATen copies if none changes.

    The probe is two pixels wide: antialiasing to one column is wrong in PyTorch 2.13 on a CPU (gradcheck says so).
    """
    name, a = node.operator.removesuffix(".vec"), node.arguments
    out_px = node.spec.shape[-2:]
    other = 2 if size_px[1 - axis] == out_px[1 - axis] else 4
    scales = (a["scale_factors"][axis] if a["scale_factors"] else None, None)
    aligned = [a["align_corners"]] if "align_corners" in a else []

    def resample(rows: Tensor) -> Tensor:
        run = get_operator(f"{name}.default")
        two = rows[None, :, :, None].expand(-1, -1, -1, 2).contiguous()
        return run(two, [out_px[axis], other], *aligned, *scales)[0, :, :, 0]  # type: ignore[no-any-return]

    return find_taps(size_px[axis], resample, _REACH_PX[name] * math.ceil(max(1.0, size_px[axis] / out_px[axis])))


def pad_with_copies(b: Builder, node: Node) -> None:
    """Pad by reflection, replication or circularly: each pixel of the border is a copy of an image pixel."""
    a = node.arguments
    pads = [*a["pad"], 0, 0]
    if any(pads[4:]):
        raise make_gather_error(node, "pads channels with copies")
    height, width = b.get_value(a["self"]).size_px
    taps = []
    for size_px, border in ((height, pads[2:4]), (width, pads[:2])):
        numbers = torch.arange(size_px).double()[None]  # the pixels' numbers are padded in place of the pixels
        taps.append(make_copy_taps(functional.pad(numbers, tuple(border), mode=a["mode"])[0].int().tolist()))
    lower_resample(b, node, a["self"], *taps)


def make_copy_taps(picked: Sequence[int]) -> Taps:
    """Return the taps by which output i copies input `picked[i]`."""
    return Taps(tuple((index,) for index in picked), ((1.0,),) * len(picked))


@register_rule("aten.pixel_shuffle.default", images=("self",))
def pixel_shuffle(b: Builder, node: Node) -> None:
    """Shuffle pixels: output i reads pixel i // r (Shi et al., 2016, arXiv:1609.05158); the surplus is cropped."""
    factor = node.arguments["upscale_factor"]
    out_px = (node.spec.shape[-2], node.spec.shape[-1])
    rule = MonotoneWindow(lambda i: i // factor, lambda i: i // factor)
    window = b.read_window(node.arguments["self"], out_px, rule, rule)
    out, made = b.get_output_tiles(out_px)[b.rank], f"{node.name}.wide"
    margins = []
    for span, held in ((out.cols, window.held.cols), (out.rows, window.held.rows)):
        margins += [held.start * factor - span.start, span.stop - held.stop * factor]
    wide = b.add_local_op(made, node.operator, Ref(window.name), factor, like=node.spec, axes=(-2, -1))
    b.add_local_op(node.name, "tile.pad", wide, tuple(margins), 0.0, like=node.spec, axes=(-2, -1))


@register_rule("aten.pixel_unshuffle.default", images=("self",))
def pixel_unshuffle(b: Builder, node: Node) -> None:
    """Unshuffle pixels: output i reads r pixels from i * r."""
    factor = node.arguments["downscale_factor"]
    out_px, rule = (node.spec.shape[-2], node.spec.shape[-1]), SlidingWindow(factor, factor)
    apply_locally(b, node, (-2, -1), self=b.pad_window(b.read_window(node.arguments["self"], out_px, rule, rule)))
