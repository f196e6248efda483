"""Times kernels in the order of training: all forward, layer by layer, then all backward, with all results kept.

Each kernel thus meets caches and memory in the same state as in a layer: in forward its input was just written and its
weights are cold; in backward its gradient was just written and the saved tensors are cold. If timed repeatedly in
isolation, a small convolution takes two thirds of that time, and a large value, allocated in memory that was freed
before, up to eight times as long.
The clock counts the CPU time of this thread, since on a machine with other programs the wall clock would include those.
The result is the median of several runs.
"""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mpi4dl_nb.engines.comm.device import choose_memory_format
from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.predict.cost import count_work
from mpi4dl_nb.engines.predict.kernel_effects import LocalTensor
from mpi4dl_nb.engines.predict.machine import Speed
from mpi4dl_nb.engines.predict.rank_tally import build_op_tally
from mpi4dl_nb.engines.predict.tallies import BY_ARITHMETIC, OpTally, classify_kernel
from mpi4dl_nb.engines.program.kernels import get_kernel
from mpi4dl_nb.engines.program.ring import ScoreRule, place_alone

# The kernels that a calibration times: those of the layers of common networks, in tiles and whole.


KernelCall = tuple[str, tuple[Any, ...]]
"""A kernel's name and its arguments."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The channels of a layer's values, and their pixels along a side."""

    channels: int
    side_px: int


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution over `images` images of `side_px` pixels along each of `axes`; `groups`, `bias` as in PyTorch."""

    read: int
    made: int
    kernel_px: int
    side_px: int
    groups: int = 1
    images: int = 1
    bias: bool = False
    axes: int = 2

    @property
    def operations(self) -> int:
        """The multiplications and additions of a forward pass."""
        reads = (self.side_px * self.kernel_px) ** self.axes
        return 2 * self.images * self.made * self.read // self.groups * reads

    def make_call(self) -> KernelCall:
        """Return the call, with tensors of its own."""
        x = _make_values(self.images, self.read, *[self.side_px] * self.axes)
        weight = _make_values(self.made, self.read // self.groups, *[self.kernel_px] * self.axes)
        bias = torch.zeros(self.made, requires_grad=True) if self.bias else None
        stride, pad = [1] * self.axes, [self.kernel_px // 2] * self.axes
        return f"aten.conv{self.axes}d.default", (x, weight, bias, stride, pad, stride, self.groups)


_THREE_BY_THREE = {
    16: ((16, 4), (96, 1), (128, 2), (128, 4), (256, 1)),
    32: ((8, 4), (64, 1), (64, 2), (64, 4), (192, 1)),
    64: ((4, 4), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (128, 1)),
    128: ((4, 4), (8, 1), (16, 2), (16, 4), (28, 1), (32, 4), (64, 1)),
    256: ((2, 4), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4), (32, 1)),
    512: ((2, 4), (4, 1), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4)),
}  # (pixels along a side, images) by width

_VOLUMES = {
    8: ((32, 1), (48, 1), (16, 4), (32, 4)),
    16: ((12, 1), (24, 1), (12, 4), (24, 4)),
    32: ((6, 1), (12, 1), (6, 4), (12, 4)),
    64: ((6, 1), (6, 4)),
}  # (voxels along a side, volumes) by width

_CONVOLUTIONS = (
    *(ConvolutionSpec(3, 16, 3, 128, images=n) for n in (1, 4)),
    *(ConvolutionSpec(3, 64, 7, px, images=n) for px, n in ((64, 1), (64, 4), (160, 1), (128, 4))),
    *(ConvolutionSpec(width, width, 3, px, images=n) for width, sizes in _THREE_BY_THREE.items() for px, n in sizes),
    *(ConvolutionSpec(read, made, 1, 64) for read, made in ((16, 64), (64, 16))),
    *(ConvolutionSpec(64, 256, 1, px, images=n) for px, n in ((7, 4), (56, 1))),
    *(ConvolutionSpec(256, 64, 1, px) for px in (14, 56)),
    *(ConvolutionSpec(read, made, 1, 14) for read, made in ((512, 128), (128, 512))),
    *(ConvolutionSpec(width, width, 3, px, groups=width) for width, px in ((32, 64), (256, 16))),
    *(ConvolutionSpec(read, made, 1, px, bias=True) for read, made, px in ((16, 3, 64), (16, 3, 256), (64, 4, 64))),
    *(ConvolutionSpec(width, width, 3, px, images=n, axes=3) for width, sizes in _VOLUMES.items() for px, n in sizes),
    *(ConvolutionSpec(read, 8, 3, 32, images=n, axes=3) for read in (1, 24) for n in (1, 4)),
    *(ConvolutionSpec(8, 3, 1, 32, images=n, axes=3) for n in (1, 4)),
)
"""Convolutions from the first to the last layers of networks, in tiles and whole, of one and of several images.

