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
from engines.predict.classes import BY_ARITHMETIC, class_of
from engines.predict.cost import amount_of
from engines.predict.effects import Local
from engines.predict.machine import Speed
from engines.predict.sampled import Call
from engines.predict.segments import counted
from engines.predict.tallies import OpTally
from engines.spatial.kernels import kernel
from engines.whereabouts import here

__all__ = ["TURNS", "Samples", "Timed", "each_seconds", "median_seconds", "speeds", "tallied"]

TURNS = 9  # at moments seconds apart: a shared machine is now faster, now slower


@dataclass
class Timed:
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


class Samples:
    """Calls of kernels, timed with one thread or as many as are set, a `turn` at a time.

    By the clock of one thread, which knows nothing of others that work for it, or another one. The first ones, the
    share `late` of all, come last. `apart`: the gradients of inputs and of weights are computed apart, too.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        late: float = 0.0,
        clock: Callable[[], float] = time.thread_time,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self._samples = [_Sample(call, clock) for call in calls]
        middle = int(late * len(self._samples))
        self._order = [*self._samples[middle:], *self._samples[:middle]]

    def turn(self) -> None:
        """Time each of them once more."""
        _run(self._order, self._apart)

    @property
    def timed(self) -> list[Timed]:
        """What was found so far."""
        return [each.timed for each in self._samples]


def tallied(calls: Sequence[Call]) -> list[OpTally]:
    """What each of the calls computes."""
    return [counted(name, _looks(arguments)) for name, arguments in calls]


def speeds(
    ops: Sequence[OpTally],
    alone: Sequence[Timed],
    spread: Sequence[Timed],
    crowded: Sequence[Sequence[Timed]],
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
        found[op.kind].append(_speed(op, sample, shared, others, call_s, back_call_s, more))
    return {kind: tuple(samples) for kind, samples in found.items()}


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
    op: OpTally,
    alone: Timed,
    spread: Timed,
    crowded: Sequence[Timed],
    call_s: float,
    back_call_s: float,
    more: float,
) -> Speed:
    amount, at = amount_of(op)
    back_amount = amount * (2 if op.kind in BY_ARITHMETIC else 1)  # the gradients of values, and of weights
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


def _run(samples: Sequence[_Sample], in_parts: bool) -> None:
    """As layers of a network: all forward and then all back, for all gradients, and then once for each part of them."""
    results = [sample.forward() for sample in samples]
    layers = list(zip(samples, results, strict=True))[::-1]
    apart = [(sample, result) for sample, result in layers if in_parts and class_of(sample.call[0]) in BY_ARITHMETIC]
    for sample, result in layers:
        sample.timed.backward.append(sample.back_s(sample.leaves, result))
    for sample, result in apart:
        sample.timed.inputs.append(sample.back_s(sample.leaves[:1], result))
    for sample, result in apart:
        sample.timed.weights.append(sample.back_s(sample.leaves[1:], result))


@dataclass
class _Sample:
    """A kernel's call, its input first among what it has gradients of, and what it took."""

    call: Call
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.timed = Timed()
        self.leaves = [item for item in tree_leaves(self.call[1]) if isinstance(item, Tensor) and item.requires_grad]

    def forward(self) -> Tensor:
        """Its result, timed, of an input that was touched just before."""
        name, arguments = self.call
        self._goes_on()
        self.leaves[0].detach().sum()
        start_s = self.clock()
        made = kernel(name)(*arguments)
        self.timed.forward.append(self.clock() - start_s)
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result

    def back_s(self, leaves: Sequence[Tensor], result: Tensor) -> float:
        """Seconds until these leaves have their gradients."""
        self._goes_on()
        grad = torch.ones_like(result)
        start_s = self.clock()
        found = torch.autograd.grad(result, leaves, grad, retain_graph=True)
        for part in found:
            if part.untyped_storage().nbytes() > part.nbytes:
                part.clone()  # as whoever reads it next has to
        return self.clock() - start_s

    @staticmethod
    def _goes_on() -> None:
        """Others wait for this, and none hangs."""
        here().at(b"measures how fast it computes")


def _looks(arguments: Any) -> Any:
    """The arguments with what tensors look like in their place."""
    if isinstance(arguments, Tensor):
        spec = TensorSpec(tuple(arguments.shape), str(arguments.dtype).removeprefix("torch."))
        return Local(spec, tuple(arguments.stride()), arguments.requires_grad)
    if isinstance(arguments, list | tuple):
        return type(arguments)(_looks(item) for item in arguments)
    return arguments
