"""Sums among ranks that each have a GPU of their own, by NCCL: from one GPU's memory into another's.

NCCL's kernels wait on the GPU for those of the other ranks. Were two sums started in one order here and in the other
there, GPUs could wait for each other for ever (NCCL user guide, "Using multiple NCCL communicators concurrently").
Programs begin sums as gradients come, each rank in an order of its own: one that comes before its turn is held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.comm.device import get_gpu_id
from engines.comm.rendezvous import make_tcp_store
from engines.comm.subgroup import SubGroup
from engines.comm.wait_time import measure_wait
from engines.comm.world import World
from engines.errors import RankError

__all__ = ["Collectives", "NcclAllReduce", "OrderedStarter", "make_collectives"]

_NAP_S = 5e-5
_SWITCH = "MPI4DL_NB_NCCL"
_ENDLESS = timedelta(days=365)  # a rank that waits for another one asks whether it lives, not what time it is

Group = Any
"""A process group of torch.distributed, of whichever library."""


class Collectives:
    """What NCCL adds up among, until a rank fails. `check` raises RankError where one has.

    `made` makes a group of torch.distributed: of a store, this rank's number in the group, and its size.
    """

    def __init__(self, world: World, check: Callable[[], None], made: Callable[..., Group]) -> None:
        self.check, self._world, self._made = check, world, made
        self._groups: dict[tuple[int, ...], Group] = {}

    def connect_group(self, ranks: Sequence[int], device: torch.device) -> Group:
        """These ranks, connected; collective over them. Raises RankError where that cannot be."""
        if (key := tuple(ranks)) not in self._groups:
            part = SubGroup(self._world, key)
            try:
                found = self._made(make_tcp_store(part), part.rank, part.size)
                found.allreduce([torch.zeros(1, device=device)]).wait()  # the first sum connects, which takes long
            except RuntimeError as error:
                raise RankError(
                    f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, key))}: {error}. NCCL_DEBUG=INFO "
                    f"tells why; with {_SWITCH}=0 gradients are summed by MPI."
                ) from error
            self._groups[key] = found
        return self._groups[key]

    def abort(self) -> None:
        """Stop what is under way: kernels that wait for a rank that has failed would wait for ever."""
        for group in self._groups.values():
            group.abort()


def make_collectives(world: World, device: torch.device, check: Callable[[], None]) -> Collectives | None:
    """NCCL where it is here and each rank has a GPU of its own, None elsewhere; collective."""
    gpus = world.all_gather(_get_nccl_gpu(device))
    if not all(gpus) or len(set(gpus)) < world.size:
        return None
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a rank sees by `check` who has failed
    return Collectives(world, check, _make_nccl_group)


def _make_nccl_group(store: dist.Store, rank: int, size: int) -> Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _ENDLESS
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _get_nccl_gpu(device: torch.device) -> str:
    """Which GPU of all machines it is, nothing where NCCL cannot be had or `MPI4DL_NB_NCCL=0` forbids it."""
    can_be_had = dist.is_available() and dist.is_nccl_available() and os.environ.get(_SWITCH) != "0"
    return get_gpu_id(device) if can_be_had else ""


class OrderedStarter:
    """Starts what is begun in the order of its numbers, 0 to `count`, whichever it is begun in; again and again."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0
        self._held: dict[int, Callable[[], None]] = {}

    def begin(self, number: int, start: Callable[[], None]) -> None:
        """Start it and those that it has held up, or hold it."""
        self._held[number] = start
        while self._next in self._held:
            self._held.pop(self._next)()
            self._next = (self._next + 1) % self._count


class NcclAllReduce:
    """The sum of `tensor` over a group's ranks, which lies in it when it is done; begun in every step, as a `Total`.

    It is this `number` of the sums that its rank takes part in.
    """

    def __init__(
        self, tensor: Tensor, group: Group, number: int, order: OrderedStarter, check: Callable[[], None]
    ) -> None:
        self.tensor, self.group, self.number, self.order, self.check = tensor, group, number, order, check
        self.sent_bytes = 2 * tensor.nbytes * (group.size() - 1) // group.size()
        self.work: Any = None

    def begin(self) -> NcclAllReduce:
        """Start to replace the tensor by the sum, when its turn comes."""
        self.work = None
        self.order.begin(self.number, self._start)
        return self

    def _start(self) -> None:
        self.work = self.group.allreduce([self.tensor])

    def is_completed(self) -> bool:
        """Whether it is complete; returns at once."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> None:
        """Return when it is done. Raises RankError if a rank fails meanwhile."""
        if not self.is_completed():
            with measure_wait():
                while not self.is_completed():
                    self.check()
                    time.sleep(_NAP_S)
        try:
            self.work.wait()
        except RuntimeError as error:
            self.check()
            raise RankError(f"NCCL failed to sum {self.tensor.nbytes} bytes: {error}") from error
