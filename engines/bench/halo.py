"""Milliseconds and bytes of a halo exchange, forward and backward, against a manual one in mpi4py.

The exchange is the one that the compiler makes for a convolution, run by its `ExchangeRunner` as in a training. Each
iteration measures all variants, in a random order, each between two barriers:

- `ms`: the exchange of a tile that was allocated inside its window, as a ReLU before a convolution leaves it (the fill
  around the image is written when that memory is allocated, which is not timed here, nor in the manual exchange);
- `copied_ms`: of a tile that was not, as other operators leave it: all its pixels are copied into a new window;
- `by_hand_ms`: the borders are copied into contiguous buffers, sent by `RawMessages`, and copied (backward: added) to
  their places in fixed memory: no window is allocated, no pixel of the tile itself is moved;
- `messages_ms`: the `RawMessages` alone, with the same bytes to the same peers, corners included.

`ratio` is ms / by_hand_ms, `ratio_copied` copied_ms / by_hand_ms, `ratio_messages_only` ms / messages_ms, each of the
sums over the ranks. `spread` is the interquartile range of `ms`, divided by its median.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.bench.halo_case import HaloCase, HaloSetup, make_halo_setup
from engines.comm.device import choose_memory_format, choose_thread_count, use_threads
from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.exchange_runner import ExchangeRunner
from engines.program.instructions import Exchange
from engines.spatial.tiles import Tile

if TYPE_CHECKING:
    from engines.bench.manual_exchange import ManualExchange
    from engines.comm.mpi import MpiWorld

__all__ = ["bench_halo", "is_valid_exchange", "make_pattern"]

# Check a halo exchange: its window against the whole image, and its backward pass against the adjoint.
#
# Pixels and gradients are integers computed from their coordinates. So any rank can compute any part of the image
# without
# holding it, nothing is rounded, and comparisons are exact.


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


Times = Mapping[str, Sequence[float]]


def bench_halo(
    world: MpiWorld, case: HaloCase, warmup: int, iterations: int, with_compute: bool = False, validate: bool = False
) -> dict[str, object]:
    """Return one line of measurements, the same on every rank. Raises PlanError."""
    from engines.bench.manual_exchange import ManualExchange

    own = make_halo_setup(case, world)
    use_threads(choose_thread_count(case.plan, world.rank))
    checked = {"valid": is_valid_exchange(world, own.exchange, own.carrier, own.device)} if validate else {}
    works = _make_works(own, ManualExchange(world, own.exchange, own.device), with_compute)
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(warmup + iterations):
        for name in random.Random(index).sample(sorted(works), len(works)):  # the predecessor warms the caches
            work = works[name]()
            world.comm.Barrier()
            wait_for_device(own.device)
            start_s = time.perf_counter()
            work()
            wait_for_device(own.device)
            times[name].append(time.perf_counter() - start_s)
            world.comm.Barrier()  # what a finished rank does next must not take cores from the others
    told = {name: seconds[warmup:] for name, seconds in times.items()}
    traffic = own.exchange.compute_bytes(own.exchange.sends), len(own.exchange.sends)
    return {**checked, **_make_line(case, world.all_gather((told, *traffic)))}


def _make_works(
    own: HaloSetup, by_hand: ManualExchange, with_compute: bool
) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the variants by name: each is a function that prepares a run and returns the function to be timed."""
    carrier, exchange = own.carrier, own.exchange
    pixels = make_pattern(exchange, exchange.own, own.device)
    grad = torch.ones_like(carrier.forward(pixels)[0])

    def prepare_forward() -> Callable[[], object]:
        tile = carrier.allocate_source().copy_(pixels)
        return lambda: carrier.forward(tile)

    def prepare_backward() -> Callable[[], object]:
        source = pixels.detach()
        return lambda: carrier.backward(grad, source, alone=True)

    # Each entry is called before a barrier (allocation and copies of the input), and its result after it (the
    # exchange).
    works = {
        "forward.ms": prepare_forward,
        "forward.by_hand_ms": lambda: by_hand.prepare(pixels),
        "forward.messages_ms": lambda: by_hand.messages_there,
        "forward.copied_ms": lambda: lambda: carrier.forward(pixels),
        "backward.ms": prepare_backward,
        "backward.by_hand_ms": lambda: by_hand.backward,
        "backward.messages_ms": lambda: by_hand.messages_back,
    }
    if not with_compute:
        return works
    window = carrier.forward(pixels)[0].requires_grad_()
    made: list[Tensor] = []

    def prepare_conv_forward() -> Callable[[], object]:
        made.clear()
        return lambda: made.extend(own.convolution({exchange.target: window}, seed=0))

    def prepare_conv_backward() -> Callable[[], object]:
        outputs = own.convolution({exchange.target: window}, seed=0)
        grads = [torch.ones_like(output) for output in outputs]
        return lambda: torch.autograd.backward(outputs, grads)

    return works | {
        "forward.convolution_ms": prepare_conv_forward,
        "backward.convolution_ms": prepare_conv_backward,
    }


def _make_line(case: HaloCase, ranks: Sequence[tuple[Times, int, int]]) -> dict[str, object]:
    ways = {way: _make_direction_line(way, [times for times, _, _ in ranks]) for way in ("forward", "backward")}
    # Sums over ranks and directions before the division: a mean of ratios would weigh a small message like a large one.
    both = {key: sum(sum(way[key]) for way in ways.values()) for key in ("ms", "by_hand_ms", "messages_ms")}
    return {
        "ranks": len(ranks),
        "tiles": str(case.plan.grids[0]),
        "image_shape": case.image_shape,
        "halo_px": case.halo_px,
        "dtype": case.plan.precision,
        "bytes": [sent for _, sent, _ in ranks],
        "messages": [count for _, _, count in ranks],
        "ratio": _compute_ratio(both["ms"], both["by_hand_ms"]),
        "ratio_messages_only": _compute_ratio(both["ms"], both["messages_ms"]),
        **ways,
    }


def _make_direction_line(way: str, ranks: Sequence[Times]) -> dict[str, object]:
    """Return the measurements of one direction, each list in rank order."""
    names = [name.split(".")[1] for name in ranks[0] if name.startswith(way)]
    line: dict[str, object] = {
        name: [round(statistics.median(times[f"{way}.{name}"]) * 1e3, 4) for times in ranks] for name in names
    }
    spreads = []
    for times in ranks:
        seconds = times[f"{way}.ms"]
        low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (0.0, 1.0, 0.0)
        spreads.append(round((high - low) / middle, 3))
    line["spread"] = spreads
    total = {name: sum(line[name]) for name in names}
    line["ratio"] = _compute_ratio(total["ms"], total["by_hand_ms"])
    line["ratio_messages_only"] = _compute_ratio(total["ms"], total["messages_ms"])
    if "copied_ms" in total:
        line["ratio_copied"] = _compute_ratio(total["copied_ms"], total["by_hand_ms"])
    return line


def _compute_ratio(ours: float, theirs: float) -> float:
    return round(ours / theirs, 3)