PyTorch uses another algorithm for a small single image, which can be three times as fast, and splits several images
over cores more evenly. A bias makes forward of a 1x1 kernel up to twice as slow. The last entries are of volumes."""


_ATTENTIONS = tuple((channels, *tokens) for channels in (8, 16, 32, 64) for tokens in ((256, 1024), (2048, 2048)))
"""(channels, queries, keys) of attention with two heads."""
_DROPPED = (*((channels, 256, 1024) for channels in (8, 32, 64)), (32, 2048, 2048))
"""Fewer of attention with dropout, which takes three times as long, mostly for a number for each query and key."""


def make_calls(sizes: Sequence[LayerSize], most_operations: float = math.inf) -> list[KernelCall]:
    """Return the calls of all kernel classes at these layer sizes, all convolutions, and attention.

    Convolutions of several images are included only up to `most_operations`.
    """
    calls = [call for size in sizes for call in _make_size_calls(size)]
    calls += [spec.make_call() for spec in _CONVOLUTIONS if spec.images == 1 or spec.operations <= most_operations]
    # By PyTorch's kernel, and in chunks of scores: in an order, and with dropout.
    calls += [("aten.scaled_dot_product_attention.default", _make_attention(*size)) for size in _ATTENTIONS]
    rules = [(size, ScoreRule(1.0, causal=True)) for size in _ATTENTIONS]
    rules += [(size, ScoreRule(1.0, dropout=0.1)) for size in _DROPPED]
    calls += [
        ("tile.attention", (*_make_attention(*size), None, 0, rule, *place_alone(2, size[1]))) for size, rule in rules
    ]
    return calls


def _make_attention(channels: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values of two heads, row by row in memory, unlike images."""
    return tuple(torch.full((1, 2, tokens, channels), 0.5).requires_grad_() for tokens in (queries, keys, keys))


