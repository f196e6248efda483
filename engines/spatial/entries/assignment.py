"""Assignments to a part of a value, which a trace holds as a new value with that part replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engines.graph.model_graph import Node, Ref
from engines.program.builder import Builder
from engines.program.instructions import DEVICE, SEED
from engines.program.value_layout import ValueLayout
from engines.spatial.entries.channels import check_along_other_axes, read_line_numbers
from engines.spatial.kernels import register_kernel
from engines.spatial.local_rules import (
    align_arguments,
    apply_locally,
    cut_to_tile,
    get_local_ranges,
    get_spec,
    make_gather_error,
)
from engines.spatial.operator_table import register_rule
from engines.spatial.rng import SETTINGS, draws, find_sample_number
from engines.spatial.tiles import Span
from engines.spatial.windows import AssignmentWindow, Shift, TableWindow

__all__: list[str] = []


@register_rule("aten.slice_scatter.default", "aten.select_scatter.default")
def assign(b: Builder, node: Node) -> None:
    """Assign a part: along a spatial axis each tile takes the lines of the part inside it, along others its pixels."""
    a, count = node.arguments, len(node.spec.shape)
    dim = a["dim"] - (count if a["dim"] >= 0 else 0)
    if b.is_tiled(a["self"]):
        rows, cols = b.get_value(a["self"]).axes or (-2, -1)
    else:
        rows, cols = b.get_value(a["src"]).axes or (-2, -1)
        if node.operator == "aten.select_scatter.default":  # the part lacks the axis that is selected
            rows, cols = (axis - (axis <= dim) for axis in (rows, cols))
    axes = rows, cols
    result = ValueLayout(node.name, node.spec, axes, differentiable=True)
    whole = a["self"] if b.is_tiled(a["self"]) else cut_to_tile(b, node, a["self"], result)
    if dim in axes:
        _assign_lines(b, node, result, whole, dim)
    else:
        apply_locally(b, node, axes, self=b.align_to_output(whole), src=_align_part(b, node, result, dim))


def _align_part(b: Builder, node: Node, result: ValueLayout, dim: int) -> Ref:
    """Return the part that is written along a non-spatial axis: its pixels under those of the result."""
    part = node.arguments["src"]
    gone = node.operator == "aten.select_scatter.default"
    rows, cols = (axis + (gone and axis < dim) for axis in result.axes or (-2, -1))
    if not b.is_tiled(part):
        layout = ValueLayout(part.name, get_spec(b, part.name), (rows, cols), differentiable=True)
        return cut_to_tile(b, node, part, layout)
    if b.get_value(part).axes != (rows, cols):
        raise make_gather_error(
            node, "writes a part whose rows and columns are other axes than those of the whole", result.axes
        )
    return b.align_to_output(part)


def _assign_lines(b: Builder, node: Node, result: ValueLayout, whole: Ref, dim: int) -> None:
    """Assign the lines of the part to the rows or columns from `start` to `stop`, `step` apart."""
    a, size, axes = node.arguments, node.spec.shape[dim], result.axes or (-2, -1)
    if node.operator == "aten.select_scatter.default":
        start, stop, step = a["index"] % size, a["index"] % size + 1, 1
    else:
        start, stop, step = slice(a["start"], a["end"], a["step"]).indices(size)
    out = b.get_output_tiles(result.size_px)[b.rank]
    span = out.rows if dim == axes[0] else out.cols
    # x[2:9:3] = part, on a tile that owns rows 4 to 8:
    #
    #     row       0  1  2  3  4  5  6  7  8  9         first = 1, the line for row 5
    #     tile                  |-----------|            count = 1, since row 8 is the neighbour's
    #     part            0        1        2            place = 1, row 5 counted from row 4
    first = max(0, -((start - span.start) // step))  # the first line of the part inside the tile
    count = max(0, -((start + first * step - min(stop, span.stop)) // step))
    source, begins = _fetch_lines(b, node, result, dim, AssignmentWindow(start, step, -((start - stop) // step)))
    place = start + first * step - span.start
    lines = (dim, place, step, first - begins, count) if count else (dim, 0, 1, 0, 0)
    b.add_local_op(node.name, "tile.assign", b.align_to_output(whole), source, *lines, like=node.spec, axes=axes)


def _fetch_lines(
    b: Builder, node: Node, result: ValueLayout, dim: int, rule: AssignmentWindow | TableWindow
) -> tuple[Ref, int]:
    """Return the part as far as this rank writes it, and the number of its first line."""
    part, axes = node.arguments.get("src", node.arguments.get("values")), result.axes or (-2, -1)
    if b.is_tiled(part):
        if b.get_value(part).axes != axes:
            raise make_gather_error(node, "writes rows and columns that are other axes than those of the whole", axes)
        window = b.read_window(part, result.size_px, *(rule if axis == dim else Shift(0) for axis in axes))
        return b.pad_window(window), (window.wanted.rows if dim == axes[0] else window.wanted.cols).start
    spec = get_spec(b, part.name)
    if node.operator == "aten.select_scatter.default":
        # The selected axis comes back with size 1: one line, written as the lines of a slice are.
        place = dim + len(node.spec.shape)
        spec = replace(spec, shape=(*spec.shape[:place], 1, *spec.shape[place:]))
        part = b.add_local_op(f"{node.name}.line", "aten.unsqueeze.default", part, place, like=spec)
    other = axes[1] if dim == axes[0] else axes[0]
    out = b.get_output_tiles(result.size_px)[b.rank]
    beside = out.cols if other == axes[1] else out.rows
    if len(spec.shape) >= -other and spec.shape[other] > len(beside):
        cut = (other,), ((beside.start, beside.stop),)
        part = b.add_local_op(f"{node.name}.own", "tile.cut", part, *cut, like=spec)
    return part, 0


@register_kernel("tile.assign")
def assign_lines(x: Tensor, part: Tensor, dim: int, place: int, step: int, first: int, count: int) -> Tensor:
    """Return `x` with `count` lines of `part`, from its line `first` on, at `place` and every `step` after it."""
    end = place + (count - 1) * step + 1 if count else place
    return torch.slice_scatter(x, part.narrow(dim, first, count), dim, place, end, step)


@register_rule("aten.index_put.default")
def put(b: Builder, node: Node) -> None:
    """Write channels, rows or columns by a list of their numbers."""
    a = node.arguments
    picked = [(dim, index) for dim, index in enumerate(a["indices"]) if index is not None]
    tiled = next((ref for ref in (a["self"], a["values"]) if b.is_tiled(ref)), None)
    if tiled is None or len(picked) != 1 or b.is_tiled(picked[0][1]) or len(get_spec(b, picked[0][1].name).shape) != 1:
        raise make_gather_error(node, "writes by something other than one list of channels, rows or columns")
    axes, dim = b.get_value(tiled).axes or (-2, -1), picked[0][0] - len(node.spec.shape)
    if dim in axes:
        _put_lines(b, node, axes, dim, picked[0][1])
        return
    images = {name: a[name] for name in ("self", "values")}
    apply_locally(b, node, axes, **align_arguments(b, replace(node, arguments=images)), indices=list(a["indices"]))


def _put_lines(b: Builder, node: Node, axes: tuple[int, int], dim: int, index: Ref) -> None:
    """Write rows or columns by their numbers, which must be constants of the trace."""
    a, size = node.arguments, node.spec.shape[dim]
    numbers = read_line_numbers(b, node, index, size)
    if a["accumulate"]:
        raise make_gather_error(node, "adds to rows or columns by a list of their numbers", axes)
    if len(set(numbers)) < len(numbers):  # which value stays is undefined, and all of them receive the gradient
        raise make_gather_error(node, "writes to a row or column twice, by a list of their numbers", axes)
    result = ValueLayout(node.name, node.spec, axes, differentiable=True)
    whole = a["self"] if b.is_tiled(a["self"]) else cut_to_tile(b, node, a["self"], result)
    line_of = {number: line for line, number in enumerate(numbers)}
    shape = get_spec(b, a["values"].name).shape
    last = shape[dim] - 1 if len(shape) >= -dim else 0  # a single line is broadcast
    table, line = [], 0
    for number in range(size):  # a line that is not written repeats an entry, so that no more lines are fetched
        line = line_of.get(number, line)
        table.append(min(line, last))
    source, begins = _fetch_lines(b, node, result, dim, TableWindow(tuple((line,) for line in table)))
    out = b.get_output_tiles(result.size_px)[b.rank]
    span: Span = out.rows if dim == axes[0] else out.cols
    own, x = range(span.start, span.stop), b.align_to_output(whole)
    written = [number in line_of for number in own]
    lines = [table[number] - begins for number in own]
    b.add_local_op(node.name, "tile.put", x, source, dim, lines, written, like=node.spec, axes=axes)


@register_kernel("tile.put")
def put_lines(x: Tensor, part: Tensor, dim: int, lines: Sequence[int], written: Sequence[bool]) -> Tensor:
    """Return `x` with the lines of `part` where they are `written`; a single line is broadcast."""
    if part.dim() >= -dim and part.shape[dim] > 1:
        part = part.index_select(dim, torch.tensor(lines, device=part.device))
    # `lines` has an entry for each line of the tile; the mask drops those of lines that are not written.
    mask = torch.tensor(written, device=x.device).view(-1, *(1,) * (-1 - dim))
    return torch.where(mask, part, x)


@register_rule("aten.scatter.value", "aten.scatter.src", "aten.scatter_add.default")
def scatter(b: Builder, node: Node) -> None:
    """Scatter into the channels of each pixel, by indices at that pixel."""
    tiled = next(Ref(name) for name in node.reads if b.is_tiled(Ref(name)))
    check_along_other_axes(b, node, tiled, node.arguments["dim"])
    apply_locally(b, node, b.get_value(tiled).axes, **align_arguments(b, node))


@register_rule("aten.index_fill.int_Scalar")
def fill(b: Builder, node: Node) -> None:
    """Fill some channels of each pixel with one number."""
    a = node.arguments
    if not b.is_tiled(a["self"]) or b.is_tiled(a["index"]):
        raise make_gather_error(node, "reads pixels in an argument for which there is no rule")
    check_along_other_axes(b, node, a["self"], a["dim"])
    apply_locally(b, node, b.get_value(a["self"]).axes)


@register_rule(
    *(f"aten.{name}.default" for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")),
    everywhere=True,
)
def lower_constant(b: Builder, node: Node) -> None:
    """Create a constant on every rank; with tiles, all of its elements share the memory of one."""
    a = node.arguments
    if b.stage.grid.tiles == 1 or len(node.spec.shape) < 2:
        apply_locally(b, node, None)
        return
    value = a.get("fill_value", 1 if "ones" in node.operator else 0)
    kind = getattr(torch, node.spec.dtype)
    b.add_local_op(node.name, "tile.constant", value, list(node.spec.shape), kind, DEVICE, like=node.spec)


@register_kernel("tile.constant")
def expand_number(value: float, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of that shape whose elements share the memory of one."""
    return torch.full((), value, dtype=dtype, device=device).expand(list(shape))


