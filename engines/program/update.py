"""The end of a training step: reduced gradients, the finite check, the optimiser step, and the buffers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpi4dl_nb.engines.comm.all_reduce import AllReduceRequest, all_reduce
from mpi4dl_nb.engines.comm.nccl import NcclAllReduce
from mpi4dl_nb.engines.comm.streams import DeviceEvent, copy_to_device, record_event, use_send_stream
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.program.instructions import ReduceBatchStats, SumGradients, Update
from mpi4dl_nb.engines.program.kernels import compute_batch_statistics
from mpi4dl_nb.engines.program.message_buffers import choose_message_device, make_message_allocator
from mpi4dl_nb.engines.program.micro_batch import MicroBatchState

Scheduler = Callable[[Optimizer], LRScheduler]
DeviceSum = Callable[[Tensor], NcclAllReduce]

SCALE, GROWTH, BACKOFF, GOOD_STEPS = 2.0**16, 2.0, 0.5, 2000
"""Dynamic loss scaling: initial scale, growth factor, backoff factor, and the good steps before the scale grows."""


class GradientBucket:
    """The all-reduce of some weights' gradients over a group of ranks, as one flat tensor; reused in every step.

    The flat tensor is where messages are: on the host for a GPU whose memory MPI cannot access. With `added` (a
    collective of the device, such as NCCL's) it is on the device.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], bucket: SumGradients, world: World, added: DeviceSum | None = None
    ) -> None:
        #   weights   w0 (stays)   w1 (stays)
        #   grads     own memory  --pack-->  flat [ g0 | g1 ]  --all-reduce in place-->  flat [ sum0 | sum1 ]
        #   after     w0.grad and w1.grad are views of `flat` (or, from a host's `flat`, copies on the GPU)
        self.weights = [weights[name] for name in bucket.weights]
        sizes, (first, *_) = [weight.numel() for weight in self.weights], self.weights
        self.device = first.device
        self.where = self.device if added else choose_message_device(self.device, world)
        on_device = partial(torch.empty, dtype=torch.uint8, device=self.device)
        memory = on_device if added else make_message_allocator(self.device, world)
        self.flat = memory(sum(sizes) * first.itemsize).view(first.dtype)
        pairs = zip(self.weights, self.flat.split(sizes), strict=True)
        # Each part has the strides of its weight, so that copies and updates traverse memory linearly.
        self.sums = [part.as_strided(weight.shape, weight.stride()) for weight, part in pairs]
        self.read = record_event(self.device, self.device)  # after the last copy out of `flat`
        self.total = (
            added(self.flat) if added else AllReduceRequest(world, self.flat, bucket.group, bucket.tag, again=True)
        )

    def pack(self) -> DeviceEvent:
        """Copy the current gradients into the bucket; the event returned marks when `total.begin` may start the sum."""
        # The previous step's sum must have been copied out before its memory is overwritten.
        self.read.synchronize()
        grads = [weight.grad for weight in self.weights]
        with use_send_stream(self.device, self.where, [grad for grad in grads if grad is not None]):
            for grad, part in zip(grads, self.sums, strict=True):
                part.zero_() if grad is None else part.copy_(grad, non_blocking=True)
            return record_event(self.device, self.where)

    def finish(self) -> None:
        """Wait for the sum, and give each weight its gradient."""
        self.total.wait()
        for weight, total in zip(self.weights, copy_to_device(self.sums, self.device, self.where), strict=True):
            weight.grad = total
        self.read = record_event(self.device, self.where)


@dataclass(frozen=True)
class UpdateRules:
    """What happens at an update besides the optimiser step; the same on every rank.

    `clip_norm` bounds the norm of all gradients of the model together. `scheduler` makes, from an optimiser, a
    scheduler that steps once after each update. `loss_scale` is the initial factor of the loss, which keeps small
    gradients from underflowing in float16; None disables scaling.
    """

    clip_norm: float | None = None
    scheduler: Scheduler | None = None
    loss_scale: float | None = None


