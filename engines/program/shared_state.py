"""What ranks of one thread hold once for all of them: weights, the sums of their gradients, and pending updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.all_reduce import RoundsRequest
from mpi4dl_nb.engines.comm.device import choose_device
from mpi4dl_nb.engines.comm.streams import DeviceEvent, record_event
from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.program.instructions import SumGradients
from mpi4dl_nb.engines.program.offloader import OffloadStore

# Ranks of one thread never compute at the same time, so they may use the same memory:
#
#   rank 0   F ~ B | adds to the sum ~ | agree ~ | updates all weights | F ...      `~`: another rank continues
#   rank 1     F ~ B | adds to the sum ~ | agree ~                     | (updated) | F ...
#
# Every rank has finished its passes, and every sum is complete, before the first rank passes `agree`. That rank then
# runs the optimiser steps of all ranks: none of them reads a weight of the old step later, or of the new one earlier.


@dataclass
class SharedState:
    """Weights and constant buffers by name, the sums of gradients to which not all ranks have added yet, and a file."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    store: OffloadStore | None = None

    @classmethod
    def of(cls, world: World, device: str) -> SharedState | None:
        """Return what several ranks share if they are in one thread and on one device, else None. Collective."""
        shares = world.shares_memory and world.size > 1
        if not shares or len({choose_device(device, rank) for rank in range(world.size)}) > 1:
            return None
        return world.all_gather(cls())[0]

    def get_tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that name, which the first rank that needs it makes."""
        if name not in self.tensors:
            self.tensors[name] = make()
        return self.tensors[name]

    def get_store(self) -> OffloadStore:
        """Return the file of offloaded tensors, which the first rank that needs it makes: one may be several ranks'."""
        self.store = self.store or OffloadStore()
        return self.store

    def restore_memory(self, weights: Mapping[str, Tensor]) -> None:
        """Move the weights of a rank back to the shared memory, if its optimiser has given them other memory."""
        for name, weight in weights.items():
            if weight.data_ptr() != self.tensors[name].data_ptr():
                self.tensors[name].copy_(weight.detach())
                weight.data = self.tensors[name]


class PendingUpdate:
    """A rank's optimiser step, which the first rank that gets there runs for all ranks."""

    def __init__(self, step: Callable[[Tensor], None]) -> None:
        self._step: Callable[[Tensor], None] | None = step

    def run(self, gradient_stats: Tensor) -> None:
        """Run the step, unless another rank has done so; `gradient_stats` is that of `OptimiserStep.step`."""
        step, self._step = self._step, None
        if step is not None:
            step(gradient_stats)


class SharedGradientBucket(RoundsRequest):
    """The sum of some weights' gradients over ranks of one thread, in one tensor per weight; like `GradientBucket`.

    The ranks add their gradients in rank order, as an all-reduce does: the sum has the same bits.
    """

    def __init__(self, weights: Mapping[str, Tensor], bucket: SumGradients, world: World, shared: SharedState) -> None:
        self.weights = [weights[name] for name in bucket.weights]
        self.bucket, self.world, self.shared = bucket, world, shared
        self.token = torch.zeros(1, dtype=torch.uint8)
        position, last = bucket.group.index(world.rank), len(bucket.group) - 1
        self.before = bucket.group[position - 1 : position]
        # The last rank tells all others that the sum is complete.
        self.after = bucket.group[position + 1 : position + 2] if position < last else bucket.group[:last]
        self.completed_by = bucket.group[last:] if position < last else ()
        self.sent_bytes = len(self.after)

    @property
    def total(self) -> SharedGradientBucket:
        """The request to begin, this one."""
        return self

    def pack(self) -> DeviceEvent:
        """Return an event that marks when `begin` may be called: at once, as nothing is copied."""
        return record_event(self.weights[0].device, self.token.device)

    def finish(self) -> None:
        """Wait for the sum; the weights have it as their gradients."""
        self.wait()

    def _run_rounds(self) -> Iterator[Pending]:
        # Only an empty message travels, so a failure leaves nothing to undo: the first rank begins a new sum.
        #
        #   rank 0   sum = g0 --> rank 1   sum += g1 --> rank 2   sum += g2 --> ranks 0 and 1: complete
        if self.before:
            yield self._exchange(self.before, tag=0, sends=False)
            sums = self.shared.sums[self.bucket.name]
            for weight, total in zip(self.weights, sums, strict=True):
                total.add_(0 if weight.grad is None else weight.grad)
        else:
            sums = self.shared.sums[self.bucket.name] = [
                torch.zeros_like(weight) if weight.grad is None else torch.empty_like(weight).copy_(weight.grad)
                for weight in self.weights
            ]
        # Frees the rank's own gradients, even if the other ranks have not computed theirs yet.
        for weight, total in zip(self.weights, sums, strict=True):
            weight.grad = total
        if not self.completed_by:
            del self.shared.sums[self.bucket.name]
        yield self._exchange(self.after, tag=0 if self.completed_by else 1, sends=True)
        if self.completed_by:
            yield self._exchange(self.completed_by, tag=1, sends=False)

    def _exchange(self, peers: tuple[int, ...], tag: int, sends: bool) -> Pending:
        messages = [Message(peer, self.bucket.tag + tag, self.token) for peer in peers]
        return self.world.exchange(messages, []) if sends else self.world.exchange([], messages)