# Random operators: tensors with pixels are drawn by whole-image position, all others alike on all tiles.


__all__: list[str] = []


@register_rule(*draws, everywhere=True)
def lower_random(b: Builder, node: Node) -> None:
    """Draw the part of a random tensor that is on this tile."""
    a = node.arguments
    source = next((a[name] for name in ("self", "input") if name in a), None)
    axes = b.get_value(source).axes if isinstance(source, Ref) and b.is_tiled(source) else None
    # Numbers follow from the place in the whole image and the number of the draw: nothing is sent, and a stage that
    # is computed again draws the same.
    number = find_sample_number(b.graph, node)
    if number is None:
        apply_locally(b, node, axes)
        return
    place = get_local_ranges(b, node.spec, axes)
    if b.is_batch_sharded(Ref(node.name)):  # this rank's images of all those that the ranks share
        own = node.spec.shape[0]
        place[0] = (own * b.stage.shares, own * b.tile, own * (b.tile + 1))
    if not {"train", "training"} & set(a):
        settings = {name: a[name] for name in SETTINGS if name in a}
        if node.operator == "aten.bernoulli.default":
            settings["p"] = b.align_to_output(source)
        draw = SEED, number, place, DEVICE, node.operator.split(".")[1], getattr(torch, node.spec.dtype)
        b.add_local_op(node.name, "tile.draw", *draw, like=node.spec, axes=axes, **settings)
        return
    if "feature" in node.operator:
        place = [*place[:2], *((1, 0, 1) for _ in place[2:])]  # one number for each channel, broadcast over pixels
    if node.operator == "aten.rrelu.default":
        kernel, settings = "tile.rrelu", (a["lower"], a["upper"])
    else:
        kernel, settings = "tile.dropout", (a["p"], "alpha" in node.operator)
    x = b.align_to_output(source)
    b.add_local_op(node.name, kernel, x, SEED, number, place, DEVICE, *settings, like=node.spec, axes=axes)
