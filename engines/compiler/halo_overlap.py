"""Overlap of halo exchanges with computation: an operator is split into its interior and its borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import choose_memory_format
from mpi4dl_nb.engines.compiler.builder import Builder, HaloRead
from mpi4dl_nb.engines.geometry.tiles import Axes, Span, Tile
from mpi4dl_nb.engines.geometry.windows import compute_interior, compute_window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.effects import select_kind
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.kernels import cut_spans, register_kernel

Lower = Callable[[Builder, Node], None]
PixelRange = tuple[tuple[int, int], ...]
"""(start, stop) along each sharded axis."""


def split_interior(b: Builder, node: Node, lower: Lower) -> None:
    """Lower the current node again, in pieces, so that its halo exchange overlaps with its interior.

    The node is split if `lower` read one window with a halo for it. The split depends on no operator. The outputs that
    read only own pixels are one piece, and the rest of the tile is up to two borders for each axis. `lower` makes the
    operator's kernels for each piece as for a tile of that size:

        exchange begins | interior | exchange ends | borders, joined with the interior | the rest of the segment

    A node stays whole if it also needs sums or several windows, if some rank has no interior, or if it is one of
    several readers of a fused halo with different windows. Nodes that read in the same way share strips.
    """
    borrowed, value = b.single_halo_read, b.values.get(node.name)
    if borrowed is None or value is None or not value.places or node.spec is None:
        return
    if not (value.is_split and b.get_value(Ref(borrowed.read.value)).is_split):
        return
    source, rules, outputs = Ref(borrowed.read.value), borrowed.read.rules, b.get_output_tiles(value.size_px)
    wanted = {rank: compute_window(tile, rules) for rank, tile in outputs.items()}
    # The decision depends on the tiles of all ranks, so that all of them take it alike. `borrowed.wanted` differs from
    # the node's own windows if it serves other readers of a fused halo.
    inner = _find_interiors(b, source, borrowed, outputs)
    if tuple(wanted.values()) != borrowed.wanted or not all(inner.values()):
        return
    b.undo_node()
    key = (source, *rules, tuple(outputs.items()), borrowed.fill)
    first = key not in b.strips  # `undo_node` keeps the strips: a second reader of the same window posts no exchange
    borders = _compute_borders(inner[b.rank], outputs[b.rank]) if b.rank in inner else ()
    started = _start_exchange(b, source, wanted, borrowed, borders) if first else None
    if first:
        b.strips[key] = started.strips if started else ()
    if not borders:
        with b.restrict_node(source):  # this rank reads own pixels only, but its exchange still sends to the others
            lower(b, node)
        return
    # The interior, in memory for all outputs of the tile.
    out, part = outputs[b.rank], f"{node.name}.interior"
    with b.restrict_node(source, part, inner[b.rank]):
        lower(b, replace(node, name=part))
    axes, interior_range = b.values[part].axes, _compute_range(inner[b.rank], out)
    begun = b.add_local_op(
        f"{part}.begun", "tile.begun", Ref(part), out.shape, interior_range, axes, like=node.spec, axes=axes
    )
    begun = b.hold(b.get_value(begun), out)
    if started:
        # The flush ends the segment with the interior, which runs between the two halves of the exchange.
        b.flush(interior=True)
        b.instructions.append(started.adjoint)
        for name, tile in started.strips:
            b.hold(replace(b.get_value(source), name=name), tile)
    # The borders, each from its strip.
    names = [f"{node.name}.border{index}" for index in range(len(borders))]
    for name, (strip, _), border in zip(names, b.strips[key], borders, strict=True):
        with b.restrict_node(Ref(strip), name, border):
            lower(b, replace(node, name=name))
    axes, border_ranges = b.get_value(begun).axes, tuple(_compute_range(border, out) for border in borders)
    pieces = [Ref(name) for name in names]
    b.add_local_op(node.name, "tile.completed", begun, pieces, border_ranges, axes, like=node.spec, axes=axes)


def _find_interiors(b: Builder, source: Ref, borrowed: HaloRead, outputs: Mapping[int, Tile]) -> dict[int, Tile]:
    """Return, for each rank with a halo, the outputs that read only the rank's own pixels."""
    size_px, rules, interiors = b.get_value(source).size_px, borrowed.read.rules, {}
    for rank, tile in b.get_tiles(size_px).items():
        if not (compute_window(outputs[rank], rules) & Tile.whole(*size_px)).is_inside(tile):
            interiors[rank] = Tile(*map(compute_interior, outputs[rank], rules, tile, size_px))
    return interiors