def _make_size_calls(size: LayerSize) -> Iterator[KernelCall]:
    """Yield the kernel calls of a network's layer of that size, except plain convolutions."""
    channels, side = size.channels, size.side_px
    x = _make_values(1, channels, side, side)
    gain, offset = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    # A tile's moments come from an all-reduce: for the norm they are a leaf, and receive a gradient of their own.
    moments = get_kernel("tile.moments")(x, 0, 1).detach().requires_grad_()
    yield "tile.moments", (x, 0, 4)
    yield "tile.batch_norm", (x, moments, gain, offset, [side * side], 1e-5)
    yield "tile.whole_batch_norm", (x, gain, offset, 1e-5)
    yield "aten.relu.default", (x,)
    place = tuple((size, 0, size) for size in x.shape)
    yield "tile.dropout", (x, 0, 0, place, x.device, 0.1, False)
    yield "aten.max_pool2d.default", (x, [2, 2], [2, 2])
    yield "aten.cat.default", ([x, _make_values(1, channels, side, side)], 1)
    # A pad at the border of the image, and a crop on one side with a pad on the other.
    yield "tile.pad", (x, ((1, 1), (1, 1)), 0.0)
    yield "tile.pad", (x, ((-1, 1), (-1, 1)), 0.0)
    # A transposed convolution that doubles the pixels along each side, of two images: see `_CONVOLUTIONS`.
    weight = _make_values(channels, max(1, channels // 2), 2, 2)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    images = _make_values(2, channels, side, side)
    yield "tile.conv_transpose", (images, weight, bias, [2, 2], [0, 0], [0, 0], 1, [1, 1], ((0, 0), (0, 0)))
    # A loss for each pixel, as of a segmentation into four classes.
    few = _make_values(1, 4, side, side)
    labels = torch.zeros(1, side, side, dtype=torch.int64)
    yield "tile.cross_entropy_sums", (few, labels, None, -100, 0.0)
    yield "aten.gelu.default", (x,)
    # Of both signs in no order: for values of one sign, a processor's branch prediction makes it five times as fast.
    signed = _make_values(1, channels, side, side)
    signed.data.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    yield "aten.prelu.default", (signed, torch.full((1,), 0.25, requires_grad=True))
    yield "aten.linear.default", (_make_values(16, channels * 4), _make_values(channels, channels * 4))


def _make_values(*shape: int) -> Tensor:
    return torch.empty(shape, memory_format=choose_memory_format(len(shape))).fill_(0.5).requires_grad_()


@dataclass
class KernelTimes:
    """The seconds of each run of one kernel call.

    `inputs` and `weights`: the times of backward for the gradients of the inputs and of the weights separately, if
    measured.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def forward_s(self) -> float:
        return statistics.median(self.forward)

    @property
    def back_s(self) -> float:
        return statistics.median(self.backward)


class KernelTimer:
    """Times calls of kernels round by round, with one thread or as many as are set.

    `timed` are the times so far. The default clock counts the CPU time of the calling thread only. The first calls, the
    fraction `late` of all, are timed last. `separate`: the gradients of inputs and of weights are also timed
    separately.
    """

    def __init__(
        self, calls: list[KernelCall], late: float = 0.0, clock: Clock = time.thread_time, separate: bool = False
    ) -> None:
        self.timed = [KernelTimes() for _ in calls]
        self._clock, self._separate = clock, separate
        # Ranks that time the same kernels at once begin at different ones, like ranks at different layers of a network.
        both, middle = list(zip(calls, self.timed, strict=True)), int(late * len(calls))
        self._order = [*both[middle:], *both[:middle]]

    def run_round(self) -> None:
        """Time each call once more, and append to `timed`."""
        # As in training: all forward, all backward in reverse, and then separate gradients, if they are wanted.
        layers = []
        for (name, arguments), timed in self._order:
            leaves = [item for item in tree_leaves(arguments) if isinstance(item, Tensor) and item.requires_grad]
            _report_working()
            leaves[0].detach().sum()  # the input was just written by the layer before, so that it is in the cache
            start_s = self._clock()
            outputs = get_kernel(name)(*arguments)
            timed.forward.append(self._clock() - start_s)
            layers.append((name, timed, leaves, outputs[0] if isinstance(outputs, tuple) else outputs))
        layers.reverse()
        # The graphs are kept for the parts that follow, and freed with `layers` at the end of the round.
        for _, timed, leaves, result in layers:
            timed.backward.append(self._time_backward(leaves, result))
        if self._separate:
            layers = [layer for layer in layers if classify_kernel(layer[0]) in BY_ARITHMETIC]
            for _, timed, leaves, result in layers:
                timed.inputs.append(self._time_backward(leaves[:1], result))
            for _, timed, leaves, result in layers:
                timed.weights.append(self._time_backward(leaves[1:], result))

    def _time_backward(self, leaves: Sequence[Tensor], result: Tensor) -> float:
        """Return the seconds until the leaves have their gradients."""
        _report_working()
        # The gradient was just written by the next layer, so that it is in the cache.
        grad = torch.ones_like(result)
        start_s = self._clock()
        grads = torch.autograd.grad(result, leaves, grad, retain_graph=True)
        for part in grads:
            if part.untyped_storage().nbytes() > part.nbytes:
                part.clone()  # as the next reader of the gradient has to
        return self._clock() - start_s


def _report_working() -> None:
    """Report progress, so that ranks that wait for this one are not taken to hang."""
    get_status_board().report(b"measures how fast it computes")


def build_op_tallies(calls: Sequence[KernelCall]) -> list[OpTally]:
    return [build_op_tally(name, tree_map_only(Tensor, LocalTensor.describe, arguments)) for name, arguments in calls]


def compute_speeds(
    ops: Sequence[OpTally],
    alone: Sequence[KernelTimes],
    spread: Sequence[KernelTimes],
    crowded: Sequence[Sequence[KernelTimes]],
    call_s: float,
    back_call_s: float,
    cores: int,
) -> dict[str, tuple[Speed, ...]]:
    """Return the speeds of the calls `ops` by kernel class, without the overhead of a call.

    Rank 0 timed the calls alone on one core (`alone`) and on all cores (`spread`); `crowded` are the times of all ranks
    at once. If there are fewer ranks than cores, the slowdown is extrapolated to all cores: each neighbour counts the
    same.
    """
    speeds: dict[str, list[Speed]] = defaultdict(list)
    # Each rank had len(crowded) - 1 neighbours. With all cores busy it would have cores - 1: `more` times as many.
    more = max(1.0, (cores - 1) / max(1, len(crowded) - 1))
    for op, single, shared, *others in zip(ops, alone, spread, *crowded, strict=True):
        amount, at = count_work(op)
        back_amount = amount * (2 if op.kind in BY_ARITHMETIC else 1)  # gradients of the inputs, and of the weights
        own_s, own_back_s = _subtract_overhead(single.forward_s, call_s), _subtract_overhead(single.back_s, back_call_s)
        shared_s = _subtract_overhead(shared.forward_s, call_s) + _subtract_overhead(shared.back_s, back_call_s)
        slower = [(other.forward_s + other.back_s) / (single.forward_s + single.back_s) for other in others]
        speed = Speed(
            tuple(map(float, at)),
            amount / own_s,
            back_amount / own_back_s,
            crowded=1 + more * (max(1.0, statistics.median(slower)) - 1) if slower else 1.0,
            spread=shared_s / (own_s + own_back_s),
            inputs=_compute_part(single.inputs, own_back_s, back_call_s),
            weights=_compute_part(single.weights, own_back_s, back_call_s),
        )
        speeds[op.kind].append(speed)
    return {kind: tuple(samples) for kind, samples in speeds.items()}


def measure_median_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Return the median CPU time in seconds of some runs of `work`."""
    return statistics.median(measure_seconds(work, times, time.thread_time))


def measure_seconds(work: Callable[[], object], times: int, clock: Clock) -> list[float]:
    """Return the seconds of each run of `work`, after one warm-up run that does not count."""
    work()
    return timeit.repeat(work, timer=clock, repeat=times, number=1)


def _compute_part(seconds: Sequence[float], whole_s: float, call_s: float) -> float:
    return _subtract_overhead(statistics.median(seconds), call_s) / whole_s if seconds else 0.5


def _subtract_overhead(seconds: float, overhead_s: float) -> float:
    """Return the seconds without the overhead, but at least a tenth of the measured time."""
    return max(0.1 * seconds, seconds - overhead_s)
