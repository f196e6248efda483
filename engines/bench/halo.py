"""Milliseconds and bytes of a halo exchange, forward and backward, against a manual one in mpi4py.

The exchange is the one that the compiler makes for a convolution, run by its `ExchangeRunner` as in a training. Each
iteration measures all variants:

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

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.bench.measure import compute_quartile_spread, time_shuffled
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.cli.plan_options import parse_value
from mpi4dl_nb.engines.comm.device import choose_device, choose_memory_format, use_threads
from mpi4dl_nb.engines.comm.world import Message, World
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Move, Tile
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.plan.layout import check_fits
from mpi4dl_nb.engines.program.effects import select_kind
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner, make_exchange_runners
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.message_buffers import Index, SendQueue
from mpi4dl_nb.engines.program.segment import Segment
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import choose_thread_count, copy_state_tensor

if TYPE_CHECKING:
    from mpi4dl_nb.engines.comm.mpi import MpiWorld


@dataclass(frozen=True, kw_only=True)
class HaloCase:
    """An image of (N, C, H, W) on the plan's tiles, read by a convolution with a kernel of 2 * `halo_px` + 1."""

    plan: Plan
    image_shape: tuple[int, int, int, int]
    out_channels: int
    halo_px: int
    device: str = "auto"


def make_halo_parser() -> argparse.ArgumentParser:
    """Make a parser of the halo benchmark's flags, with the predecessor's names."""
    flags = options.make_bare_parser(
        "Time a halo exchange, forward and backward, and the same exchange written by hand with mpi4py."
    )
    flags.add_argument("--image-size", default="1024", help="pixels: one number, or HEIGHTxWIDTH")
    flags.add_argument("--num-spatial-parts", type=parse_value, help=f"{OPTIONS['num_spatial_parts'].help} (4)")
    flags.add_argument("--slice-method", type=parse_value, default="square", help=OPTIONS["slice_method"].help)
    counts = {"batch-size": 1, "halo-len": 3, "in-channels": 1, "out-channels": 256, "warmup": 10, "iterations": 100}
    for name, default in counts.items():
        flags.add_argument(f"--{name}", type=options.parse_positive, default=default)
    flags.add_argument("--dtype", "--precision", default="float32", choices=["float32", "float64"])
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    flags.add_argument("--with-compute", action="store_true", help="time the convolution that reads the halo as well")
    flags.add_argument("--validate", action="store_true", help="check windows and gradients, exactly")
    return flags


def make_halo_case(chosen: argparse.Namespace) -> HaloCase:
    """Make the case that the flags describe. Raises PlanError."""
    return HaloCase(
        plan=Plan(
            split_size=1,
            precision=chosen.dtype,
            num_spatial_parts=chosen.num_spatial_parts,
            slice_method=chosen.slice_method,
        ),
        image_shape=(chosen.batch_size, chosen.in_channels, *options.parse_image_size(chosen.image_size)),
        out_channels=chosen.out_channels,
        halo_px=chosen.halo_len,
        device=chosen.device,
    )


def make_halo_runner(case: HaloCase, world: World) -> tuple[ExchangeRunner, Segment]:
    """Return this rank's exchange, and the convolution (with its weights) that reads the window, as compiled.

    Raises PlanError if there is nothing to exchange, or if ranks and tiles differ in number.
    """
    check_fits(case.plan, world.size)
    if world.size == 1:
        raise PlanError("One tile has no neighbour to borrow from. Use num_spatial_parts=2 or more.")
    height_px, width_px = case.image_shape[2:]
    if case.halo_px > min(height_px, width_px):
        raise PlanError(
            f"A halo of {case.halo_px} pixels is wider than the image of {height_px}x{width_px}. "
            f"Use --halo-len {min(height_px, width_px)} or less, or a larger --image-size."
        )
    model = nn.Conv2d(case.image_shape[1], case.out_channels, 2 * case.halo_px + 1, padding=case.halo_px)
    recipe = prepare(model, case.plan, case.image_shape)
    # The window's gradient is needed for the way back, although no weight lies before the image: `input_gradient`.
    #
    #     image tile --exchange--> window --conv2d--> output
    #                <--adjoint---        <--backward--
    forward = Compiler(recipe.graph, case.plan, input_gradient=True).compile_rank(world.rank).forward
    (exchange,) = select_kind(forward, Exchange)
    (op,) = (op for item in forward for op in item.local_ops if "conv2d" in op.kernel)
    device, specs = choose_device(case.device, world.rank), recipe.graph.specs
    weights = {
        name: copy_state_tensor(tensor, specs[name], device).requires_grad_() for name, tensor in recipe.state.items()
    }
    convolution = Segment(Compute("convolution", (op,), (exchange.target,), (op.out,), True), weights)
    return make_exchange_runners([exchange], world, device, SendQueue())[exchange.name], convolution


