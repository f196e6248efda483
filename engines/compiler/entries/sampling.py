"""Operators that move pixels: resampling, where an output is a weighted sum of a few inputs, slices, pads, reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.class_tokens import drop_lead, take_lead
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    all_gather_lines,
    all_gather_pixels,
    apply_locally,
    find_sharded_dims,
    get_local_ranges,
    get_local_shape,
    get_sharded_axes,
    get_spec,
    make_gather_error,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import find_regrouping, get_sizes
from mpi4dl_nb.engines.geometry.tiles import Axes, Span, Tile
from mpi4dl_nb.engines.geometry.windows import Shift, SlidingWindow, TableWindow, Window, compute_window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.kernels import get_sum_type, register_kernel

TapLists = tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]
"""Inputs and weights along one axis, tap by tap: an entry for each output."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Taps along one axis: output i is the sum of `weights[i][k]` times input `inputs[i][k]`."""

    # Bilinear upsampling by 2:  inputs   ((0, 0), (0, 1), (0, 1), (1, 2), ...)
    #                            weights  ((1, 0), (.75, .25), (.25, .75), (.75, .25), ...)

    inputs: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def select_outputs(self, out: Span, held: Span) -> TapLists:
        """Return the taps of some outputs, tap by tap, with inputs counted from the first held one."""
        inputs = [[index - held.start for index in row] for row in self.inputs[out.start : out.stop]]
        return tuple(zip(*inputs, strict=True)), tuple(zip(*self.weights[out.start : out.stop], strict=True))


def lower_resample(b: Builder, node: Node, ref: Ref, *taps: Taps) -> None:
    """Fetch the window that each tile of outputs reads, and compute the weighted sums: taps for each sharded axis."""
    axes = b.get_value(ref).axes
    out_px = node.result.get_sizes(axes)
    window = b.read_window(ref, out_px, *(TableWindow(axis_taps.inputs) for axis_taps in taps))
    places = zip(taps, b.get_output_tiles(out_px)[b.rank], window.held, strict=True)
    selected = tuple(axis_taps.select_outputs(out, held) for axis_taps, out, held in places)
    b.add_local_op(node.name, "tile.resample", Ref(window.name), selected, axes, like=node.result, axes=axes)


@register_kernel("tile.resample")
def resample_tile(x: Tensor, taps: Sequence[TapLists], axes: Axes) -> Tensor:
    """Resample along the last of `axes` first, that of columns, as ATen does."""
    # Copies of whole numbers stay whole: float32 rounds those above 2 ** 24. Floating copies are summed in backward.
    whole = not x.is_floating_point() and all(_is_copy(*axis_taps) for axis_taps in taps)
    wide = x if whole else x.to(get_sum_type(x))
    for axis, (inputs, weights) in reversed(list(zip(axes, taps, strict=True))):
        wide = _sum_taps(wide, axis, inputs, weights)
    return wide.to(x.dtype)


