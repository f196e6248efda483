"""Ranks as MPI processes, by mpi4py. Waits poll, so that a failed rank is noticed and none waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from mpi4py import MPI
from torch import Tensor

from engines.comm.world import Message, Pending
from engines.errors import RankError

__all__ = ["MpiWorld"]

# A rank that waits looks this often before it lets others run, and this often more before it sleeps:
# where ranks share cores, the one that is waited for needs the core.
_EAGER, _YIELDING, _NAP_S, _REST_S = 20, 200, 5e-5, 5e-3


class _Requests:
    """MPI requests; results that passed through the host are copied back to their device at the end."""

    def __init__(
        self, requests: Sequence[MPI.Request], staged: Sequence[tuple[Tensor, Tensor]], world: MpiWorld
    ):
        self.requests, self.staged, self.world = list(requests), staged, world

    def wait(self, nap_s: float = _NAP_S) -> None:
        looks = 0
        try:
            while not MPI.Request.Testall(self.requests):
                looks += 1
                if looks > _YIELDING:
                    time.sleep(nap_s)
                elif looks > _EAGER:
                    os.sched_yield()
        except MPI.Exception as error:
            self.world.fail()
            raise RankError(f"released: another rank has failed ({error.Get_error_string()})") from error
        for device_tensor, host_tensor in self.staged:
            device_tensor.copy_(host_tensor)


class MpiWorld:
    """A communicator with its subgroups. After a failure `recover` makes fresh ones."""

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self._adopt((comm or MPI.COMM_WORLD).Dup())

    def _adopt(self, comm: MPI.Intracomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {tuple(range(comm.size)): comm}
        self.rank, self.size = comm.rank, comm.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages. CUDA tensors pass through the host."""
        incoming = [(message, _host(message.tensor)) for message in receives]
        requests = [self._comm.Irecv(host, message.peer, message.tag) for message, host in incoming]
        requests += [self._comm.Isend(_host(m.tensor, filled=True), m.peer, m.tag) for m in sends]
        staged = [(message.tensor, host) for message, host in incoming if host is not message.tensor]
        return _Requests(requests, staged, self)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start a sum, in place."""
        host = _host(tensor, filled=True)
        request = self._group(group).Iallreduce(MPI.IN_PLACE, host, MPI.SUM)
        return _Requests([request], [(tensor, host)] if host is not tensor else [], self)

    def _group(self, ranks: tuple[int, ...]) -> MPI.Intracomm:
        if ranks not in self._groups:
            sub = self._comm.Create_group(self._comm.Get_group().Incl(list(ranks)))
            sub.Set_errhandler(MPI.ERRORS_RETURN)
            self._groups[ranks] = sub
        return self._groups[ranks]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, pickled."""
        try:
            return self._comm.allgather(value)
        except MPI.Exception as error:
            raise RankError(f"released: another rank has failed ({error.Get_error_string()})") from error

    def rest(self) -> None:
        """Return when every rank is here; sleeps meanwhile."""
        _Requests([self._comm.Ibarrier()], [], self).wait(nap_s=_REST_S)

    def leave(self, code: int) -> NoReturn:
        """End this process in order, whatever the code; collective. (An exit by exception would abort the job.)"""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.Finalize()
        os._exit(code)

    def fail(self) -> None:
        """Revoke every communicator (ULFM), so that no rank waits for this one."""
        for comm in self._groups.values():
            comm.Revoke()

    def recover(self) -> None:
        """A fresh communicator of the ranks that live."""
        self._adopt(self._comm.Shrink())


def _host(tensor: Tensor, filled: bool = False) -> Tensor:
    """The tensor itself on the CPU, else a host buffer for it, `filled` with its content.

    MPI reads the buffer from outside torch's stream: the copy to the host waits for the stream.
    """
    if tensor.device.type == "cpu":
        return tensor
    return tensor.cpu() if filled else torch.empty_like(tensor, device="cpu")
