"""Upsampling, pads that copy pixels, and shuffles: along each axis an output is a weighted sum of a few inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.kernels import local_kernel, operator_of, sum_type
from engines.spatial.ops import entry
from engines.spatial.plain import as_it_is
from engines.spatial.refusals import apart, no_rule
from engines.spatial.tiles import Span
from engines.spatial.windows import Picks, Reach, SlidingWindow

__all__ = ["copies", "mirrored_pad", "resampled"]

Resample = Callable[[Tensor], Tensor]
"""Of every row (n values) of a matrix (k, n) it makes a row of m values, each a weighted sum of some of the n."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Along one axis: output i is the sum of `weights[i][k]` times input `inputs[i][k]`."""

    inputs: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def of(self, out: Span, held: Span) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
        """Those of some outputs, tap by tap, with inputs counted from the first one that is held."""
        inputs = [[index - held.start for index in row] for row in self.inputs[out.start : out.stop]]
        return tuple(zip(*inputs, strict=True)), tuple(zip(*self.weights[out.start : out.stop], strict=True))


def taps(size_px: int, resample: Resample, reach_px: int) -> Taps:
    """Which inputs each output reads with which weights; `resample` itself is asked.

    A row that is 1 at every `apart`-th input tells the weights of those inputs, and the output for the ramp 0, 1, 2 ...
    which of them is meant: no tap lies further than `reach_px` from it.
    """
    apart = 2 * reach_px + 2
    places = torch.arange(size_px)
    answers = resample((places % apart == torch.arange(min(apart, size_px))[:, None]).double()).T.tolist()
    middles = resample(places[None].double())[0].tolist()
    found = []
    for row, middle in zip(answers, middles, strict=True):
        near = [(start + apart * round((middle - start) / apart), weight) for start, weight in enumerate(row) if weight]
        found.append(near or [(min(max(round(middle), 0), size_px - 1), 0.0)])
    most = max(len(near) for near in found)
    filled = [near + [(near[0][0], 0.0)] * (most - len(near)) for near in found]
    return Taps(*(tuple(tuple(pair[part] for pair in near) for near in filled) for part in (0, 1)))


def resampled(b: Builder, node: Node, ref: Ref, rows: Taps, cols: Taps) -> None:
    """Each tile of outputs borrows what it reads, and adds it up."""
    axes = b.value(ref).axes or (-2, -1)
    out_px = (node.spec.shape[axes[0]], node.spec.shape[axes[1]])
    window = b.window(ref, out_px, Picks(rows.inputs), Picks(cols.inputs))
    out = b.outputs(out_px)[b.rank]
    taps = (*rows.of(out.rows, window.held.rows), *cols.of(out.cols, window.held.cols))
    b.local(node.name, "tile.resample", Ref(window.name), *taps, axes, like=node.spec, axes=axes)


