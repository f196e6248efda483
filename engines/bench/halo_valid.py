"""Check a halo exchange: its window against the whole image, and its backward pass against the adjoint.

Pixels and gradients are integers computed from their coordinates. So any rank can compute any part of the image without
holding it, nothing is rounded, and comparisons are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.comm.device import choose_memory_format
from engines.comm.world import World
from engines.program.exchange_runner import ExchangeRunner
from engines.program.instructions import Exchange
from engines.spatial.tiles import Tile

__all__ = ["is_valid_exchange", "make_pattern"]

_STEPS, _VALUES = (17, 31, 7919, 104_729), 1021  # primes: neighbouring pixels, channels and samples differ


def make_pattern(exchange: Exchange, tile: Tile, device: torch.device, salt: int = 0) -> Tensor:
    """Return the pixels of `tile`, which may exceed the image: (N, C, h, w), integers from -510 to 510."""
    places = [range(exchange.shape[0]), range(exchange.shape[1])]
    places += [range(span.start, span.stop) for span in (tile.rows, tile.cols)]
    # value = (salt * 127 + n * 17 + c * 31 + y * 7919 + x * 104729) mod 1021 - 510, one axis after another by
    # broadcasting. Coordinates beyond the image count on as usual, so that a window has a pattern all around.
    total = torch.tensor(salt * 127)
    for axis, (step, place) in enumerate(zip(_STEPS, places, strict=True)):
        total = total + (torch.tensor(place) * step).view(-1, *(1,) * (3 - axis))
    values = total.remainder_(_VALUES).sub_(_VALUES // 2).to(device, getattr(torch, exchange.dtype))
    return values.contiguous(memory_format=choose_memory_format(4))


def is_valid_exchange(world: World, exchange: Exchange, carrier: ExchangeRunner, device: torch.device) -> bool:
    """Check that every window and gradient is bitwise right, and that <Fx, y> = <x, F*y>; collective."""
    pixels = make_pattern(exchange, exchange.own, device)
    grad = make_pattern(exchange, exchange.window, device, salt=1 + world.rank)
    windows = world.all_gather(exchange.window)
    # Forward F puts the neighbours' borders around a tile, backward F* adds up the gradients of all copies of a pixel:
    #
    #     rank 0    tile  p q r    window  p q r s        gradient of r = that in window 0 + that in window 1
    #     rank 1    tile  s t u    window    r s t u      gradient of s = likewise
    copied = carrier.forward(pixels)[0]
    # Both paths of the forward pass: a tile that is copied into a new window, and one allocated inside its window.
    made_in_place = (
        carrier.forward(carrier.allocate_source().copy_(pixels))[0] if carrier.can_allocate_source else copied
    )
    source = pixels.clone()
    carrier.backward(grad.clone(memory_format=torch.preserve_format), source, alone=True)
    # The window cut out of the whole image, with the fill value around the image.
    inside = exchange.window & Tile.whole(*exchange.shape[-2:])
    expected = make_pattern(exchange, exchange.window, device).fill_(exchange.fill)
    expected[..., *inside.to_slices(exchange.window)] = make_pattern(exchange, inside, device)
    # The gradients of this rank's pixels, summed over all windows that contain them.
    expected_grad = torch.zeros_like(pixels)
    for rank, window in enumerate(windows):
        if seen := window & exchange.own:
            expected_grad[..., *seen.to_slices(exchange.own)] += make_pattern(exchange, seen, device, salt=1 + rank)
    right = (
        torch.equal(copied, expected)
        and torch.equal(made_in_place, expected)
        and torch.equal(source.grad, expected_grad)
    )
    # Forward F and backward F* are adjoint only over all ranks together: a pixel meets the gradients of other ranks.
    reports = world.all_gather((right, _compute_dot(copied, grad), _compute_dot(pixels, source.grad)))
    there, back = (sum(report[side] for report in reports) for side in (1, 2))
    return all(report[0] for report in reports) and there == back


def _compute_dot(one: Tensor, other: Tensor) -> float:
    """Return the dot product. It is exact: the terms are integers, and sums stay below 2 ** 53."""
    return (one.double() * other.double()).sum().item()
