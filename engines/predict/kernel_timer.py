"""Kernels timed as training runs them: one behind the other as layers are, forward and then back, all results kept.

So each meets the caches and the memory as a layer does: going forward its input has just been made, and its weights lay
idle; going back its gradient has just come, and what was kept lay idle. Timed again and again by itself, a small
convolution takes two thirds of that, and a large value, made in memory that was given back, up to eight times as long.
What is counted is the processor's time of this thread: on a machine where other programs run too, the clock on the wall
would time them as well. Of several runs it is the median.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import engines.spatial.entries.reduction  # noqa: F401  (gives the kernels of losses their names)
from engines.layer.graph import TensorSpec
from engines.predict.calibration_kernels import KernelCall
from engines.predict.cost import count_work
from engines.predict.kernel_classes import BY_ARITHMETIC, classify_kernel
from engines.predict.kernel_effects import LocalTensor
from engines.predict.machine import Speed
from engines.predict.segment_tally import build_op_tally
from engines.predict.tallies import OpTally
from engines.spatial.kernels import get_kernel
from engines.status_board import get_status_board

__all__ = [
    "TURNS",
    "KernelTimer",
    "KernelTimes",
    "build_op_tallies",
    "compute_speeds",
    "measure_median_seconds",
    "measure_seconds",
]

TURNS = 9  # at moments seconds apart: a shared machine is now faster, now slower


@dataclass
class KernelTimes:
    """The seconds that one kernel call took, each time.

    `inputs` and `weights`: those of backward whose gradients were computed apart, where they were.
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
    """Calls of kernels, timed with one thread or as many as are set, a `turn` at a time.

    By the clock of one thread, which knows nothing of others that work for it, or another one. The first ones, the
    share `late` of all, come last. `apart`: the gradients of inputs and of weights are computed apart, too.
    """

    def __init__(
        self,
        calls: Sequence[KernelCall],
        late: float = 0.0,
        clock: Callable[[], float] = time.thread_time,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self._samples = [_TimedKernel(call, clock) for call in calls]
        middle = int(late * len(self._samples))
        self._order = [*self._samples[middle:], *self._samples[:middle]]

    def run_round(self) -> None:
        """Time each of them once more."""
        _time_kernels(self._order, self._apart)

    @property
    def timed(self) -> list[KernelTimes]:
        """What was found so far."""
        return [each.timed for each in self._samples]


def build_op_tallies(calls: Sequence[KernelCall]) -> list[OpTally]:
    """What each of the calls computes."""
    return [build_op_tally(name, _to_local_tensors(arguments)) for name, arguments in calls]


def compute_speeds(
    ops: Sequence[OpTally],
    alone: Sequence[KernelTimes],
    spread: Sequence[KernelTimes],
    crowded: Sequence[Sequence[KernelTimes]],
    call_s: float,
    back_call_s: float,
    cores: int,
) -> dict[str, tuple[Speed, ...]]:
    """The speeds of calls (`ops`) that one rank timed alone, on one core and on all, and then all ranks at once.

    Without what calls take. Fewer ranks than cores crowd each other less than as many would: a neighbour counts as
    much as any other.
    """
    found: dict[str, list[Speed]] = defaultdict(list)
    more = max(1.0, (cores - 1) / max(1, len(crowded) - 1))
    for op, sample, shared, *others in zip(ops, alone, spread, *crowded, strict=True):
        found[op.kind].append(_compute_speed(op, sample, shared, others, call_s, back_call_s, more))
    return {kind: tuple(samples) for kind, samples in found.items()}


def measure_median_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Of some runs."""
    return statistics.median(measure_seconds(work, times, time.thread_time))


def measure_seconds(work: Callable[[], object], times: int, clock: Callable[[], float]) -> list[float]:
    """Of each run, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        start_s = clock()
        work()
        found.append(clock() - start_s)
    return found


def _compute_speed(
    op: OpTally,
    alone: KernelTimes,
    spread: KernelTimes,
    crowded: Sequence[KernelTimes],
    call_s: float,
    back_call_s: float,
    more: float,
) -> Speed:
    amount, at = count_work(op)
    back_amount = amount * (2 if op.kind in BY_ARITHMETIC else 1)  # the gradients of values, and of weights
    own_s, own_back_s = _subtract_overhead(alone.forward_s, call_s), _subtract_overhead(alone.back_s, back_call_s)
    shared_s = _subtract_overhead(spread.forward_s, call_s) + _subtract_overhead(spread.back_s, back_call_s)
    slower = [(each.forward_s + each.back_s) / (alone.forward_s + alone.back_s) for each in crowded]
    return Speed(
        tuple(map(float, at)),
        amount / own_s,
        back_amount / own_back_s,
        crowded=1 + more * (max(1.0, statistics.median(slower)) - 1) if slower else 1.0,
        spread=shared_s / (own_s + own_back_s),
        inputs=_compute_part(alone.inputs, own_back_s, back_call_s),
        weights=_compute_part(alone.weights, own_back_s, back_call_s),
    )


def _compute_part(seconds: Sequence[float], whole_s: float, call_s: float) -> float:
    return _subtract_overhead(statistics.median(seconds), call_s) / whole_s if seconds else 0.5


def _subtract_overhead(seconds: float, overhead_s: float) -> float:
    """Of what was timed at least a tenth is left."""
    return max(0.1 * seconds, seconds - overhead_s)


def _time_kernels(samples: Sequence[_TimedKernel], in_parts: bool) -> None:
    """As layers of a network: all forward and then all back, for all gradients, and then once for each part of them."""
    results = [sample.time_forward() for sample in samples]
    layers = list(zip(samples, results, strict=True))[::-1]
    apart = [
        (sample, result) for sample, result in layers if in_parts and classify_kernel(sample.call[0]) in BY_ARITHMETIC
    ]
    for sample, result in layers:
        sample.timed.backward.append(sample.time_backward(sample.leaves, result))
    for sample, result in apart:
        sample.timed.inputs.append(sample.time_backward(sample.leaves[:1], result))
    for sample, result in apart:
        sample.timed.weights.append(sample.time_backward(sample.leaves[1:], result))


@dataclass
class _TimedKernel:
    """A kernel's call, its input first among what it has gradients of, and what it took."""

    call: KernelCall
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.timed = KernelTimes()
        self.leaves = [item for item in tree_leaves(self.call[1]) if isinstance(item, Tensor) and item.requires_grad]

    def time_forward(self) -> Tensor:
        """Its result, timed, of an input that was touched just before."""
        name, arguments = self.call
        self._report_working()
        self.leaves[0].detach().sum()
        start_s = self.clock()
        made = get_kernel(name)(*arguments)
        self.timed.forward.append(self.clock() - start_s)
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result

    def time_backward(self, leaves: Sequence[Tensor], result: Tensor) -> float:
        """Seconds until these leaves have their gradients."""
        self._report_working()
        grad = torch.ones_like(result)
        start_s = self.clock()
        found = torch.autograd.grad(result, leaves, grad, retain_graph=True)
        for part in found:
            if part.untyped_storage().nbytes() > part.nbytes:
                part.clone()  # as whoever reads it next has to
        return self.clock() - start_s

    @staticmethod
    def _report_working() -> None:
        """Others wait for this, and none hangs."""
        get_status_board().report(b"measures how fast it computes")


def _to_local_tensors(arguments: Any) -> Any:
    """The arguments with what tensors look like in their place."""
    if isinstance(arguments, Tensor):
        spec = TensorSpec(tuple(arguments.shape), str(arguments.dtype).removeprefix("torch."))
        return LocalTensor(spec, tuple(arguments.stride()), arguments.requires_grad)
    if isinstance(arguments, list | tuple):
        return type(arguments)(_to_local_tensors(item) for item in arguments)
    return arguments
