"""Assignments to a part of a value, which a trace holds as a new value with that part replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.channels import check_only_first_tiled, read_line_numbers
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    apply_locally,
    cut_to_tile,
    get_local_ranges,
    get_local_shape,
    get_spec,
    make_gather_error,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import to_places
from mpi4dl_nb.engines.geometry.tiles import Axes
from mpi4dl_nb.engines.geometry.windows import Shift, SpanRule, TableWindow
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.instructions import DEVICE, SEED
from mpi4dl_nb.engines.program.kernels import register_kernel
from mpi4dl_nb.engines.program.rng import SETTINGS, draws, find_sample_number


@register_rule("aten.slice_scatter.default", "aten.select_scatter.default")
def assign(b: Builder, node: Node) -> None:
    """Assign a part: along a spatial axis each tile takes the lines of the part inside it, along others its pixels."""
    a, part, count = node.arguments, node.arguments["src"], len(node.result.shape)
    dim, selects = a["dim"] - (count if a["dim"] >= 0 else 0), node.operator == "aten.select_scatter.default"
    axes = b.get_value(a["self"] if b.is_tiled(a["self"]) else part).axes
    if selects and not b.is_tiled(a["self"]):  # the part lacks the axis that is selected
        axes = tuple(axis - (axis <= dim) for axis in axes)
    part_axes = tuple(axis + (selects and axis < dim) for axis in axes)
    if dim in axes:
        if selects and b.is_tiled(part):
            raise make_gather_error(node, "writes one line from a part that is divided itself", axes)
        size = node.result.shape[dim]
        numbers = [a["index"] % size] if selects else range(size)[a["start"] : a["end"] : a["step"]]
        if selects:
            # The selected axis comes back with size 1: one line, written as the lines of a slice are.
            spec, front_dim = get_spec(b, part.name), dim + count
            spec = replace(spec, shape=(*spec.shape[:front_dim], 1, *spec.shape[front_dim:]))
            part = b.add_local_op(f"{node.name}.line", "aten.unsqueeze.default", part, front_dim, like=spec)
        _write_lines(b, node, axes, dim, numbers, part)
    elif b.is_tiled(part) and b.get_value(part).axes != part_axes:
        raise make_gather_error(
            node, "writes a part whose rows and columns are other axes than those of the whole", axes
        )
    else:
        aligned = _align(b, node, a["self"], axes), _align(b, node, part, part_axes)
        apply_locally(b, node, axes, self=aligned[0], src=aligned[1])


def _align(b: Builder, node: Node, ref: Ref, axes: Axes) -> Ref:
    """Return the part, under this rank's part of the result, of a value that is sharded along `axes` as that is."""
    if b.is_tiled(ref):
        return b.align_to_output(ref)
    return cut_to_tile(b, node, ref, ValueLayout(ref.name, get_spec(b, ref.name), to_places(axes), differentiable=True))


@register_rule("aten.index_put.default")
def put(b: Builder, node: Node) -> None:
    """Write channels, rows or columns by a list of their numbers."""
    a = node.arguments
    picked = [(dim, index) for dim, index in enumerate(a["indices"]) if index is not None]
    tiled = next((ref for ref in (a["self"], a["values"]) if b.is_tiled(ref)), None)
    if tiled is None or len(picked) != 1 or b.is_tiled(picked[0][1]) or len(get_spec(b, picked[0][1].name).shape) != 1:
        raise make_gather_error(node, "writes by something other than one list of channels, rows or columns")
    axes, (front_dim, index) = b.get_value(tiled).axes, picked[0]
    dim = front_dim - len(node.result.shape)
    if dim not in axes:
        images = {name: a[name] for name in ("self", "values")}
        apply_locally(b, node, axes, **align_arguments(b, replace(node, arguments=images)), indices=list(a["indices"]))
        return
    numbers = read_line_numbers(b, node, index, node.result.shape[dim])
    if a["accumulate"]:
        raise make_gather_error(node, "adds to rows or columns by a list of their numbers", axes)
    if len(set(numbers)) < len(numbers):  # which value stays is undefined, and all of them receive the gradient
        raise make_gather_error(node, "writes to a row or column twice, by a list of their numbers", axes)
    _write_lines(b, node, axes, dim, numbers, a["values"])


