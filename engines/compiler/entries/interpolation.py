"""Interpolation: which pixels each output reads, with which weights, as ATen's own operators say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.sampling import Taps, lower_resample, make_copy_taps
from mpi4dl_nb.engines.compiler.local_rules import make_gather_error, make_unsupported_error
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.graph.model_graph import Node
from mpi4dl_nb.engines.program.kernels import get_operator

Resample = Callable[[Tensor], Tensor]
"""Maps each row (n values) of a matrix (k, n) to a row of m values, each a weighted sum of some of the n."""


def find_taps(size_px: int, resample: Resample, reach_px: int) -> Taps:
    """Return which inputs each output reads with which weights, by probing `resample` itself.

    A row that is 1 at every `spacing`-th input yields the weights of those inputs. The output for the ramp 0, 1, 2 ...
    identifies the one that is read: no tap is more than `reach_px` from it.
    """
    # reach_px 1, spacing 4: of the inputs r, r + 4, ... no output reads more than one.
    #
    #     row r      1 at r, r + 4, ...    output i is the weight of the one that it reads
    #     ramp       0  1  2  3  4 ...     output i is about the place where it reads: the nearest one is meant
    spacing = 2 * reach_px + 2
    places = torch.arange(size_px)
    answers = resample((places % spacing == torch.arange(min(spacing, size_px))[:, None]).double()).T.tolist()
    middles = resample(places[None].double())[0].tolist()
    taps = []
    for row, middle in zip(answers, middles, strict=True):
        near = [
            (start + spacing * round((middle - start) / spacing), weight) for start, weight in enumerate(row) if weight
        ]
        # An output without weights still reads an input, since a window must not be empty.
        taps.append(near or [(min(max(round(middle), 0), size_px - 1), 0.0)])
    most = max(len(near) for near in taps)
    filled = [near + [(near[0][0], 0.0)] * (most - len(near)) for near in taps]
    return Taps(*(tuple(tuple(pair[part] for pair in near) for near in filled) for part in (0, 1)))


_COPYING = "upsample_nearest", "_upsample_nearest_exact"
_NEAREST = tuple(f"aten.{name}{count}d" for name in _COPYING for count in (1, 2, 3))

# Reach of ATen's other upsampling operators, in input pixels if the image does not shrink.
_REACH_PX = {
    **dict.fromkeys(("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d"), 2),
    "aten.upsample_bicubic2d": 4,
    "aten._upsample_bilinear2d_aa": 3,
    "aten._upsample_bicubic2d_aa": 5,
}


@register_rule(*(f"{name}.vec" for name in (*_NEAREST, *_REACH_PX)), images=("input",))
def upsample(b: Builder, node: Node) -> None:
    """Upsample by nearest, linear or cubic interpolation along each axis, with the weights of ATen."""
    if len(node.result.shape) - 2 != len(b.image_axes):
        raise make_gather_error(node, f"makes other axes than the {len(b.image_axes)} that are cut")
    if "_aa." in node.operator and node.result.shape[-1] == 1:
        raise make_unsupported_error(
            node, "makes one column, which ATen's antialiasing gets wrong: rows and gradients are mixed up"
        )
    size_px, copies = b.get_value(node.arguments["input"]).size_px, node.operator.startswith(_NEAREST)
    if not (copies or node.result.is_floating):
        raise make_unsupported_error(node, f"rounds means of pixels to {node.result.dtype}, for which there is no rule")
    find = _find_nearest_taps if copies else _find_smooth_taps
    lower_resample(b, node, node.arguments["input"], *(find(node, size_px, axis) for axis in range(len(size_px))))


def _run_along(node: Node, axis: int, x: Tensor, other: int) -> Tensor:
    """Return the first of `other` columns that the node's interpolation makes of `x`, whose rows are along `axis`."""
    a, run = node.arguments, get_operator(f"{node.operator.removesuffix('.vec')}.default")
    # Rows and columns stand for the axes of a volume: there is one plane, behind them. A signal has rows alone.
    count = len(node.result.shape) - 2
    scales = (a["scale_factors"][axis] if a["scale_factors"] else None, None, None)[:count]
    aligned = [a["align_corners"]] if "align_corners" in a else []
    x, size = (x[..., 0], x, x[..., None])[count - 1], [node.result.shape[axis + 2], other, 1][:count]
    return run(x, size, *aligned, *scales).flatten(3)[..., 0] if count > 1 else run(x, size, *aligned, *scales)


def _find_nearest_taps(node: Node, size_px: Sequence[int], axis: int) -> Taps:
    """Return the taps of one axis, by interpolating the pixels' numbers.

    Raises TraceError if PyTorch's result and its gradient disagree about the nearest pixel.
    """
    # PyTorch has two kernels on a CPU, which round differently. One computes in float32, as GPUs do: gradients, images
    # with channels last, and results of up to 128 rows and columns together. The other computes all else, in float64
    # for an image in float64. The probe has as many columns as the result, as far as that matters.
    out_px = node.result.shape[2:]
    others = [index for index in range(len(out_px)) if index != axis]
    other = min(sum(out_px[index] for index in others) - max(0, len(others) - 1), 129)
    width = other if all(size_px[index] == out_px[index] for index in others) else 1 + (other == 1)

    def pick(kind: torch.dtype, channels: int, layout: torch.memory_format) -> list[int]:
        numbers = torch.arange(size_px[axis], dtype=kind)[:, None].expand(1, channels, -1, max(width, 1))
        return _run_along(node, axis, numbers.contiguous(memory_format=layout), other)[0, 0].int().tolist()

    picked, dtype = pick(torch.float32, 4, torch.channels_last), node.result.dtype
    if picked != pick(torch.float64 if dtype == "float64" else torch.float32, 1, torch.contiguous_format):
        raise make_unsupported_error(
            node,
            f"makes {out_px[axis]} pixels of {size_px[axis]}: in {dtype}, PyTorch rounds the places of its result and "
            "of its gradient differently, so that they belong to other pixels. Use another size: few are affected",
        )
    return make_copy_taps(picked)


def _find_smooth_taps(node: Node, size_px: Sequence[int], axis: int) -> Taps:
    """Return the taps of one axis. The other axis changes size only if the image does: ATen copies if none changes.

    The probe is two pixels wide: antialiasing to one column is wrong in PyTorch 2.13 on a CPU (gradcheck says so).
    """
    out_px = node.result.shape[2:]
    other = 2 if all(a == b for index, (a, b) in enumerate(zip(size_px, out_px, strict=True)) if index != axis) else 4

    def resample(rows: Tensor) -> Tensor:
        two = rows[None, :, :, None].expand(-1, -1, -1, 2).contiguous()
        return _run_along(node, axis, two, other)[0]

    reach_px = _REACH_PX[node.operator.removesuffix(".vec")]
    return find_taps(size_px[axis], resample, reach_px * math.ceil(max(1.0, size_px[axis] / out_px[axis])))