class OptimiserStep:
    """Updates the weights of one rank's optimiser, in agreement with all other ranks.

    Loss scaling is dynamic (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2), with the constants of
    `torch.amp.GradScaler`: if any gradient of any rank is not finite, no weight changes and the scale is halved.
    """

    def __init__(self, weights: Mapping[str, Tensor], optimiser: Optimizer | None, rules: UpdateRules) -> None:
        self.weights, self.optimiser, self.rules = weights, optimiser, rules
        self.scheduler = rules.scheduler(optimiser) if rules.scheduler and optimiser else None
        self.scaled = rules.loss_scale is not None
        self.scale, self.good_steps = rules.loss_scale or 1.0, 0
        self._end = ""  # why the scheduler has no learning rate for another update

    def check_schedule(self) -> None:
        """Raise PlanError if the scheduler has come to its end."""
        if self._end:
            raise PlanError(
                f"The scheduler {type(self.scheduler).__name__} has no learning rate for another update: {self._end}. "
                "Train fewer steps, or make the Training with a scheduler of more steps."
            )

    def compute_gradient_stats(self, counted: Iterable[str]) -> Tensor:
        """Return (2,) float64, to be summed over ranks that each count different weights.

        The entries are whether a gradient is not finite, and the squared norm of all (unscaled) gradients; zeros if
        neither scaling nor clipping is enabled.
        """
        if not self.scaled and self.rules.clip_norm is None:
            return torch.zeros(2, dtype=torch.float64)
        grads = [grad for name in counted if (grad := self.weights[name].grad) is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        # One transfer to the host, of a single number; inf and NaN of any gradient survive in the sum of squares.
        square = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        return torch.stack([(~square.isfinite()).double(), square / self.scale**2])

    def step(self, gradient_stats: Tensor) -> None:
        """Update the weights, unless scaled gradients are not finite.

        `gradient_stats` is the sum of all ranks' `compute_gradient_stats`.
        """
        # The same numbers on every rank, so that all ranks skip or scale alike.
        bad, square = gradient_stats.tolist()
        if self.scaled and bad:
            self.scale, self.good_steps = self.scale * BACKOFF, 0
            return
        factor = 1.0
        if self.rules.clip_norm is not None:
            # As `torch.nn.utils.clip_grad_norm_` would scale the gradients. Written so that a norm of NaN gives a NaN.
            clip = self.rules.clip_norm / (math.sqrt(square) + 1e-6)
            factor = 1.0 if clip >= 1 else clip
        factor /= self.scale
        for weight in list_weights(self.optimiser) if self.optimiser and factor != 1 else ():
            if weight.grad is not None:
                weight.grad.mul_(factor)
        if self.optimiser is not None:
            self.optimiser.step()
        if self.scheduler is not None:
            try:
                self.scheduler.step()
            # The weights have changed, so that this step counts: the next one is refused before it changes anything.
            except ValueError as error:
                self._end = str(error)
        self.good_steps += 1
        if self.scaled and self.good_steps == GOOD_STEPS:
            self.scale, self.good_steps = self.scale * GROWTH, 0


def list_weights(optimiser: Optimizer) -> list[Tensor]:
    """Return the weights of all groups of an optimiser, in their order."""
    return [weight for group in optimiser.param_groups for weight in group["params"]]


def update_buffers(
    buffers: Mapping[str, Tensor], update: Update, moments: Callable[[str], list[Tensor]], world: World
) -> int:
    """Update running means and (unbiased) variances once per micro-batch, and the counters; return the bytes sent.

    Where the running statistics are the mean over all batches, a rank that counts for itself weights each of its own
    micro-batches by the number of micro-batches of all ranks that it stands for: the average over ranks is then the
    mean over all micro-batches. Statistics that an instance norm has per image are stored as their mean over the
    images. Statistics that ranks have each for their own tile are stored as the mean over these ranks.
    """
    by_group: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        # Of norms that each rank counts for itself, a rank has the moments of fewer micro-batches than of the others.
        counted = [(entry, moments(entry.moments)) for entry in update.statistics]
        # The batches seen by batch norms whose running statistics are the mean over all batches, by counter.
        moves = Counter(entry.counter for entry in update.statistics if entry.counter)
        seen = {name: int(buffers[name]) for name in moves}
        counters = [(entry.counter, len(rows)) for entry, rows in counted if entry.counter]
        new = {name: update.counters[name] // (moves[name] * count) for name, count in counters}
        # Micro-batch by micro-batch over all entries, as a sequential model would update them; what backward recomputes
        # comes after the forward passes of all micro-batches.
        most = max((len(rows) for _, rows in counted), default=0)
        for turn, micro_batch in product(sorted({entry.turn for entry in update.statistics}), range(most)):
            own_turn = ((entry, rows) for entry, rows in counted if entry.turn == turn)
            for entry, row in ((entry, rows[micro_batch]) for entry, rows in own_turn if micro_batch < len(rows)):
                momentum = entry.momentum
                if entry.counter is not None:
                    # A mean over n + e batches, e of them new: mean += (new - mean) * e / (n + e).
                    seen[entry.counter] += new[entry.counter]
                    momentum = new[entry.counter] / seen[entry.counter]
                mean, variance = compute_batch_statistics(row, entry.counts)
                unbiased = variance * (sum(entry.counts) / max(1, sum(entry.counts) - 1))
                for name, now in ((entry.mean_buffer, mean), (entry.variance_buffer, unbiased)):
                    buffer = buffers[name]
                    buffer.lerp_(now.view(-1, *buffer.shape).mean(0).to(buffer.dtype), momentum)
        for entry in update.statistics:
            if entry.mean_over and not entry.turn:
                by_group[entry.mean_over] += buffers[entry.mean_buffer], buffers[entry.variance_buffer]
        for name, amount in update.counters.items():
            buffers[name].add_(amount)
        sent_bytes = 0
        # One message per group, in the same order on all ranks.
        for group, tensors in sorted(by_group.items(), key=lambda it: it[0]):
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            sent_bytes += all_reduce(world, flat, group).wait()
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor) / len(group))
        return sent_bytes