def _write_lines(b: Builder, node: Node, axes: Axes, dim: int, numbers: Sequence[int], part: Ref) -> None:
    """Write rows or columns: those of `numbers` become the lines of the part in turn, or its only line."""
    if not numbers:
        whole = _align(b, node, node.arguments["self"], axes)
        b.add_local_op(node.name, "aten.alias.default", whole, like=node.result, axes=axes)
        return
    spec, size_px, axis_index = get_spec(b, part.name), node.result.get_sizes(axes), axes.index(dim)
    out = b.get_output_tiles(size_px)[b.rank]
    span = out[axis_index]
    last = spec.shape[dim] - 1 if len(spec.shape) >= -dim else 0  # a single line is broadcast
    # x[2:9:3] = part, on a tile that owns rows 4 to 8:
    #
    #     row       0  1  2  3  4  5  6  7  8  9
    #     tile                  |-----------|            writes line 1 of the part to row 5; row 8 is the neighbour's
    #     table     0  0  0  0  0  1  1  1  2  2         a row that is not written repeats the line before it, so
    #     part            0        1        2            that hardly more lines are fetched
    line_of = {position: min(line, last) for line, position in enumerate(numbers)}
    table, line = [], 0
    for position in range(node.result.shape[dim]):
        line = line_of.get(position, line)
        table.append(line)
    begins = 0
    if b.is_tiled(part):
        if b.get_value(part).axes != axes:
            raise make_gather_error(node, "writes rows and columns that are other axes than those of the whole", axes)
        # Across the lines, the part has the pixels of the whole, or a single one, which is broadcast.
        pairs = zip(spec.get_sizes(axes), size_px, strict=True)
        rules: list[SpanRule] = [Shift(0) if pixels == size else TableWindow(((0,),) * size) for pixels, size in pairs]
        rules[axis_index] = TableWindow(tuple((line,) for line in table))
        window = b.read_window(part, size_px, *rules)
        part, begins = b.pad_window(window), window.wanted[axis_index].start
    else:
        across = {axis: cut for axis, cut in zip(axes, out, strict=True) if axis != dim and len(spec.shape) >= -axis}
        if cuts := {axis: (cut.start, cut.stop) for axis, cut in across.items() if spec.shape[axis] > len(cut)}:
            part = b.add_local_op(f"{node.name}.own", "tile.cut", part, tuple(cuts), tuple(cuts.values()), like=spec)
    whole, owned = _align(b, node, node.arguments["self"], axes), range(span.start, span.stop)
    lines, written = [table[position] - begins for position in owned], [position in line_of for position in owned]
    b.add_local_op(node.name, "tile.put", whole, part, dim, lines, written, like=node.result, axes=axes)


@register_rule("aten.index_fill.int_Scalar")
def fill(b: Builder, node: Node) -> None:
    """Fill channels, rows or columns, by a list of their numbers, with one number.

    Since PyTorch 2.15 this is also what `x[:, :, [2, 0]] = 4` becomes.
    """
    a, axes = node.arguments, b.get_value(check_only_first_tiled(b, node)).axes
    dim = a["dim"] % len(node.result.shape) - len(node.result.shape)
    if dim not in axes:
        if a["index"].name in b.graph.constants:  # the trace has not looked at the numbers
            read_line_numbers(b, node, a["index"], node.result.shape[dim])
        apply_locally(b, node, axes)
        return
    numbers = set(read_line_numbers(b, node, a["index"], node.result.shape[dim]))
    owned = b.get_output_tiles(node.result.get_sizes(axes))[b.rank][axes.index(dim)]
    written = [line in numbers for line in range(owned.start, owned.stop)]
    b.add_local_op(
        node.name, "tile.fill", _align(b, node, a["self"], axes), dim, written, a["value"], like=node.result, axes=axes
    )


@register_kernel("tile.fill")
def fill_lines(x: Tensor, dim: int, written: Sequence[bool], value: float) -> Tensor:
    """Return `x` with `value` in the lines that are `written`."""
    return x.masked_fill(_make_line_mask(x, dim, written), value)


