"""Carries out an exchange between ranks, there and back: a linear map and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.comm.device import memory_format
from engines.comm.world import Message, World
from engines.program.instructions import Exchange
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile

__all__ = ["carry_back", "carry_there"]


def carry_there(
    exchange: Exchange, source: Tensor | None, world: World, device: torch.device
) -> tuple[Tensor | None, int]:
    """This rank's window (None where it wants none) and the bytes that it sent."""
    with torch.no_grad():
        sends = _packed(exchange, source, exchange.own, exchange.sends, lambda move: move.target, exchange.tag)
        window, receives = None, []
        if exchange.window is not None:
            window = _empty(exchange, exchange.window, device)
            receives = _slots(exchange, window, exchange.receives, lambda move: move.source, exchange.tag)
        pending = world.exchange(sends, receives)
        if window is not None:
            _fill_outside(exchange, window)
            if source is not None and (kept := exchange.own & exchange.window):
                _region(exchange, window, kept, exchange.window).copy_(_region(exchange, source, kept, exchange.own))
        pending.wait()
        for move, message in zip(exchange.receives, receives, strict=True):
            _region(exchange, window, move.tile, exchange.window).copy_(message.tensor)
    return window, exchange.bytes_of(exchange.sends)


def carry_back(
    exchange: Exchange,
    grad: Tensor | None,
    source: Tensor | None,
    world: World,
    device: torch.device,
    alone: bool,
) -> int:
    """Gradients of borrowed pixels go home and are added there; the bytes that this rank sent.

    `alone`: nothing else adds to the gradient of `source`, so it may stay a view of the window's.
    """
    with torch.no_grad():
        if exchange.window is not None and grad is None:
            grad = _empty(exchange, exchange.window, device).zero_()
        sends = _packed(exchange, grad, exchange.window, exchange.receives, lambda move: move.source, exchange.tag + 1)
        receives = _slots(exchange, source, exchange.sends, lambda move: move.target, exchange.tag + 1)
        pending = world.exchange(sends, receives)
        if source is not None:
            _start_from_own(exchange, grad, source, alone)
        pending.wait()
        for move, message in zip(exchange.sends, receives, strict=True):
            _region(exchange, source.grad, move.tile, exchange.own).add_(message.tensor)
    return exchange.bytes_of(exchange.receives)


def _start_from_own(exchange: Exchange, grad: Tensor | None, source: Tensor, alone: bool) -> None:
    """Add the gradient of the pixels that never left."""
    kept = exchange.own & exchange.window if grad is not None else None
    if alone and kept == exchange.own:
        source.grad = _region(exchange, grad, kept, exchange.window)
        return
    if source.grad is None:
        source.grad = torch.zeros_like(source)
    if kept:
        _region(exchange, source.grad, kept, exchange.own).add_(_region(exchange, grad, kept, exchange.window))


def _region(exchange: Exchange, tensor: Tensor, tile: Tile, frame: Tile) -> Tensor:
    """The pixels of `tile` in a tensor that holds those of `frame`."""
    if exchange.axes is None:
        return tensor
    rows, cols = tile.within(frame)
    return tensor.narrow(exchange.axes[0], rows.start, rows.stop - rows.start).narrow(
        exchange.axes[1], cols.start, cols.stop - cols.start
    )


def _empty(exchange: Exchange, tile: Tile, device: torch.device) -> Tensor:
    shape = exchange.shape_of(tile)
    layout = memory_format(len(shape))
    return torch.empty(shape, dtype=getattr(torch, exchange.dtype), device=device, memory_format=layout)


def _packed(
    exchange: Exchange, tensor: Tensor | None, frame: Tile | None, going: Sequence[Move],
    peer: Callable[[Move], int], tag: int,
) -> list[Message]:  # fmt: skip
    return [
        Message(peer(move), tag, _region(exchange, tensor.detach(), move.tile, frame).contiguous()) for move in going
    ]


def _slots(
    exchange: Exchange, like: Tensor, coming: Sequence[Move], peer: Callable[[Move], int], tag: int
) -> list[Message]:
    return [Message(peer(move), tag, like.new_empty(exchange.shape_of(move.tile))) for move in coming]


def _fill_outside(exchange: Exchange, window: Tensor) -> None:
    """Write the fill into the window's rows and columns that lie outside the image."""
    if exchange.axes is None:
        return
    for axis, span in zip(exchange.axes, (exchange.window.rows, exchange.window.cols), strict=True):
        outside = -span.start, span.stop - exchange.shape[axis]
        before, after = (min(max(0, width), len(span)) for width in outside)
        if before:
            window.narrow(axis, 0, before).fill_(exchange.fill)
        if after:
            window.narrow(axis, len(span) - after, after).fill_(exchange.fill)
