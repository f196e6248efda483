"""The end of a training step: gradients summed and agreed upon, weights moved, and the buffers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from engines.comm.all_reduce import AllReduceRequest, all_reduce
from engines.comm.nccl import NcclAllReduce
from engines.comm.streams import DeviceEvent, copy_to_device, record_event, use_send_stream
from engines.comm.world import World
from engines.program.instructions import RunningStatistics, SumGradients, Update
from engines.program.message_buffers import choose_message_device, make_message_allocator
from engines.spatial.kernels import compute_batch_statistics

__all__ = ["GOOD_STEPS", "SCALE", "GradientBucket", "OptimiserStep", "Scheduler", "UpdateRules", "update_buffers"]

Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]

SCALE, GROWTH, BACKOFF, GOOD_STEPS = 2.0**16, 2.0, 0.5, 2000
"""How a loss is scaled: at first, times what after how many good steps in a row, and times what after a bad one."""


class GradientBucket:
    """The sum of some weights' gradients over a group of ranks, in one message; begun and finished in every step.

    It is made where messages lie: of a GPU that MPI does not reach, on the host. Of what is `added` otherwise, on the
    device itself.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        bucket: SumGradients,
        world: World,
        added: Callable[[Tensor], NcclAllReduce] | None = None,
    ) -> None:
        self.shared = [weights[name] for name in bucket.weights]
        sizes, (first, *_) = [weight.numel() for weight in self.shared], self.shared
        self.device = first.device
        self.where = self.device if added else choose_message_device(self.device, world)
        on_device = partial(torch.empty, dtype=torch.uint8, device=self.device)
        memory = on_device if added else make_message_allocator(self.device, world)
        self.flat = memory(sum(sizes) * first.itemsize).view(first.dtype)
        pairs = zip(self.shared, self.flat.split(sizes), strict=True)
        # Each lies as its weight does: copies and updates go straight through memory.
        self.sums = [part.as_strided(weight.shape, weight.stride()) for weight, part in pairs]
        self.read = record_event(self.device, self.device)  # what came last
        self.total = (
            added(self.flat) if added else AllReduceRequest(world, self.flat, bucket.group, bucket.tag, again=True)
        )

    def pack(self) -> DeviceEvent:
        """Have the gradients copied as they are now; `total.begin` may start to add them up when that has been done."""
        self.read.synchronize()
        grads = [weight.grad for weight in self.shared]
        with use_send_stream(self.device, self.where, [grad for grad in grads if grad is not None]):
            for grad, own in zip(grads, self.sums, strict=True):
                own.zero_() if grad is None else own.copy_(grad, non_blocking=True)
            return record_event(self.device, self.where)

    def finish(self) -> None:
        """Wait for it, and give each weight its gradient."""
        self.total.wait()
        for weight, total in zip(self.shared, copy_to_device(self.sums, self.device, self.where), strict=True):
            weight.grad = total
        self.read = record_event(self.device, self.where)


@dataclass(frozen=True)
class UpdateRules:
    """What happens at an update beside the optimiser's step; the same on every rank.

    `clip_norm` bounds the norm of all gradients of the model together, `scheduler` makes of an optimiser what steps
    once after each update. `loss_scale` multiplies the loss at first, so that small gradients are not lost in float16;
    None never scales.
    """

    clip_norm: float | None = None
    scheduler: Scheduler | None = None
    loss_scale: float | None = None


