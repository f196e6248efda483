"""Kernels timed as training runs them: one behind the other as layers are, forward and then back, all results kept.

So each meets the caches and the memory as a layer does: going forward its input has just been made, and its weights lay
idle; going back its gradient has just come, and what was kept lay idle. Timed again and again by itself, a small
convolution takes two thirds of that, and a large value is made ten times as slowly, in memory that was given back.
What is counted is the processor's time of this thread: on a machine where other programs run too, the clock on the wall
would time them as well. Of several runs it is the median.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import engines.spatial.entries.reduction  # noqa: F401  (gives the kernels of losses their names)
from engines.comm.device import memory_format
from engines.layer.graph import TensorSpec
from engines.predict.classes import BY_ARITHMETIC
from engines.predict.cost import amount_of
from engines.predict.effects import Local
from engines.predict.machine import Speed
from engines.predict.segments import counted
from engines.predict.tallies import OpTally
from engines.spatial.kernels import kernel
from engines.whereabouts import here

__all__ = ["Size", "Timed", "chain_seconds", "each_seconds", "median_seconds", "speeds", "timed"]

_TURNS, _WARM_TURNS = 9, 4  # at moments seconds apart: a shared machine is now faster, now slower
_Call = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Size:
    """Channels, and pixels along a side, of the values of a chain."""

    channels: int
    side_px: int


@dataclass(frozen=True, slots=True)
class Filters:
    """A convolution over so many images, of as many pixels along a side; `groups` and `bias` as in PyTorch."""

    read: int
    made: int
    kernel_px: int
    side_px: int
    groups: int = 1
    images: int = 1
    bias: bool = False


_THREE_BY_THREE = {
    16: ((16, 4), (96, 1), (128, 2), (128, 4), (256, 1)),
    32: ((8, 4), (64, 1), (64, 2), (64, 4), (192, 1)),
    64: ((4, 4), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (128, 1)),
    128: ((4, 4), (8, 1), (16, 2), (16, 4), (28, 1), (32, 4), (64, 1)),
    256: ((2, 4), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4), (32, 1)),
    512: ((2, 4), (4, 1), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4)),
}  # pixels along a side, and images, by width

CONVOLUTIONS = (
    Filters(3, 16, 3, 128), Filters(3, 16, 3, 128, images=4), Filters(3, 64, 7, 64), Filters(3, 64, 7, 64, images=4),
    Filters(3, 64, 7, 160), Filters(3, 64, 7, 128, images=4),
    *(Filters(width, width, 3, px, images=n) for width, sizes in _THREE_BY_THREE.items() for px, n in sizes),
    Filters(16, 64, 1, 64), Filters(64, 16, 1, 64), Filters(64, 256, 1, 7, images=4), Filters(64, 256, 1, 56),
    Filters(256, 64, 1, 14), Filters(256, 64, 1, 56), Filters(512, 128, 1, 14), Filters(128, 512, 1, 14),
    Filters(32, 32, 3, 64, 32), Filters(256, 256, 3, 16, 256),
    Filters(16, 3, 1, 64, bias=True), Filters(16, 3, 1, 256, bias=True), Filters(64, 4, 1, 64, bias=True),
)  # fmt: skip
"""From the first layers of a network to its last ones, in tiles and whole, of one image and of several.