def _make_line_mask(x: Tensor, dim: int, written: Sequence[bool]) -> Tensor:
    return torch.tensor(written, device=x.device).view(-1, *(1,) * (-1 - dim))


@register_kernel("tile.put")
def put_lines(x: Tensor, part: Tensor, dim: int, lines: Sequence[int], written: Sequence[bool]) -> Tensor:
    """Return `x` with the lines of `part` where they are `written`; a single line is broadcast."""
    if part.dim() >= -dim and part.shape[dim] > 1:
        part = part.index_select(dim, torch.tensor(lines, device=part.device))
    # `lines` has an entry for each line of the tile; the mask drops those of lines that are not written.
    return torch.where(_make_line_mask(x, dim, written), part.to(x.dtype), x)


@register_rule(
    *(f"aten.{name}.default" for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")),
    everywhere=True,
)
def lower_constant(b: Builder, node: Node) -> None:
    """Create a constant on every rank; with tiles, all of its elements share the memory of one."""
    a = node.arguments
    if len(b.stage.ranks) == 1 or len(node.result.shape) < 2:
        apply_locally(b, node, ())
        return
    value = a.get("fill_value", 1 if "ones" in node.operator else 0)
    kind = getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.constant", value, list(node.result.shape), kind, DEVICE, like=node.result)


@register_kernel("tile.constant")
def expand_number(value: float, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of that shape whose elements share the memory of one."""
    return torch.full((), value, dtype=dtype, device=device).expand(list(shape))


# Random operators: tensors with pixels are drawn by whole-image position, all others alike on all tiles.


@register_rule(*draws, everywhere=True)
def lower_random(b: Builder, node: Node) -> None:
    """Draw the part of a random tensor that is on this tile."""
    arguments = (node.arguments.get(name) for name in ("self", "input"))
    source = next((argument for argument in arguments if isinstance(argument, Ref)), None)
    places = b.get_value(source).places if source else ()
    # Numbers follow from the place in the whole image and the number of the draw: nothing is sent, and a stage that
    # is computed again draws the same.
    sample_number = find_sample_number(b.graph, node)
    if sample_number is None:
        apply_locally(b, node, places)
        return
    value = ValueLayout(node.name, node.result, places, differentiable=True)
    split = value.split()
    if split is value:
        _draw(b, node, source, sample_number, value.axes)
        return
    if "feature" in node.operator:
        raise make_gather_error(node, "draws one number for each channel, and rows and columns are merged")
    parts = b.split_axes(source) if source else None
    _draw(b, replace(node, name=split.name, spec=split.spec), parts, sample_number, split.axes)
    shape = get_local_shape(b, node.result, places)
    b.add_local_op(node.name, "aten.reshape.default", Ref(split.name), shape, like=node.result, axes=places)


def _draw(b: Builder, node: Node, source: Ref | None, number: int, axes: Axes) -> None:
    """Draw numbers for the rank's part of a tensor, which is sharded along `axes`; `number` is that of the draw."""
    a = node.arguments
    ranges = get_local_ranges(b, node.result, axes)
    if source is None or not {"train", "training"} & set(a):
        keywords = {name: a[name] for name in SETTINGS if name in a}
        if source and node.operator == "aten.bernoulli.default":
            keywords["p"] = b.align_to_output(source)
        draw = SEED, number, ranges, DEVICE, node.operator.split(".")[1], getattr(torch, node.result.dtype)
        b.add_local_op(node.name, "tile.draw", *draw, like=node.result, axes=axes, **keywords)
        return
    if "feature" in node.operator:
        ranges = [*ranges[:2], *((1, 0, 1) for _ in ranges[2:])]  # one number for each channel, broadcast over pixels
    settings: tuple[Any, ...] = (a["p"], "alpha" in node.operator) if "p" in a else (a["lower"], a["upper"])
    kernel, x = "tile.dropout" if "p" in a else "tile.rrelu", b.align_to_output(source)
    b.add_local_op(node.name, kernel, x, SEED, number, ranges, DEVICE, *settings, like=node.result, axes=axes)