class OptimiserStep:
    """How the weights of one rank move, in step with those of all others.

    Loss scaling is dynamic (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2), with the numbers of
    `torch.amp.GradScaler`: where any gradient of any rank is not finite no weight moves, and the scale halves.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], optimiser: torch.optim.Optimizer | None, rules: UpdateRules
    ) -> None:
        self.weights, self.optimiser, self.rules = weights, optimiser, rules
        self.scheduler = rules.scheduler(optimiser) if rules.scheduler and optimiser else None
        self.scaled = rules.loss_scale is not None
        self.scale, self.good_steps = rules.loss_scale or 1.0, 0

    def compute_gradient_stats(self, counted: Iterable[str]) -> Tensor:
        """(2,), float64, to be summed over ranks that each count other weights.

        Whether a gradient is not finite, and the squared norm of all (unscaled); zeros where nobody asks.
        """
        if not self.scaled and self.rules.clip_norm is None:
            return torch.zeros(2, dtype=torch.float64)
        grads = [grad for name in counted if (grad := self.weights[name].grad) is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        square = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        return torch.stack([(~square.isfinite()).double(), square / self.scale**2])

    def step(self, agreed: Tensor) -> None:
        """Move the weights, unless scaled gradients are not finite. `agreed` is the sum of all `told`."""
        bad, square = agreed.tolist()
        if self.scaled and bad:
            self.scale, self.good_steps = self.scale * BACKOFF, 0
            return
        self._scale_gradients(self._compute_clip_factor(math.sqrt(square)) / self.scale)
        for moved in (self.optimiser, self.scheduler):
            if moved is not None:
                moved.step()
        self._grow_scale()

    def _compute_clip_factor(self, norm: float) -> float:
        """As `torch.nn.utils.clip_grad_norm_` has it."""
        if self.rules.clip_norm is None:
            return 1.0
        factor = self.rules.clip_norm / (norm + 1e-6)
        return 1.0 if factor >= 1 else factor

    def _scale_gradients(self, factor: float) -> None:
        for weight in self.weights.values():
            if weight.grad is not None and factor != 1:
                weight.grad.mul_(factor)

    def _grow_scale(self) -> None:
        self.good_steps += 1
        if self.scaled and self.good_steps == GOOD_STEPS:
            self.scale, self.good_steps = self.scale * GROWTH, 0


def update_buffers(
    buffers: Mapping[str, Tensor], update: Update, moments: Callable[[str], list[Tensor]], world: World
) -> int:
    """Running mean and (unbiased) variance move by `momentum`, once for each micro-batch; counters count.

    Where they are the mean over all batches so far, each of the ranks that count for themselves counts one of its own
    micro-batches for as many as there are of all ranks: their mean is that over the micro-batches of all.
    What an instance norm counts for each image, its buffers keep as the mean over all images; what ranks count each
    for its own tile, as the mean over these ranks. The bytes sent for it.
    """
    apart: dict[tuple[int, ...], list[Tensor]] = {}
    with torch.no_grad():
        counted = [moments(entry.moments) for entry in update.statistics]
        seen = _BatchCounts(buffers, update, len(counted[0]) if counted else 0)
        for micro_batch in zip(*counted, strict=True):  # one norm may be used twice in a forward pass
            for entry, own in zip(update.statistics, micro_batch, strict=True):
                _update_running_stats(buffers, entry, own, seen.advance_momentum(entry))
        for entry in update.statistics:
            if entry.mean_over:
                apart.setdefault(entry.mean_over, []).extend(
                    (buffers[entry.mean_buffer], buffers[entry.variance_buffer])
                )
        for name, amount in update.counters.items():
            buffers[name].add_(amount)
        return sum(
            _average_over(group, tensors, world) for group, tensors in sorted(apart.items(), key=lambda it: it[0])
        )


class _BatchCounts:
    """How many batches the batch norms have seen whose running statistics are the mean over all of them."""

    def __init__(self, buffers: Mapping[str, Tensor], update: Update, micro_batches: int) -> None:
        moves = Counter(entry.counter for entry in update.statistics if entry.counter)
        self.batches = {name: int(buffers[name]) for name in moves}
        self.each = {name: update.counters[name] // (moves[name] * micro_batches) for name in moves}

    def advance_momentum(self, entry: RunningStatistics) -> float:
        """What the next micro-batch moves running statistics by."""
        if entry.counter is None:
            return entry.momentum
        self.batches[entry.counter] += self.each[entry.counter]
        return self.each[entry.counter] / self.batches[entry.counter]


def _update_running_stats(
    buffers: Mapping[str, Tensor], entry: RunningStatistics, counted: Tensor, momentum: float
) -> None:
    """Move running statistics by what one micro-batch counted."""
    mean, variance = compute_batch_statistics(counted, entry.counts)
    unbiased = variance * (sum(entry.counts) / max(1, sum(entry.counts) - 1))
    for name, now in ((entry.mean_buffer, mean), (entry.variance_buffer, unbiased)):
        buffer = buffers[name]
        buffer.lerp_(now.view(-1, *buffer.shape).mean(0).to(buffer.dtype), momentum)


def _average_over(group: tuple[int, ...], tensors: list[Tensor], world: World) -> int:
    """Replace each tensor by its mean over the ranks of the group, in one message; the bytes sent."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    under_way = all_reduce(world, flat, group)
    under_way.wait()
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor) / len(group))
    return under_way.sent_bytes
