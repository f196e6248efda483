"""Halos that travel while a tile's interior is computed: an operator in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.comm.device import memory_format
from engines.layer.graph import Node, Ref
from engines.program.builder import Borrowed, Builder, Value
from engines.program.instructions import Half
from engines.spatial.kernels import local_kernel
from engines.spatial.tiles import Span, Tile
from engines.spatial.windows import interior, window

__all__ = ["in_pieces"]

Lower = Callable[[Builder, Node], None]
Place = tuple[tuple[int, int], tuple[int, int]]
"""(start, stop) of rows and of columns."""


def in_pieces(b: Builder, node: Node, lower: Lower) -> None:
    """Lower the present node anew so that its halo travels meanwhile, if `lower` made it of one window with a halo.

    The rule knows no operator. The outputs that read own pixels alone are one piece, what is left of the tile are up
    to four borders, and for each `lower` makes the operator's kernels as for a tile of that size:

        exchange begins | interior | exchange ends | borders, joined with the interior | the rest of the segment

    What needs sums besides, or several windows, stays as it was; so does what some rank has no interior of, and of
    fused layers the halo that readers of different windows share. Nodes that read in the same way share strips.
    """
    borrowed, value = b.borrowed, b.values.get(node.name)
    if borrowed is None or value is None or value.axes is None or node.spec is None:
        return
    source, rules, outputs = Ref(borrowed.read.value), borrowed.rules, b.outputs(value.size_px)
    wanted = {rank: window(tile, *rules) for rank, tile in outputs.items()}
    inner = _interiors(b, source, borrowed, outputs)
    if tuple(wanted.values()) != borrowed.wanted or not all(inner.values()):
        return
    b.forget()
    key = (source, *rules, tuple(outputs.items()), borrowed.fill)
    first = key not in b.strips
    borders = _around(inner[b.rank], outputs[b.rank]) if b.rank in inner else ()
    if first:
        b.strips[key] = _begin(b, source, wanted, borrowed, borders)
    if not borders:
        with b.piece(source):  # all that this rank reads is its own
            lower(b, node)
        return
    begun = _interior(b, replace(node, name=f"{node.name}.interior"), lower, source, inner[b.rank], outputs[b.rank])
    if first:
        _end(b, b.value(source))
    pieces = [(Ref(strip), border) for (strip, _), border in zip(b.strips[key], borders, strict=True)]
    _complete(b, node, lower, begun, pieces, outputs[b.rank])


def _interiors(b: Builder, source: Ref, borrowed: Borrowed, outputs: Mapping[int, Tile]) -> dict[int, Tile]:
    """Of each rank that borrows, the outputs that read its own pixels alone."""
    value, found = b.value(source), {}
    for rank, own in b.tiles(value.size_px).items():
        if not (window(outputs[rank], *borrowed.rules) & Tile.whole(*value.size_px)).lies_in(own):
            axes = zip(_spans(outputs[rank]), borrowed.rules, _spans(own), value.size_px, strict=True)
            found[rank] = Tile(*(interior(*axis) for axis in axes))
    return found


def _around(inner: Tile, out: Tile) -> tuple[Tile, ...]:
    """What is left of `out`: above and below with the corners, left and right of `inner`.

    >>> [tile.shape for tile in _around(Tile(Span(1, 4), Span(0, 3)), Tile(Span(0, 4), Span(0, 4)))]
    [(1, 4), (3, 1)]
    """
    found = (
        Tile(Span(out.rows.start, inner.rows.start), out.cols),
        Tile(Span(inner.rows.stop, out.rows.stop), out.cols),
        Tile(inner.rows, Span(out.cols.start, inner.cols.start)),
        Tile(inner.rows, Span(inner.cols.stop, out.cols.stop)),
    )
    return tuple(tile for tile in found if tile)


def _begin(
    b: Builder, source: Ref, wanted: Mapping[int, Tile], borrowed: Borrowed, borders: Sequence[Tile]
) -> tuple[tuple[str, Tile], ...]:
    """Post the exchange of whole windows, of which this rank makes the strips that its borders read."""
    target = b.exchange(b.owned(source), wanted, borrowed.fill)
    if not borders:
        return ()
    exchange = b.instructions.pop()
    del b.values[target.name]
    strips = tuple((f"{target.name}.strip{index}", window(each, *borrowed.rules)) for index, each in enumerate(borders))
    b.instructions.append(Half(exchange, strips, begins=True))
    return strips


def _interior(b: Builder, node: Node, lower: Lower, source: Ref, inner: Tile, out: Tile) -> Ref:
    """The interior in memory for all outputs of the tile."""
    with b.piece(source, node.name, inner):
        lower(b, node)
    axes = b.values[node.name].axes
    begun = b.local(
        f"{node.name}.begun", "tile.begun", Ref(node.name), out.shape, _place(inner, out), axes,
        like=node.spec, axes=axes,
    )  # fmt: skip
    return b.hold(b.value(begun), out)


def _end(b: Builder, value: Value) -> None:
    begins = b.instructions[-1]
    b.flush(interior=True)
    b.instructions.append(replace(begins, begins=False))
    for name, tile in begins.strips:
        b.hold(replace(value, name=name), tile)


def _complete(b: Builder, node: Node, lower: Lower, begun: Ref, pieces: Sequence[tuple[Ref, Tile]], out: Tile) -> None:
    made = [f"{node.name}.border{index}" for index in range(len(pieces))]
    for name, (strip, border) in zip(made, pieces, strict=True):
        with b.piece(strip, name, border):
            lower(b, replace(node, name=name))
    axes, places = b.value(begun).axes, tuple(_place(border, out) for _, border in pieces)
    b.local(
        node.name, "tile.completed", begun, [Ref(name) for name in made], places, axes, like=node.spec, axes=axes
    )  # fmt: skip


def _spans(tile: Tile) -> tuple[Span, Span]:
    return tile.rows, tile.cols


def _place(piece: Tile, out: Tile) -> Place:
    return tuple((slices.start, slices.stop) for slices in piece.within(out))


def _at(whole: Tensor, axes: tuple[int, int], place: Place) -> Tensor:
    for axis, (start, stop) in zip(axes, place, strict=True):
        whole = whole.narrow(axis, start, stop - start)
    return whole


class _Begun(torch.autograd.Function):
    """(N, C, h, w) interior -> (N, C, h', w') with the interior at its place, and zeros around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int], place: Place, axes: tuple[int, int]) -> Tensor:
        ctx.where = axes, place
        shape = list(x.shape)
        shape[axes[0]], shape[axes[1]] = size
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(len(shape)))
        for axis, (start, stop) in zip(axes, place, strict=True):  # only for who looks: borders are written over
            whole.narrow(axis, 0, start).zero_()
            whole.narrow(axis, stop, shape[axis] - stop).zero_()
        _at(whole, *ctx.where).copy_(x)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _at(grad, *ctx.where), None, None, None


class _Completed(torch.autograd.Function):
    """The borders put around an interior that was begun, in its memory."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, places: Sequence[Place], axes: tuple[int, int], *borders: Tensor) -> Tensor:
        ctx.axes, ctx.places = axes, places
        # `data` counts its changes apart: nobody has read what was around the interior. Compilers follow values alone.
        whole = begun.clone() if torch.compiler.is_compiling() else begun.data
        for place, border in zip(places, borders, strict=True):
            _at(whole, axes, place).copy_(border)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.view_as(grad), None, None, *(_at(grad, ctx.axes, place) for place in ctx.places)


local_kernel("tile.begun")(_Begun.apply)


@local_kernel("tile.completed")
def _completed(begun: Tensor, borders: Sequence[Tensor], places: Sequence[Place], axes: tuple[int, int]) -> Tensor:
    return _Completed.apply(begun, places, axes, *borders)