def _is_copy(inputs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> bool:
    """Return whether each output is an input."""
    return len(inputs) == 1 and set(weights[0]) == {1.0}


def _sum_taps(x: Tensor, axis: int, inputs: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Tensor:
    if _is_copy(inputs, weights):
        return x.index_select(axis, torch.tensor(inputs[0], device=x.device))
    parts = [
        x.index_select(axis, torch.tensor(index, device=x.device)) * x.new_tensor(weight).view(-1, *(1,) * (-1 - axis))
        for index, weight in zip(inputs, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])


def pad_with_copies(b: Builder, node: Node) -> None:
    """Pad by reflection, replication or circularly: each pixel of the border is a copy of an image pixel."""
    a = node.arguments
    borders = list(zip(a["pad"][::2], a["pad"][1::2], strict=True))[::-1]  # from the last axis on
    value = b.get_value(a["self"])
    count = len(b.image_axes)
    if any(map(any, borders[:-count])) or value.axes != b.image_axes:
        raise make_gather_error(node, "pads other axes than those of the image with copies")
    picked = []
    for size_px, border in zip(value.size_px, [(0, 0)] * (count - len(borders)) + borders[-count:], strict=True):
        numbers = torch.arange(size_px).double()[None]  # the pixels' numbers are padded in place of the pixels
        picked.append(functional.pad(numbers, border, mode=a["mode"])[0].int().tolist())
    move_pixels(b, node, a["self"], picked)


_MOST_RUNS = 8
"""Of more runs of neighbours, one window for all is fetched."""


def move_pixels(b: Builder, node: Node, ref: Ref, picked: Sequence[Sequence[int]]) -> None:
    """Copy pixels: along each sharded axis output i is input `picked[i]`.

    An axis of a few runs of neighbours that lie far apart (rolled, repeated, padded circularly) is fetched run by run:
    one window for all of them would be as long as the image, for a tile at the seam.
    """
    #     rolled by 2     outputs    0 1 | 2 3 4 5 6 7         tile of outputs 0 to 3: inputs 6 7 and 0 1, not 0 to 7
    #                     inputs     6 7 | 0 1 2 3 4 5
    value = b.get_value(ref)
    tile_px = [size // parts for size, parts in zip(value.size_px, b.stage.parts, strict=True)]
    runs = [_find_runs(*axis) for axis in zip(picked, tile_px, strict=True)]
    stays = [list(numbers) == [*range(size)] for numbers, size in zip(picked, value.size_px, strict=True)]
    sizes = [tuple(map(len, picked))[: done + 1] + value.size_px[done + 1 :] for done in range(len(picked))]
    if b.tile_by_tile or not all(map(any, zip(runs, stays, strict=True))) or not all(map(b.can_tile, sizes)):
        lower_resample(b, node, ref, *map(make_copy_taps, picked))
        return
    part = b.crop_to_own(ref)
    for number, out_px in enumerate(sizes):
        if not stays[number]:
            part = _fetch_runs(b, node, part, number, runs[number], out_px)
    b.add_local_op(node.name, "aten.alias.default", part, like=node.result, axes=value.places)
    b.hold_like(Ref(node.name), part)


def _find_runs(picked: Sequence[int], tile_px: int) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive inputs: first output, the one after the last, and how far the inputs lie ahead.

    There are none if no two of them are further apart than a tile is long, or if there are too many.

    >>> _find_runs([6, 7, 0, 1, 2], tile_px=4), _find_runs([1, 0, 1, 2, 3, 2], tile_px=2)
    ([(0, 2, 6), (2, 5, -2)], [])
    """
    starts = [0, *(at for at in range(1, len(picked)) if picked[at] != picked[at - 1] + 1)]
    if len(starts) > _MOST_RUNS or all(abs(picked[at] - picked[at - 1]) <= tile_px for at in starts[1:]):
        return []
    return [(start, stop, picked[start] - start) for start, stop in pairwise([*starts, len(picked)])]


def _fetch_runs(
    b: Builder, node: Node, ref: Ref, number: int, runs: Sequence[tuple[int, int, int]], out_px: tuple[int, ...]
) -> Ref:
    """Return the pixels of this rank's tile of outputs along the sharded axis `number`, fetched run by run."""
    axis, name = b.get_value(ref).axes[number], f"{node.name}.moved{number}"
    parts = []
    for start, stop, ahead in runs:
        wanted = {}
        for rank, tile in b.get_tiles(out_px).items():
            span = tile[number] & Span(start, stop)
            wanted[rank] = tile.replace_span(number, Span(span.start + ahead, span.stop + ahead))
        fetched = b.exchange(ref, wanted, 0.0)  # on every rank, also one that reads nothing of the run
        if tile := wanted[b.rank]:
            parts.append(b.pad_window(Window(fetched.name, b.get_held_tiles(fetched)[b.rank], tile, 0.0)))
    like = b.get_value(ref).spec.resize(axis, out_px[number])
    return b.add_local_op(name, "aten.cat.default", parts, axis, like=like, axes=b.get_value(ref).places)


def make_copy_taps(picked: Sequence[int]) -> Taps:
    """Return the taps by which output i copies input `picked[i]`."""
    return Taps(tuple((index,) for index in picked), ((1.0,),) * len(picked))


def check_two_axes(b: Builder, node: Node) -> None:
    """Raise NeedsGatherError unless images are cut along two axes, as an operator on rows and columns needs."""
    if len(b.image_axes) != 2:
        raise make_gather_error(node, f"is for rows and columns, but {len(b.image_axes)} axes are cut")


@register_rule("aten.pixel_shuffle.default", images=("self",))
def pixel_shuffle(b: Builder, node: Node) -> None:
    """Shuffle pixels: output i reads pixel i // r (Shi et al., 2016, arXiv:1609.05158); the surplus is cropped."""
    factor = node.arguments["upscale_factor"]
    check_two_axes(b, node)
    out_px = b.get_image_px(node.result)
    rules = [TableWindow(tuple((i // factor,) for i in range(size_px))) for size_px in out_px]
    window = b.read_window(node.arguments["self"], out_px, *rules)
    shuffled = compute_window(window.held, [SlidingWindow(factor, factor)] * 2)
    margins = Window(f"{node.name}.wide", shuffled, b.get_output_tiles(out_px)[b.rank], 0.0).margins
    wide = b.add_local_op(
        f"{node.name}.wide", node.operator, Ref(window.name), factor, like=node.result, axes=b.image_axes
    )
    b.add_local_op(node.name, "tile.pad", wide, margins, 0.0, like=node.result, axes=b.image_axes)


@register_rule("aten.pixel_unshuffle.default", images=("self",))
def pixel_unshuffle(b: Builder, node: Node) -> None:
    """Unshuffle pixels: output i reads r pixels from i * r."""
    factor = node.arguments["downscale_factor"]
    check_two_axes(b, node)
    out_px, rule = b.get_image_px(node.result), SlidingWindow(factor, factor)
    apply_locally(b, node, b.image_axes, self=b.pad_window(b.read_window(node.arguments["self"], out_px, rule, rule)))


@register_rule("aten.grid_sampler.default")
def grid_sampler(b: Builder, node: Node) -> None:
    """Gather the image; each rank samples its own outputs (Jaderberg et al., 2015, arXiv:1506.02025)."""
    a, grid = node.arguments, node.arguments["grid"]
    count = len(b.image_axes)
    before_last = tuple(axis - 1 for axis in b.image_axes)
    if b.is_tiled(grid) and b.get_value(grid).axes != before_last:
        raise make_gather_error(node, "reads places whose axes are not those before the last", b.image_axes)
    spans = [axis_range[1:] for axis_range in get_local_ranges(b, node.result, b.image_axes)[-count:]]
    if b.is_tiled(grid):
        places = b.align_to_output(grid)
    else:
        like = b.get_value(grid).spec
        places = b.add_local_op(f"{node.name}.places", "tile.cut", grid, before_last, spans, like=like)
    apply_locally(b, node, b.image_axes, input=all_gather_pixels(b, node, a["input"]), grid=places)


# Other shapes for the same values: each sharded axis stays where it is in memory; axes are split, merged or repeated.


@register_rule(
    *(f"aten.{name}.default" for name in ("view", "reshape", "view_as", "reshape_as", "squeeze", "unsqueeze")),
    *("aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints", "aten.unflatten.int"),
)
def reshape(b: Builder, node: Node) -> None:
    """Reshape values in the same order; of rows or columns that are split, each tile has whole groups."""
    source = next(iter(node.arguments.values()))
    if not b.is_tiled(source):
        raise make_gather_error(node, "takes its shape from an image")
    value = b.get_value(source)
    regrouped = find_regrouping(value.spec.shape, value.places, node.result.shape)
    if regrouped is None:
        raise make_gather_error(node, f"mixes rows and columns ({value.spec.shape} to {node.result.shape})")
    out_px = get_sizes(node.result.shape, regrouped.places)
    b.stage.parts.check(out_px, [max(1, px // count) for px, count in zip(value.size_px, out_px, strict=True)])
    window, out = b.read_window(source, out_px, *regrouped.rules), b.get_output_tiles(out_px)[b.rank]
    # From groups of 4 columns back to 8 columns in tiles of 3 and 5: rank 1 reads both groups, and crops one column.
    #
    #     groups     | 0 1 2 3 | 4 5 6 7 |
    #     columns    | 0 1 2 | 3 4 5 6 7 |
    pairs = zip(window.wanted, value.size_px, out_px, strict=True)
    written = Tile(*(Span(span.start * new // old, span.stop * new // old) for span, old, new in pairs))
    layout = ValueLayout(node.name, node.result, regrouped.places, differentiable=True)
    name, shape = node.name if written == out else f"{node.name}.wide", layout.compute_shape(written)
    x = b.pad_window(window)
    wide = b.add_local_op(name, "aten.reshape.default", x, shape, like=node.result, axes=layout.places)
    if written != out:
        b.hold(b.get_value(wide), written)
        part = b.cut_window(Window(name, written, out, 0.0), layout)
        b.add_local_op(node.name, "aten.alias.default", part, like=node.result, axes=layout.places)


@register_rule("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(b: Builder, node: Node) -> None:
    """Expand axes of size 1 and add leading axes."""
    source = align_arguments(b, node)["self"]
    places = next(b.values[name].places for name in node.reads if b.is_tiled(Ref(name)))
    whole = get_spec(b, source.name).shape
    if b.is_tiled(source) and any(whole[place.dim] != node.result.shape[place.dim] for place in places):
        raise make_gather_error(node, "repeats rows or columns")
    local_shape = get_local_shape(b, node.result, places)
    b.add_local_op(node.name, "aten.expand.default", source, local_shape, like=node.result, axes=places)


@register_rule("aten.repeat.default", "aten.tile.default", images=("self",))
def repeat(b: Builder, node: Node) -> None:
    """Repeat channels and batch; or rows and columns."""
    times, source = node.arguments.get("repeats", node.arguments.get("dims")), node.arguments["self"]
    count = len(b.image_axes)
    if not set(times[-count:]) - {1}:
        apply_locally(b, node, b.image_axes)
    elif set(times[:-count]) - {1} or len(times) > len(b.get_value(source).spec.shape):
        raise make_gather_error(node, f"repeats pixels, and repeats or adds other axes ({tuple(times)})")
    else:
        sizes = zip(b.get_value(source).size_px, (*(1,) * count, *times)[-count:], strict=True)
        move_pixels(b, node, source, [[*range(size)] * again for size, again in sizes])


@register_rule("aten.new_empty.default")
def new_empty(b: Builder, node: Node) -> None:
    """Create a tensor that only takes its type from an image: every rank makes all of it."""
    apply_locally(b, node, ())


# Slicing, padding, picking and permuting: operators that move pixels or leave them in place.


@register_rule("aten.constant_pad_nd.default", "aten.pad.default", tiled=("self",))
def pad(b: Builder, node: Node) -> None:
    """Pad by a constant: output i reads input i - (pixels before it), and the fill outside the image."""
    a, value = node.arguments, b.get_value(node.arguments["self"])
    pairs = dict(enumerate(zip(a["pad"][::2], a["pad"][1::2], strict=True), 1))  # from the last axis on
    if not any(any(pairs.get(-place.dim, ())) for place in value.places):
        apply_locally(b, node, value.places)
        return
    if a.get("mode", "constant") != "constant":
        pad_with_copies(b, node)
        return
    fill, axes = float(a.get("value") or 0.0), value.axes
    rules = [Shift(-pairs.pop(-axis, (0, 0))[0]) for axis in axes]
    x = b.pad_window(b.read_window(a["self"], node.result.get_sizes(axes), *rules, fill=fill))
    others = [px for from_end in range(1, len(node.result.shape) + 1) for px in pairs.get(from_end, (0, 0))]
    b.add_local_op(node.name, "aten.constant_pad_nd.default", x, others, fill, like=node.result, axes=axes)


@register_rule("aten.slice.Tensor")
def crop(b: Builder, node: Node) -> None:
    """Slice: along a spatial axis output i reads input start + i * step; along others each pixel stays in place."""
    a = node.arguments
    value = b.get_value(a["self"])
    axis = a["dim"] % len(value.spec.shape)
    if axis not in find_sharded_dims(b, a["self"]):
        apply_locally(b, node, value.places)
        return
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(value.spec.shape[axis])
    if value.lead and stop <= value.lead:
        lead = take_lead(b, b.crop_to_own(a["self"]))
        b.add_local_op(node.name, "aten.slice.Tensor", lead, a["dim"], start, stop, step, like=node.result)
        return
    if value.lead and (start, stop, step) == (value.lead, value.spec.shape[axis], 1):
        pixels = drop_lead(b, b.crop_to_own(a["self"]))
        b.add_local_op(node.name, "aten.alias.default", pixels, like=node.result, axes=b.get_value(pixels).places)
        return
    dims = get_sharded_axes(b, a["self"])
    # x[..., start:stop:step] reads like a 1x1 kernel with that stride.
    stay, move = Shift(0), SlidingWindow(kernel=1, stride=step, padding=-start)
    out_px = node.result.get_sizes(dims)
    if not b.can_tile(out_px) and start < stop:
        few = all_gather_lines(b, node, a["self"], axis, Span(start, stop))
        b.add_local_op(node.name, "aten.slice.Tensor", few, axis, 0, None, step, like=node.result)
        return
    window = b.read_window(a["self"], out_px, *(move if axis == dim else stay for dim in dims))
    apply_locally(b, node, value.axes, self=b.pad_window(window), start=0, end=None)


@register_rule("getitem")
def pick(b: Builder, node: Node) -> None:
    """Pick one of several outputs, tiled as they are."""
    several = node.arguments["0"]
    value = b.get_value(several)
    # No exchange: the rank holds these pixels. The read is recorded for fused halos, but no window is made of it, since
    # several tensors cannot be padded at once.
    b.read_window(several, value.size_px, *(Shift(0) for _ in value.places))
    b.hold_like(apply_locally(b, node, value.places, **{"0": several}), several)
