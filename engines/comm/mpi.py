"""Ranks as MPI processes, by mpi4py. Waits poll, so that a failed rank is noticed and none waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from mpi4py import MPI
from torch import Tensor

from engines.comm.world import Message, Pending
from engines.errors import RankError, ReleasedError

__all__ = ["MpiWorld"]

# A rank that waits looks this often before it lets others run, and this often more before it sleeps, each time
# a little longer: where ranks share cores, the one that is waited for needs the core.
_EAGER, _YIELDING, _NAP_S, _REST_S = 20, 60, 5e-5, 2e-3
_BY_OTHERS = (MPI.ERR_REVOKED, MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


class _Requests:
    """MPI requests; results that passed through the host are copied back to their device at the end."""

    def __init__(self, requests: Sequence[MPI.Request], staged: Sequence[tuple[Tensor, Tensor]], world: MpiWorld):
        self.requests, self.staged, self.world = list(requests), staged, world

    def wait(self, nap_s: float = _NAP_S) -> None:
        looks = 0
        with self.world.noticing():
            while not MPI.Request.Testall(self.requests):
                looks += 1
                if looks > _YIELDING:
                    time.sleep(min(nap_s * (looks // _YIELDING), _REST_S))
                elif looks > _EAGER:
                    os.sched_yield()
        for device_tensor, host_tensor in self.staged:
            device_tensor.copy_(host_tensor)


class MpiWorld:
    """A communicator. After a failure `recover` makes a fresh one."""

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self._adopt((comm or MPI.COMM_WORLD).Dup())

    def _adopt(self, comm: MPI.Intracomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """MPI's errors as ours; whoever sees that another rank has failed tells the rest."""
        try:
            yield
        except MPI.Exception as error:
            released = self._others_failed(error)
            self.fail()
            said = error.Get_error_string()
            if released:
                raise ReleasedError(f"released: another rank has failed ({said})") from error
            raise RankError(f"MPI failed ({said})") from error

    def _others_failed(self, error: MPI.Exception) -> bool:
        """Of several requests MPI says only that one has failed; the communicator knows why."""
        return error.Get_error_class() in _BY_OTHERS or self._comm.Is_revoked() or self._comm.Get_failed().size > 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages. CUDA tensors pass through the host."""
        incoming = [(message, _host(message.tensor)) for message in receives]
        with self.noticing():
            requests = [self._comm.Irecv(host, message.peer, message.tag) for message, host in incoming]
            requests += [self._comm.Isend(_host(m.tensor, filled=True), m.peer, m.tag) for m in sends]
        staged = [(message.tensor, host) for message, host in incoming if host is not message.tensor]
        return _Requests(requests, staged, self)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, pickled."""
        self.rest()
        with self.noticing():
            return self._comm.allgather(value)

    def rest(self) -> None:
        """Return when every rank is here; sleeps meanwhile."""
        with self.noticing():
            barrier = self._comm.Ibarrier()
        _Requests([barrier], [], self).wait(nap_s=_REST_S)

    def leave(self, code: int) -> NoReturn:
        """End this process in order, whatever the code; collective. (An exit by exception would abort the job.)"""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.Finalize()
        os._exit(code)

    def fail(self) -> None:
        """Revoke the communicator (ULFM), so that no rank waits for this one."""
        self._comm.Revoke()

    def recover(self) -> None:
        """A fresh communicator of the ranks that live. (The revoked one cannot be freed: that is collective.)"""
        self._adopt(self._comm.Shrink())


def _host(tensor: Tensor, filled: bool = False) -> Tensor:
    """The tensor itself on the CPU, else a host buffer for it, `filled` with its content.

    MPI reads the buffer from outside torch's stream: the copy to the host waits for the stream.
    """
    if tensor.device.type == "cpu":
        return tensor
    return tensor.cpu() if filled else torch.empty_like(tensor, device="cpu")