@local_kernel("tile.resample")
def resample_tile(
    x: Tensor, rows: Sequence[Sequence[int]], row_weights: Sequence[Sequence[float]],
    cols: Sequence[Sequence[int]], col_weights: Sequence[Sequence[float]], axes: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The columns first, as ATen does."""
    wide = x.to(sum_type(x))
    return _along(_along(wide, axes[1], cols, col_weights), axes[0], rows, row_weights).to(x.dtype)


def _along(x: Tensor, axis: int, inputs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Tensor:
    if len(inputs) == 1 and set(weights[0]) == {1.0}:
        return x.index_select(axis, torch.tensor(inputs[0], device=x.device))
    parts = [
        x.index_select(axis, torch.tensor(index, device=x.device)) * x.new_tensor(weight).view(-1, *(1,) * (-1 - axis))
        for index, weight in zip(inputs, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])


# ATen's upsampling operators: how far an output reads (in inputs, where it does not shrink the image).
_REACH_PX = {
    "aten.upsample_nearest2d": 1,
    "aten._upsample_nearest_exact2d": 1,
    "aten.upsample_bilinear2d": 2,
    "aten.upsample_bicubic2d": 4,
    "aten._upsample_bilinear2d_aa": 3,
    "aten._upsample_bicubic2d_aa": 5,
}


@entry(*(f"{name}.vec" for name in _REACH_PX), images=("input",))
def upsample(b: Builder, node: Node) -> None:
    """Nearest, bilinear and bicubic, with the weights of ATen."""
    if "_aa." in node.operator and node.spec.shape[-1] == 1:
        raise no_rule(node, "makes one column, which ATen's antialiasing gets wrong: rows and gradients are mixed up")
    size_px = b.value(node.arguments["input"]).size_px
    rows, cols = (_upsampled(node, size_px, axis) for axis in (0, 1))
    resampled(b, node, node.arguments["input"], rows, cols)


def _upsampled(node: Node, size_px: tuple[int, int], axis: int) -> Taps:
    """One axis. The other one changes its size only where that of the image does: ATen copies where neither changes.

    It is two pixels wide: antialiasing to one column is wrong in PyTorch 2.13 on a CPU (gradcheck says so).
    """
    name, a = node.operator.removesuffix(".vec"), node.arguments
    out_px = node.spec.shape[-2:]
    other = 2 if size_px[1 - axis] == out_px[1 - axis] else 4
    scales = (a["scale_factors"][axis] if a["scale_factors"] else None, None)
    aligned = [a["align_corners"]] if "align_corners" in a else []

    def resample(rows: Tensor) -> Tensor:
        run = operator_of(f"{name}.default")
        two = rows[None, :, :, None].expand(-1, -1, -1, 2).contiguous()
        return run(two, [out_px[axis], other], *aligned, *scales)[0, :, :, 0]  # type: ignore[no-any-return]

    return taps(size_px[axis], resample, _REACH_PX[name] * math.ceil(max(1.0, size_px[axis] / out_px[axis])))


def mirrored_pad(b: Builder, node: Node) -> None:
    """Reflect, replicate, circular: each pixel of the border is a copy of one of the image."""
    a = node.arguments
    pads = [*a["pad"], 0, 0]
    if any(pads[4:]):
        raise apart(node, "pads channels with copies")
    height, width = b.value(a["self"]).size_px
    rows, cols = (_copied(size_px, border, a["mode"]) for size_px, border in ((height, pads[2:4]), (width, pads[:2])))
    resampled(b, node, a["self"], rows, cols)


def _copied(size_px: int, pads: Sequence[int], mode: str) -> Taps:
    return copies(functional.pad(torch.arange(size_px).double()[None], tuple(pads), mode=mode)[0].int().tolist())


def copies(picked: Sequence[int]) -> Taps:
    """Output i is input `picked[i]`."""
    return Taps(tuple((index,) for index in picked), ((1.0,),) * len(picked))


@entry("aten.pixel_shuffle.default", images=("self",))
def pixel_shuffle(b: Builder, node: Node) -> None:
    """Output i reads pixel i // r (Shi et al., 2016, arXiv:1609.05158); what it writes beyond the tile is cut."""
    factor = node.arguments["upscale_factor"]
    out_px = (node.spec.shape[-2], node.spec.shape[-1])
    rule = Reach(lambda i: i // factor, lambda i: i // factor)
    window = b.window(node.arguments["self"], out_px, rule, rule)
    out, made = b.outputs(out_px)[b.rank], f"{node.name}.wide"
    margins = []
    for span, held in ((out.cols, window.held.cols), (out.rows, window.held.rows)):
        margins += [held.start * factor - span.start, span.stop - held.stop * factor]
    wide = b.local(made, node.operator, Ref(window.name), factor, like=node.spec, axes=(-2, -1))
    b.local(node.name, "tile.pad", wide, tuple(margins), 0.0, like=node.spec, axes=(-2, -1))


@entry("aten.pixel_unshuffle.default", images=("self",))
def pixel_unshuffle(b: Builder, node: Node) -> None:
    """Output i reads r pixels from i * r."""
    factor = node.arguments["downscale_factor"]
    out_px, rule = (node.spec.shape[-2], node.spec.shape[-1]), SlidingWindow(factor, factor)
    as_it_is(b, node, (-2, -1), self=b.padded(b.window(node.arguments["self"], out_px, rule, rule)))