PyTorch computes a small image that is alone in another way, which can be three times as fast, and shares several out
among cores more evenly. The last ones have a bias, which makes forward up to twice as long.
"""


@dataclass
class Timed:
    """One kernel call of a chain, and the seconds that it took, each time.

    `inputs` and `weights`: those of backward whose gradients were computed apart, where they were.
    """

    op: OpTally
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


def timed(sizes: tuple[Size, ...], late: float = 0.0, clock: Callable[[], float] = time.thread_time) -> list[Timed]:
    """Samples of all classes, of one thread or as many as are set; the first ones, this share of all, come last.

    By the clock of one thread, which knows nothing of others that work for it, or another one.
    """
    calls = [*(call for size in sizes for call in _calls(size)), *map(_convolution, CONVOLUTIONS)]
    samples = [_Sample(call, clock) for call in calls]
    middle = int(late * len(samples))
    _run([*samples[middle:], *samples[:middle]], _TURNS)
    return [each.timed for each in samples]


def speeds(
    alone: Sequence[Timed],
    spread: Sequence[Timed],
    crowded: Sequence[Sequence[Timed]],
    call_s: float,
    back_call_s: float,
    cores: int,
) -> dict[str, tuple[Speed, ...]]:
    """The speeds of the samples that one rank timed alone, on one core and on all, and then all ranks at once.

    Without what calls take. Fewer ranks than cores crowd each other less than as many would: a neighbour counts as
    much as any other.
    """
    found: dict[str, list[Speed]] = defaultdict(list)
    more = max(1.0, (cores - 1) / max(1, len(crowded) - 1))
    for sample, shared, *others in zip(alone, spread, *crowded, strict=True):
        found[sample.op.kind].append(_speed(sample, shared, others, call_s, back_call_s, more))
    return {kind: tuple(samples) for kind, samples in found.items()}


def chain_seconds(size: Size) -> float:
    """Of a kernel of a chain, forward or back: the mean, by the clock on the wall."""
    calls = [*_calls(size), _convolution(Filters(size.channels, size.channels, 3, size.side_px))]
    samples = [_Sample(call, time.perf_counter) for call in calls]
    _run(samples, _WARM_TURNS)
    return statistics.fmean(seconds for each in samples for seconds in (each.timed.forward_s, each.timed.back_s))


def median_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Of some runs."""
    return statistics.median(each_seconds(work, times, time.thread_time))


def each_seconds(work: Callable[[], object], times: int, clock: Callable[[], float]) -> list[float]:
    """Of each run, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        start_s = clock()
        work()
        found.append(clock() - start_s)
    return found


def _speed(
    alone: Timed, spread: Timed, crowded: Sequence[Timed], call_s: float, back_call_s: float, more: float
) -> Speed:
    amount, at = amount_of(alone.op)
    back_amount = amount * (2 if alone.op.kind in BY_ARITHMETIC else 1)  # the gradients of values, and of weights
    own_s, own_back_s = _without(alone.forward_s, call_s), _without(alone.back_s, back_call_s)
    shared_s = _without(spread.forward_s, call_s) + _without(spread.back_s, back_call_s)
    slower = [(each.forward_s + each.back_s) / (alone.forward_s + alone.back_s) for each in crowded]
    return Speed(
        tuple(map(float, at)),
        amount / own_s,
        back_amount / own_back_s,
        crowded=1 + more * (max(1.0, statistics.median(slower)) - 1) if slower else 1.0,
        spread=shared_s / (own_s + own_back_s),
        inputs=_part(alone.inputs, own_back_s, back_call_s),
        weights=_part(alone.weights, own_back_s, back_call_s),
    )


def _part(seconds: Sequence[float], whole_s: float, call_s: float) -> float:
    return _without(statistics.median(seconds), call_s) / whole_s if seconds else 0.5


def _without(seconds: float, overhead_s: float) -> float:
    """Of what was timed at least a tenth is left."""
    return max(0.1 * seconds, seconds - overhead_s)


def _run(samples: Sequence[_Sample], turns: int) -> None:
    """As layers of a network: all forward and then all back, once for all gradients, once for each part of them."""
    for _ in range(turns):
        here().at(b"measures how fast it computes")  # others wait for that, and none hangs
        results = [sample.forward() for sample in samples]
        for part in _Sample.back, _Sample.inputs, _Sample.weights:
            for sample, result in reversed(list(zip(samples, results, strict=True))):
                part(sample, result)


@dataclass
class _Sample:
    """A kernel's call, timed going forward and back; where backward is arithmetic, also its parts by themselves."""

    call: _Call
    clock: Callable[[], float] = time.thread_time

    def __post_init__(self) -> None:
        name, arguments = self.call
        self.timed = Timed(counted(name, _looks(arguments)))
        self.leaves = _leaves(arguments)
        self.apart = self.timed.op.kind in BY_ARITHMETIC

    def forward(self) -> Tensor:
        """Its result, made of an input that was touched just before."""
        name, arguments = self.call
        self.leaves[0].detach().sum()
        start_s = self.clock()
        made = kernel(name)(*arguments)
        self.timed.forward.append(self.clock() - start_s)
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result

    def back(self, result: Tensor) -> None:
        self.timed.backward.append(self._back_s(self.leaves, result))

    def inputs(self, result: Tensor) -> None:
        if self.apart:
            self.timed.inputs.append(self._back_s(self.leaves[:1], result))

    def weights(self, result: Tensor) -> None:
        if self.apart:
            self.timed.weights.append(self._back_s(self.leaves[1:], result))

    def _back_s(self, leaves: Sequence[Tensor], result: Tensor) -> float:
        """Seconds until they have their gradients."""
        grad = torch.ones_like(result)
        start_s = self.clock()
        found = torch.autograd.grad(result, leaves, grad, retain_graph=True)
        for part in found:
            if part.untyped_storage().nbytes() > part.nbytes:
                part.clone()  # as whoever reads it next has to
        return self.clock() - start_s


