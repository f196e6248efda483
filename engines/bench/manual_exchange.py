"""A halo exchange written by hand with torch and mpi4py, for one convolution on fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.comm.device import choose_memory_format
from engines.comm.mpi import MpiWorld
from engines.comm.raw_mpi import RawMessages
from engines.comm.world import Message
from engines.program.instructions import Exchange
from engines.spatial.tiles import Move, Tile

__all__ = ["ManualExchange"]

_TAG = 1  # this benchmark runs alone on its communicator


@dataclass(frozen=True, slots=True)
class _StripBuffer:
    """A border and its contiguous host buffer: views made once, before anything is timed."""

    peer: int
    pixels: Tensor
    grad: Tensor
    buffer: Tensor

    @property
    def message(self) -> Message:
        """The message with the buffer as one row of memory."""
        # Channels last: the permuted view is contiguous, and `reshape` copies nothing.
        return Message(self.peer, _TAG, self.buffer.permute(0, 2, 3, 1).reshape(-1))


class ManualExchange:
    """A window and its gradient, allocated once; borders are copied from and to them."""

    def __init__(self, world: MpiWorld, exchange: Exchange, device: torch.device) -> None:
        shape = exchange.compute_shape(exchange.window)
        dtype = getattr(torch, exchange.dtype)
        self.window, self.grad = (
            torch.zeros(shape, dtype=dtype, device=device).to(memory_format=choose_memory_format(len(shape)))
            for _ in range(2)
        )
        self.tile = self._get_view(self.window, exchange, exchange.own)
        # Borders of the own tile are lent to neighbours, those around it are borrowed from them:
        #
        #     borrowed | lent    ...    lent | borrowed
        #              |<---- self.tile ---->|
        #     |<------------ self.window ------------->|
        self.lent = self._make_strips(exchange, exchange.sends, lambda move: move.target)
        self.borrowed = self._make_strips(exchange, exchange.receives, lambda move: move.source)
        lent, borrowed = ([strip.message for strip in strips] for strips in (self.lent, self.borrowed))
        self.messages_there = RawMessages(world, lent, borrowed)
        self.messages_back = RawMessages(world, borrowed, lent)

    @staticmethod
    def _get_view(tensor: Tensor, exchange: Exchange, tile: Tile) -> Tensor:
        return tensor[..., *tile.to_slices(exchange.window)]

    def _make_strips(
        self, exchange: Exchange, moves: Sequence[Move], peer: Callable[[Move], int]
    ) -> list[_StripBuffer]:
        strips = []
        for move in moves:
            pixels, grad = (self._get_view(tensor, exchange, move.tile) for tensor in (self.window, self.grad))
            buffer = torch.empty(pixels.shape, dtype=pixels.dtype, memory_format=torch.channels_last)
            # MPI reads and writes the buffer, which is pinned if a GPU copies to it.
            strips.append(_StripBuffer(peer(move), pixels, grad, buffer.pin_memory() if pixels.is_cuda else buffer))
        return strips

    def prepare(self, pixels: Tensor) -> Callable[[], None]:
        """Copy a fresh tile into the middle of the window; return the function to be timed."""
        self.tile.copy_(pixels)
        return self.forward

    def forward(self) -> None:
        """Send borders to the neighbours and copy theirs into the window."""
        for strip in self.lent:
            strip.buffer.copy_(strip.pixels)
        self.messages_there()
        for strip in self.borrowed:
            strip.pixels.copy_(strip.buffer)

    def backward(self) -> None:
        """Send the gradients of borrowed borders to their owners, which add them."""
        for strip in self.borrowed:
            strip.buffer.copy_(strip.grad)
        self.messages_back()
        for strip in self.lent:
            strip.grad.add_(strip.buffer.to(strip.grad.device))
