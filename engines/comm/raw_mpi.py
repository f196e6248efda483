"""The lowest cost of messages in mpi4py, as the baseline for the project's own exchange."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from mpi4dl_nb.engines.comm.mpi import MpiWorld
from mpi4dl_nb.engines.comm.world import Message


class RawMessages:
    """Persistent sends and receives of host buffers, `Startall`, `Waitall`: no polling, no detection of failures."""

    def __init__(self, world: MpiWorld, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        comm = world.comm
        self.requests = [comm.Recv_init(m.tensor.numpy(), m.peer, m.tag) for m in receives]
        self.requests += [comm.Send_init(m.tensor.numpy(), m.peer, m.tag) for m in sends]

    def __call__(self) -> None:
        MPI.Prequest.Startall(self.requests)
        MPI.Request.Waitall(self.requests)


class RawAllReduce:
    """`MPI_Allreduce` of a host tensor, in place, over all ranks."""

    def __init__(self, world: MpiWorld) -> None:
        self.comm = world.comm

    def __call__(self, tensor: Tensor) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, tensor.numpy())