def _leaves(arguments: Any) -> list[Tensor]:
    return [item for item in tree_leaves(arguments) if isinstance(item, Tensor) and item.requires_grad]


def _convolution(filters: Filters) -> _Call:
    x = _values(filters.images, filters.read, filters.side_px, filters.side_px)
    weight = _kernels(filters.made, filters.read // filters.groups, filters.kernel_px)
    pad = filters.kernel_px // 2
    bias = torch.zeros(filters.made, requires_grad=True) if filters.bias else None
    return "aten.conv2d.default", (x, weight, bias, [1, 1], [pad, pad], [1, 1], filters.groups)


def _transposed(channels: int, side: int) -> _Call:
    """One that doubles the pixels along each side; of two images, see `CONVOLUTIONS`."""
    x, weight = _values(2, channels, side, side), _kernels(channels, max(1, channels // 2), 2)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    return "tile.conv_transpose", (x, weight, bias, [2, 2], [1, 1], 1, (0, 0, 0, 0))


def _calls(size: Size) -> Iterator[_Call]:
    """What a network of that size is made of, beside its convolutions."""
    channels, side = size.channels, size.side_px
    x = _values(1, channels, side, side)
    gain, offset = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    moments = kernel("tile.moments")(x, 0, 1).detach().requires_grad_()
    yield "tile.moments", (x, 0, 4)
    yield "tile.batch_norm", (x, moments, gain, offset, [side * side], 1e-5)
    yield "tile.whole_batch_norm", (x, gain, offset, 1e-5)
    yield "aten.relu.default", (x,)
    yield "aten.max_pool2d.default", (x, [2, 2], [2, 2])
    yield "aten.cat.default", ([x, _values(1, channels, side, side)], 1)
    yield "tile.pad", (x, [1, 1, 1, 1], 0.0)
    yield "tile.pad", (x, [-1, 1, -1, 1], 0.0)
    yield _transposed(channels, side)
    few = _values(1, 4, side, side)
    labels = torch.zeros(1, side, side, dtype=torch.int64)
    yield "tile.cross_entropy_sums", (few, labels, None, -100, 0.0)
    yield "aten.gelu.default", (x,)
    yield "aten.linear.default", (_values(16, channels * 4), _values(channels, channels * 4))


def _values(*shape: int) -> Tensor:
    made = torch.rand(shape)
    return made.to(memory_format=memory_format(len(shape))).requires_grad_()


def _kernels(filters: int, channels: int, side: int) -> Tensor:
    return _values(filters, channels, side, side)


def _looks(arguments: Any) -> Any:
    """The arguments with what tensors look like in their place."""
    if isinstance(arguments, Tensor):
        spec = TensorSpec(tuple(arguments.shape), str(arguments.dtype).removeprefix("torch."))
        return Local(spec, tuple(arguments.stride()), arguments.requires_grad)
    if isinstance(arguments, list | tuple):
        return type(arguments)(_looks(item) for item in arguments)
    return arguments
