"""All-reduce by NCCL between ranks that each have a GPU of their own: directly from GPU memory to GPU memory.

NCCL's kernels wait on the GPU for those of the other ranks. If two sums were started in different orders on different
ranks, GPUs could deadlock (NCCL user guide, "Using multiple NCCL communicators concurrently"). Programs request sums as
gradients become available, each rank in its own order; a sum requested before its turn is therefore held back.

  rank 0 requests  A B C       all ranks start  A B C
  rank 1 requests  B C A       (B and C are held until A is requested)
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl_nb.engines.comm.device import get_gpu_id
from mpi4dl_nb.engines.comm.status_board import measure_wait
from mpi4dl_nb.engines.comm.world import SubGroup, World
from mpi4dl_nb.engines.errors import RankError

_SWITCH = "MPI4DL_NB_NCCL"

PATIENCE = timedelta(seconds=60)
"""How long to wait for the other ranks."""

Group = Any
"""A process group of torch.distributed, of any backend."""


def _make_tcp_store(world: World) -> dist.TCPStore:
    """Return this rank's client of a TCP store on rank 0; collective. The world's messages carry its address."""
    hosts = world.all_gather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if world.rank == 0:
        # Port 0: the system chooses a free one. Rank 0 must not wait for the others here, as they still need the port.
        store = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    port = world.all_gather(store and store.port)[0]
    return store or dist.TCPStore(host, port, world.size, is_master=False, wait_for_workers=False, timeout=PATIENCE)


class Collectives:
    """NCCL process groups, valid until a rank fails; `check` raises RankError if one has failed.

    `made` makes a process group from a store, this rank's number in the group, and the group's size.
    """

    def __init__(self, world: World, check: Callable[[], None], made: Callable[..., Group]) -> None:
        self.check, self._world, self._made = check, world, made
        self._groups: dict[tuple[int, ...], Group] = {}

    def connect_group(self, ranks: Sequence[int], device: torch.device) -> Group:
        """Return the process group of these ranks; collective over them. Raises RankError if connecting fails."""
        if (key := tuple(ranks)) not in self._groups:
            part = SubGroup(self._world, key)  # ranks outside of the group do not take part in the rendezvous
            try:
                group = self._made(_make_tcp_store(part), part.rank, part.size)
                # The first sum connects the GPUs, which takes seconds: here, not within a step.
                group.allreduce([torch.zeros(1, device=device)]).wait()
            except RankError:  # another rank has failed meanwhile
                raise
            except RuntimeError as error:
                raise RankError(
                    f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, key))}: {error}. NCCL_DEBUG=INFO "
                    f"tells why; with {_SWITCH}=0 gradients are summed by MPI."
                ) from error
            self._groups[key] = group
        return self._groups[key]

    def abort(self) -> None:
        """Abort the sums in flight: kernels that wait for a failed rank would otherwise wait for ever."""
        for group in self._groups.values():
            group.abort()


def make_collectives(world: World, device: torch.device, check: Callable[[], None]) -> Collectives | None:
    """Return NCCL's collectives if it is available and each rank has a GPU of its own, else None; collective."""
    # NCCL connects GPUs, not processes: two ranks that share a GPU cannot be in one group.
    gpus = world.all_gather(_get_nccl_gpu(device))
    if not all(gpus) or len(set(gpus)) < world.size:
        return None
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # `check` detects failed ranks

    def make_group(store: dist.Store, rank: int, size: int) -> Group:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=365)  # waits check whether the other ranks are alive; they have no time limit
        return dist.ProcessGroupNCCL(store, rank, size, options)

    return Collectives(world, check, make_group)


def _get_nccl_gpu(device: torch.device) -> str:
    """Return the GPU's identifier; "" if NCCL is not available or `MPI4DL_NB_NCCL=0` disables it."""
    can_be_had = dist.is_available() and dist.is_nccl_available() and os.environ.get(_SWITCH) != "0"
    return get_gpu_id(device) if can_be_had else ""


class OrderedStarter:
    """Starts requests in the cyclic order of their numbers, 0 to `count` - 1, whatever order they are made in."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0
        self._held: dict[int, Callable[[], None]] = {}

    def begin(self, number: int, start: Callable[[], None]) -> None:
        """Start the request if it is its turn, and then all held requests that follow; otherwise hold it."""
        self._held[number] = start
        # One start may make several held ones due; after the last number the next step begins again at 0.
        while self._next in self._held:
            self._held.pop(self._next)()
            self._next = (self._next + 1) % self._count


class NcclAllReduce:
    """The all-reduce of `tensor` over a group's ranks, in place; started in every step, as an `AllReduceRequest`.

    `number` is its place in the order of all sums of its rank.
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
        """Return at once whether the sum is complete."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> None:
        """Return when the sum is complete. Raises RankError if a rank fails meanwhile."""
        if not self.is_completed():
            with measure_wait():
                # `work.wait` would block without noticing a failed rank; a held sum has no work object yet.
                while not self.is_completed():
                    self.check()
                    time.sleep(5e-5)
        try:
            self.work.wait()
        except RuntimeError as error:
            self.check()
            raise RankError(f"NCCL failed to sum {self.tensor.nbytes} bytes: {error}") from error


@contextmanager
def connect_gloo(world: World) -> Iterator[Callable[[Tensor], object] | None]:
    """Yield gloo's all-reduce in place over all ranks of a world, for comparison; None if there is no gloo; collective.

    Rank 0 listens; the world's messages carry its address to the others.
    """
    if not all(world.all_gather(dist.is_available() and dist.is_gloo_available())):
        yield None
        return
    store = _make_tcp_store(world)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=PATIENCE)
    try:
        yield dist.all_reduce
    finally:
        dist.destroy_process_group()