def _compute_borders(inner: Tile, out: Tile) -> tuple[Tile, ...]:
    """Return the rest of `out`, axis by axis: first the rows above and below with the corners, then left and right.

    >>> [tile.shape for tile in _compute_borders(Tile(Span(1, 4), Span(0, 3)), Tile(Span(0, 4), Span(0, 4)))]
    [(1, 4), (3, 1)]
    """
    #   +----------------------+
    #   |        above         |
    #   +------+-------+-------+
    #   | left | inner | right |
    #   +------+-------+-------+
    #   |        below         |
    #   +----------------------+
    borders = (
        Tile(*inner[:index], span, *out[index + 1 :])
        for index, (inside, whole) in enumerate(zip(inner, out, strict=True))
        for span in (Span(whole.start, inside.start), Span(inside.stop, whole.stop))
    )
    return tuple(filter(None, borders))


def _start_exchange(
    b: Builder, source: Ref, wanted: Mapping[int, Tile], borrowed: HaloRead, borders: Sequence[Tile]
) -> Exchange | None:
    """Begin the exchange of whole windows, of which this rank builds only the strips that its borders read, if any."""
    target = b.exchange(b.crop_to_own(source), wanted, borrowed.fill)
    # The window itself is never built: its exchange becomes the first half of one that fills the strips.
    if not borders:
        return None
    (exchange,) = select_kind(b.instructions[-1:], Exchange)
    del b.instructions[-1], b.values[target.name]
    strips = tuple(
        (f"{target.name}.strip{index}", compute_window(border, borrowed.read.rules))
        for index, border in enumerate(borders)
    )
    b.instructions.append(exchange.split(strips))
    return exchange.split(strips)


def _compute_range(piece: Tile, out: Tile) -> PixelRange:
    return tuple((slices.start, slices.stop) for slices in piece.to_slices(out))


class _InteriorEmbedding(torch.autograd.Function):
    """(N, C, h, w) interior -> (N, C, h', w') with the interior in its place and zeros around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int], place: PixelRange, axes: Axes) -> Tensor:
        ctx.where = axes, place
        shape = list(x.shape)
        for axis, length in zip(axes, size, strict=True):
            shape[axis] = length
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=choose_memory_format(len(shape)))
        for axis, (start, stop) in zip(axes, place, strict=True):  # for inspection only: borders overwrite the zeros
            whole.narrow(axis, 0, start).zero_()
            whole.narrow(axis, stop, shape[axis] - stop).zero_()
        cut_spans(whole, *ctx.where).copy_(x)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return cut_spans(grad, *ctx.where), None, None, None


class _BorderInsertion(torch.autograd.Function):
    """Inserts the borders around an interior, in the interior's memory."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, places: Sequence[PixelRange], axes: Axes, *borders: Tensor) -> Tensor:
        ctx.axes, ctx.places = axes, places
        # `data` has a version counter of its own, so autograd does not notice the write. That is safe: no operator has
        # read the area around the interior. Compilers track values only, hence the clone.
        whole = begun.clone() if torch.compiler.is_compiling() else begun.data
        for border_range, border in zip(places, borders, strict=True):
            cut_spans(whole, axes, border_range).copy_(border)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.view_as(grad), None, None, *(cut_spans(grad, ctx.axes, border_range) for border_range in ctx.places)


register_kernel("tile.begun")(_InteriorEmbedding.apply)
register_kernel("tile.completed")(
    lambda begun, borders, places, axes: _BorderInsertion.apply(begun, places, axes, *borders)
)
