"""Ranks as MPI processes, by mpi4py. Waits poll, so that a failed rank is noticed and none waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from mpi4py import MPI
from torch import Tensor

from engines.comm import value_messages
from engines.comm.cuda_aware import is_cuda_aware
from engines.comm.device import has_own_memory
from engines.comm.nccl import Collectives, make_collectives
from engines.comm.streams import wait_for_stream
from engines.comm.value_codec import pack_value
from engines.comm.wait_time import measure_wait
from engines.comm.world import Message, Pending
from engines.errors import RankError, ReleasedError

__all__ = ["MpiWorld"]

# A rank that waits looks this often before it lets others run, and this often more before it sleeps, each time for a
# part of the time that it has waited: where ranks share cores, the one that is waited for needs the core, and each look
# holds up all threads of its kernels.
_EAGER, _YIELDING, _NAP_S, _REST_S, _PART = 2, 100, 5e-5, 2e-3, 1 / 16
_HERE = value_messages.VALUE - 1  # a tag that no program has
_BY_OTHERS = (MPI.ERR_REVOKED, MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
# Open MPI knows Revoke and Shrink only where mpiexec was told `--with-ft ulfm`, of which this tells; without it Revoke
# does nothing and Shrink never returns. Other MPIs are not believed: none was seen to survive the death of a rank.
_FT = "OMPI_MCA_mpi_ft_enable"
_ULFM = MPI.get_vendor()[0] == "Open MPI" and os.environ.get(_FT) in ("1", "true")
# Requests under way, of which nobody asks any more, and what MPI reads and writes meanwhile.
_left: dict[int, tuple[Sequence[MPI.Request], Sequence[Tensor]]] = {}
_numbers = count()
# Messages are words of an element's size: MPI moves them and does not add.
_WORDS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


def _is_complete(request: MPI.Request) -> bool:
    """Whether MPI uses its memory no more."""
    try:
        return MPI.Is_finalized() or request.Test()
    except MPI.Exception:
        return True


def _free_abandoned() -> None:
    """Let go of those that have ended. Others may do so meanwhile, where memory is collected."""
    for number, (requests, _) in list(_left.items()):
        if all(map(_is_complete, requests)):
            _left.pop(number, None)


class _Requests:
    """MPI requests; results that passed through the host are copied back to their device at the end.

    `buffers` are what MPI reads and writes meanwhile.
    """

    def __init__(
        self,
        requests: Sequence[MPI.Request],
        staged: Sequence[tuple[Tensor, Tensor]],
        world: MpiWorld,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self.requests, self.staged, self.world, self.buffers = list(requests), staged, world, buffers

    def __del__(self) -> None:
        """After a failure nobody waits for what is under way: its memory stays as long as MPI may use it."""
        if not all(map(_is_complete, self.requests)):
            _left[next(_numbers)] = self.requests, self.buffers

    def wait(self, nap_s: float = _NAP_S) -> None:
        with self.world:
            if not MPI.Request.Testall(self.requests):
                with measure_wait():
                    self._poll_until_complete(nap_s)
        self._copy_to_device()

    def _poll_until_complete(self, nap_s: float) -> None:
        looks, began_s = 1, time.perf_counter()
        while not MPI.Request.Testall(self.requests):
            looks += 1
            if looks > _YIELDING:
                self.world.check()
                time.sleep(min(max(nap_s, (time.perf_counter() - began_s) * _PART), _REST_S))
            elif looks > _EAGER:
                os.sched_yield()

    def is_completed(self) -> bool:
        with self.world:
            if not MPI.Request.Testall(self.requests):
                return False
        self._copy_to_device()
        return True

    def _copy_to_device(self) -> None:
        for device_tensor, host_tensor in self.staged:
            device_tensor.copy_(host_tensor)
        self.staged = ()


class _PersistentRequests:
    """Messages between the same tensors again and again: MPI's persistent requests, made on the first call."""

    def __init__(self, world: MpiWorld, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.world, self.sends, self.receives = world, sends, receives
        self.comm: MPI.Intracomm | None = None
        self.pending = _Requests([], [], world)

    def __call__(self) -> Pending:
        with self.world:
            if self.comm is not self.world.comm:  # the first call, or the first after a failure
                self._connect(self.world.comm)
            _wait_for_streams(self.pending.buffers)
            MPI.Prequest.Startall(self.pending.requests)
        return self.pending

    def _connect(self, comm: MPI.Intracomm) -> None:
        requests = [comm.Recv_init(_make_buffer(m.tensor), m.peer, m.tag) for m in self.receives]
        requests += [comm.Send_init(_make_buffer(m.tensor), m.peer, m.tag) for m in self.sends]
        buffers = [message.tensor for message in (*self.receives, *self.sends)]
        self.comm, self.pending = comm, _Requests(requests, [], self.world, buffers)

    def __del__(self) -> None:
        """What is under way after a failure is not freed: MPI ends the program where such a send fails in the end."""
        for request in self.pending.requests:
            if request and not MPI.Is_finalized() and _is_complete(request):
                request.Free()


class MpiWorld:
    """A communicator. After a failure `recover` makes a fresh one. `with world:` turns MPI's errors into ours."""

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self._set_comm((comm or MPI.COMM_WORLD).Dup())

    def _set_comm(self, comm: MPI.Intracomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._collectives: dict[torch.device, Collectives | None] = {}

    def __enter__(self) -> MpiWorld:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """MPI's errors as ours; whoever sees that another rank has failed tells the rest."""
        if not isinstance(error, MPI.Exception):
            return
        released = self._has_peer_failed(error)
        self.abort()
        said = error.Get_error_string()
        if released:
            raise ReleasedError(f"released: another rank has failed ({said})") from error
        raise RankError(f"MPI failed ({said})") from error

    def _has_peer_failed(self, error: MPI.Exception) -> bool:
        """Of several requests MPI says only that one has failed; the communicator knows why."""
        if not _ULFM:
            return False
        return error.Get_error_class() in _BY_OTHERS or self.comm.Is_revoked() or self.comm.Get_failed().size > 0

    def check(self) -> None:
        """Raises ReleasedError where a rank has failed: requests that MPI starts again and again do not tell."""
        if self.comm.Is_revoked():
            raise ReleasedError("released: another rank has failed")

    def can_access(self, device: torch.device) -> bool:
        """Whether messages may lie in the memory of a device: the host's always, a GPU's where this MPI says so."""
        return not has_own_memory(device) or is_cuda_aware()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Requests:
        """Start messages. Tensors that MPI does not reach pass through the host."""
        incoming = [(message, self._stage_tensor(message.tensor)) for message in receives]
        outgoing = [(message, self._stage_tensor(message.tensor, filled=True)) for message in sends]
        _wait_for_streams([host for _, host in (*incoming, *outgoing)])
        with self:
            requests = [self.comm.Irecv(_make_buffer(host), m.peer, m.tag) for m, host in incoming]
            requests += [self.comm.Isend(_make_buffer(host), m.peer, m.tag) for m, host in outgoing]
        staged = [(message.tensor, host) for message, host in incoming if host is not message.tensor]
        return _Requests(requests, staged, self, [host for _, host in (*incoming, *outgoing)])

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Messages to be started again and again: those that MPI reaches by the same requests."""
        all_reached = all(self.can_access(message.tensor.device) for message in (*sends, *receives))
        return _PersistentRequests(self, sends, receives) if all_reached else partial(self.exchange, sends, receives)

    def collectives(self, device: torch.device) -> Collectives | None:
        """NCCL where each rank has a GPU of its own; collective."""
        if device not in self._collectives:
            self._collectives[device] = make_collectives(self, device, self._check_alive)
        return self._collectives[device]

    def _check_alive(self) -> None:
        """Raises ReleasedError where a rank has failed, also if nothing of MPI's is waited for, which would tell."""
        with self:
            self.comm.Iprobe(MPI.ANY_SOURCE, value_messages.VALUE)
        self.check()

    def _stage_tensor(self, tensor: Tensor, filled: bool = False) -> Tensor:
        """The tensor itself where MPI reaches it, else a host buffer for it, `filled` with its content."""
        if self.can_access(tensor.device):
            return tensor
        return tensor.cpu() if filled else torch.empty_like(tensor, device="cpu")

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, pickled."""
        _free_abandoned()
        self.barrier()
        return value_messages.all_gather(self, value, self._check_whole)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0, pickled, one after another."""
        self.barrier()
        if self.rank == 0:
            return [value, *(value_messages.receive(self, peer, self._check_whole) for peer in range(1, self.size))]
        value_messages.send(self, 0, pack_value(value)).wait()
        return []

    def _check_whole(self) -> None:
        """Raises ReleasedError where a rank has failed: what came without an error may then have no sense in it."""
        self.check()
        if _ULFM and self.comm.Get_failed().size:
            self.abort()
            raise ReleasedError("released: another rank has died")

    def barrier(self) -> None:
        """Return when every rank is here; sleeps meanwhile. Then those that slept wait for each other to awake.

        A dissemination barrier (Hensgen, Finkel and Manber, 1988): after each round every rank knows of twice as many.
        """
        nothing = torch.empty(0)
        for nap_s in (_REST_S, _NAP_S):
            step = 1
            while step < self.size:
                after, before = (self.rank + step) % self.size, (self.rank - step) % self.size
                self.exchange([Message(after, _HERE, nothing)], [Message(before, _HERE, nothing)]).wait(nap_s)
                step *= 2

    def exit_process(self, code: int) -> NoReturn:
        """End this process in order, whatever the code; collective. (An exit by exception would abort the job.)"""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.Finalize()
        os._exit(code)

    def abort(self) -> None:
        """Revoke the communicator (ULFM), so that no rank waits for this one. (Without it they await an interrupt.)"""
        if _ULFM:
            self.comm.Revoke()

    def recover(self) -> None:
        """A fresh communicator of the ranks that live. (The revoked one cannot be freed: that is collective.)

        Raises RankError where this MPI has no ULFM: there only new processes help.
        """
        if not _ULFM:
            raise RankError(
                f"{' '.join(map(str, MPI.get_vendor()))} was started without fault tolerance (ULFM): after a failure "
                "all ranks must be started again. Call heal() on the cluster."
            )
        for ended in filter(None, self._collectives.values()):
            ended.abort()
        with measure_wait():
            common = self.comm.Shrink()
        self._set_comm(common)


def _wait_for_streams(buffers: Sequence[Tensor]) -> None:
    """MPI reads and writes outside of torch's streams: what these are to do with the buffers is done before."""
    for device in {buffer.device for buffer in buffers}:
        wait_for_stream(device)


def _make_buffer(tensor: Tensor) -> list[Any]:
    """The memory of a tensor as MPI takes it; asking the tensor itself (by DLPack) costs ten times as much."""
    if not tensor.is_contiguous():
        raise RankError(f"a message of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel(), _WORDS[tensor.itemsize]]