def run_forward(runner: ExchangeRunner, source: Tensor | None) -> Tensor:
    """Run a whole exchange, and return this rank's window."""
    started, _sent = runner.start_forward(source)
    (window,) = runner.wait_forward(started)
    return window


def run_backward(runner: ExchangeRunner, grad: Tensor | None, source: Tensor | None) -> None:
    """Run the whole backward pass, from the window's gradient to that of `source`, to which nothing else is added."""
    started, _sent = runner.start_backward([grad] if runner.exchange.parts else [], source)
    runner.wait_backward(started, source, alone=True)


# Check a halo exchange: its window against the whole image, and its backward pass against the adjoint.
#
# Pixels and gradients are integers computed from their coordinates. So any rank can compute any part of the image
# without holding it, nothing is rounded, and comparisons are exact.

_STEPS, _VALUES = (17, 31, 7919, 104_729), 1021  # primes: neighbouring pixels, channels and samples differ


def make_pattern(exchange: Exchange, tile: Tile, device: torch.device, salt: int = 0) -> Tensor:
    """Return the pixels of `tile`, which may exceed the image: (N, C, h, w), integers from -510 to 510."""
    ranges = [range(exchange.shape[0]), range(exchange.shape[1])]
    ranges += [range(span.start, span.stop) for span in (tile.rows, tile.cols)]
    # value = (salt * 127 + n * 17 + c * 31 + y * 7919 + x * 104729) mod 1021 - 510, one axis after another by
    # broadcasting. Coordinates beyond the image count on as usual, so that a window has a pattern all around.
    total = torch.tensor(salt * 127)
    for axis, (step, coordinates) in enumerate(zip(_STEPS, ranges, strict=True)):
        total = total + (torch.tensor(coordinates) * step).view(-1, *(1,) * (3 - axis))
    values = total.remainder_(_VALUES).sub_(_VALUES // 2).to(device, getattr(torch, exchange.dtype))
    return values.contiguous(memory_format=choose_memory_format(4))


def _make_place(tile: Tile, frame: Tile) -> Index:
    """Return the index of a tile's pixels in a tensor of those of `frame`."""
    return (..., *tile.to_slices(frame))


def is_valid_exchange(world: World, runner: ExchangeRunner) -> bool:
    """Check that every window and gradient is bitwise right, and that <Fx, y> = <x, F*y>; collective."""
    exchange, device = runner.exchange, runner.device
    own_tile, frame = exchange.own_tile, exchange.window_tile
    pixels = make_pattern(exchange, own_tile, device)
    grad = make_pattern(exchange, frame, device, salt=1 + world.rank)
    windows = world.all_gather(frame)
    # Forward F puts the neighbours' borders around a tile, backward F* adds up the gradients of all copies of a pixel:
    #
    #     rank 0    tile  p q r    window  p q r s        gradient of r = that in window 0 + that in window 1
    #     rank 1    tile  s t u    window    r s t u      gradient of s = likewise
    copied = run_forward(runner, pixels)
    # Both paths of the forward pass: a tile that is copied into a new window, and one allocated inside its window.
    made_in_place = run_forward(runner, runner.allocate_source().copy_(pixels)) if runner.exchange.keeps_all else copied
    source = pixels.clone()
    run_backward(runner, grad.clone(memory_format=torch.preserve_format), source)
    # The window cut out of the whole image, with the fill value around the image.
    inside = frame & Tile.whole(*(exchange.shape[axis] for axis in exchange.axes))
    expected = make_pattern(exchange, frame, device).fill_(exchange.fill)
    expected[_make_place(inside, frame)] = make_pattern(exchange, inside, device)
    # The gradients of this rank's pixels, summed over all windows that contain them.
    expected_grad = torch.zeros_like(pixels)
    for rank, window in enumerate(windows):
        if seen := window & own_tile:
            expected_grad[_make_place(seen, own_tile)] += make_pattern(exchange, seen, device, salt=1 + rank)
    source_grad = torch.zeros_like(source) if source.grad is None else source.grad
    right = (
        torch.equal(copied, expected)
        and torch.equal(made_in_place, expected)
        and torch.equal(source_grad, expected_grad)
    )

    def compute_dot(one: Tensor, other: Tensor) -> float:
        # Exact: the terms are integers, and sums stay below 2 ** 53.
        return (one.double() * other.double()).sum().item()

    # Forward F and backward F* are adjoint only over all ranks together: a pixel meets the gradients of other ranks.
    reports = world.all_gather((right, compute_dot(copied, grad), compute_dot(pixels, source_grad)))
    there, back = (sum(report[side] for report in reports) for side in (1, 2))
    return all(report[0] for report in reports) and there == back


# The same exchange by hand.

_TAG = 1  # this benchmark runs alone on its communicator


@dataclass(frozen=True, slots=True)
class _StripBuffer:
    """A border of the window and of its gradient, and its contiguous host buffer: made before anything is timed."""

    pixels: Tensor
    grad: Tensor
    buffer: Tensor


class ManualExchange:
    """A halo exchange written by hand with torch and mpi4py: a window and its gradient, allocated once."""

    def __init__(self, world: MpiWorld, exchange: Exchange, device: torch.device) -> None:
        from mpi4dl_nb.engines.comm.raw_mpi import RawMessages  # mpi4py starts MPI when it is imported

        frame = exchange.window_tile
        shape = exchange.compute_shape(frame)
        dtype = getattr(torch, exchange.dtype)
        self.window, self.grad = (
            torch.zeros(shape, dtype=dtype, device=device).to(memory_format=choose_memory_format(len(shape)))
            for _ in range(2)
        )
        self.tile = self.window[_make_place(exchange.own_tile, frame)]

        def make_strip(move: Move) -> _StripBuffer:
            index = _make_place(move.tile, frame)
            pixels, grad = self.window[index], self.grad[index]
            buffer = torch.empty(pixels.shape, dtype=dtype, memory_format=torch.channels_last)
            # MPI reads and writes the buffer, which is pinned if a GPU copies to it.
            return _StripBuffer(pixels, grad, buffer.pin_memory() if pixels.is_cuda else buffer)

        def make_message(peer: int, strip: _StripBuffer) -> Message:
            # Channels last: the permuted view is contiguous, and `reshape` copies nothing.
            return Message(peer, _TAG, strip.buffer.permute(0, 2, 3, 1).reshape(-1))

        # Borders of the own tile are lent to neighbours, those around it are borrowed from them:
        #
        #     borrowed | lent    ...    lent | borrowed
        #              |<---- self.tile ---->|
        #     |<------------ self.window ------------->|
        self.lent = [make_strip(move) for move in exchange.sends]
        self.borrowed = [make_strip(move) for move in exchange.receives]
        lent = [make_message(move.target, strip) for move, strip in zip(exchange.sends, self.lent, strict=True)]
        borrowed = [
            make_message(move.source, strip) for move, strip in zip(exchange.receives, self.borrowed, strict=True)
        ]
        self.messages_there = RawMessages(world, lent, borrowed)
        self.messages_back = RawMessages(world, borrowed, lent)

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


# Time both.


def bench_halo(
    world: MpiWorld, case: HaloCase, warmup: int, iterations: int, with_compute: bool = False, validate: bool = False
) -> dict[str, object]:
    """Return one line of measurements, the same on every rank. Raises PlanError."""
    runner, convolution = make_halo_runner(case, world)
    exchange = runner.exchange
    use_threads(choose_thread_count(case.plan, world.rank))
    checked = {"valid": is_valid_exchange(world, runner)} if validate else {}
    works = _make_works(runner, ManualExchange(world, exchange, runner.device), convolution if with_compute else None)
    times = time_shuffled(world, works, iterations, warmup, runner.device)
    gathered = world.all_gather((times, exchange.compute_bytes(exchange.sends), len(exchange.sends)))
    ranks, sent, messages = zip(*gathered, strict=True)
    ways: dict[str, dict[str, object]] = {}
    totals: dict[str, dict[str, float]] = {}
    for way in ("forward", "backward"):  # each list in rank order
        names = [name.partition(".")[2] for name in works if name.startswith(way)]
        ms = {name: [round(statistics.median(rank[f"{way}.{name}"]) * 1e3, 4) for rank in ranks] for name in names}
        total = totals[way] = {name: sum(ms[name]) for name in names}
        ways[way] = {
            **ms,
            "spread": [compute_quartile_spread(rank[f"{way}.ms"]) for rank in ranks],
            "ratio": round(total["ms"] / total["by_hand_ms"], 3),
            "ratio_messages_only": round(total["ms"] / total["messages_ms"], 3),
        }
        if "copied_ms" in total:
            ways[way]["ratio_copied"] = round(total["copied_ms"] / total["by_hand_ms"], 3)
    # Sums over ranks and directions before the division: a mean of ratios would weigh a small message like a large one.
    both = {key: sum(total[key] for total in totals.values()) for key in ("ms", "by_hand_ms", "messages_ms")}
    return {
        **checked,
        "ranks": world.size,
        "tiles": str(case.plan.grids[0]),
        "image_shape": case.image_shape,
        "halo_px": case.halo_px,
        "dtype": case.plan.precision,
        "bytes": sent,
        "messages": messages,
        "ratio": round(both["ms"] / both["by_hand_ms"], 3),
        "ratio_messages_only": round(both["ms"] / both["messages_ms"], 3),
        **ways,
    }


def _make_works(
    runner: ExchangeRunner, by_hand: ManualExchange, convolution: Segment | None
) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the variants by name: each prepares a run and returns the function to be timed (see `time_shuffled`)."""
    pixels = make_pattern(runner.exchange, runner.exchange.own_tile, runner.device)
    grad = torch.ones_like(run_forward(runner, pixels))

    def prepare_forward() -> Callable[[], object]:
        tile = runner.allocate_source().copy_(pixels)
        return lambda: run_forward(runner, tile)

    def prepare_backward() -> Callable[[], object]:
        source = pixels.detach()
        return lambda: run_backward(runner, grad, source)

    works: dict[str, Callable[[], Callable[[], object]]] = {
        "forward.ms": prepare_forward,
        "forward.by_hand_ms": lambda: by_hand.prepare(pixels),
        "forward.messages_ms": lambda: by_hand.messages_there,
        "forward.copied_ms": lambda: lambda: run_forward(runner, pixels),
        "backward.ms": prepare_backward,
        "backward.by_hand_ms": lambda: by_hand.backward,
        "backward.messages_ms": lambda: by_hand.messages_back,
    }
    if convolution is None:
        return works
    window = {runner.exchange.target: run_forward(runner, pixels).requires_grad_()}
    activations: list[Tensor] = []

    def prepare_conv_forward() -> Callable[[], object]:
        activations.clear()
        return lambda: activations.extend(convolution(window, seed=0))

    def prepare_conv_backward() -> Callable[[], object]:
        outputs = convolution(window, seed=0)
        grads = [torch.ones_like(output) for output in outputs]
        return lambda: torch.autograd.backward(outputs, grads)

    return works | {"forward.convolution_ms": prepare_conv_forward, "backward.convolution_ms": prepare_conv_backward}


def run_bench_halo(world: MpiWorld, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench halo`."""
    chosen = make_halo_parser().parse_args(arguments)
    case = make_halo_case(chosen)
    return bench_halo(world, case, chosen.warmup, chosen.iterations, chosen.with_compute, chosen.validate)