# The moments that batch norms counted per micro-batch, shared with every rank that keeps the running statistics.


class BatchStats:
    """The moments of one training step, in the order of its micro-batches."""

    def __init__(self, states: Mapping[int, MicroBatchState], micro_batches: int) -> None:
        self.states, self.micro_batches = states, micro_batches
        self._shared: dict[str, Tensor] = {}

    def reduce(self, share: ReduceBatchStats, world: World) -> int:
        """All-reduce the moments over the ranks of all replicas and directions; return the bytes sent."""
        rows = []
        for name in share.moments:
            like = next(iter(self._get_own(name).values()))
            row = like.new_zeros((self.micro_batches, like.numel()))
            # Every row is non-zero on exactly one contributor, so the sum is a gather that keeps the bits of each row.
            for micro_batch in share.own_micro_batches:
                row[micro_batch] = self._get_own(name)[micro_batch].flatten()
            rows.append(row)
        total = torch.cat(rows, dim=1)
        sent = all_reduce(world, total, share.group).wait()
        parts = total.split([row.shape[1] for row in rows], dim=1)
        self._shared.update(zip(share.moments, parts, strict=True))
        return sent

    def _get_own(self, name: str) -> dict[int, Tensor]:
        """Return the moments that this rank counted, by micro-batch."""
        states = self.states.items()
        return {number: state.leaves[name].detach() for number, state in states if name in state.leaves}

    def __call__(self, name: str) -> list[Tensor]:
        """Return the moments of one batch norm, for each micro-batch of the step."""
        moments = self._get_own(name)
        if name not in self._shared:
            return list(moments.values())
        like = next(iter(moments.values()))
        return [row.view(like.shape) for row in self._shared[name]]
