"""Ranks as MPI processes, by mpi4py. Waits poll, so that a failed rank is noticed and no rank waits for it for ever."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import has_own_memory
from mpi4dl_nb.engines.comm.nccl import Collectives, make_collectives
from mpi4dl_nb.engines.comm.start import use_mpi_home
from mpi4dl_nb.engines.comm.status_board import measure_wait
from mpi4dl_nb.engines.comm.streams import wait_for_stream
from mpi4dl_nb.engines.comm.world import BARRIER_TAG, VALUE_TAG, Message, World, pack_value, receive_value, send_value
from mpi4dl_nb.engines.errors import RankError, ReleasedError
from mpi4dl_nb.engines.formatting import format_bytes

with use_mpi_home():  # the import initialises MPI, which reads settings from HOME
    from mpi4py import MPI


@cache
def is_cuda_aware() -> bool:
    """Return whether this MPI says that it reads and writes the memory of NVIDIA GPUs itself.

    Open MPI and MPICH have a function for this, others none. An MPI that does not report support gets its messages in
    host memory.
    """
    library = ctypes.CDLL(MPI.__file__)  # finds the functions of the libraries that it is linked to, too
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH; the first argument is MPIX_GPU_SUPPORT_CUDA
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(0, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False


# How a waiting rank polls: _EAGER times at once, up to _YIELDING times with a yield of the core in between, then with
# sleeps of _PART of the time waited so far, at most _REST_S. Where ranks share cores, the rank that is waited for needs
# the core, and each poll holds up all threads of its kernels.
_EAGER, _YIELDING, _NAP_S, _REST_S, _PART = 2, 100, 5e-5, 2e-3, 1 / 16
_BY_OTHERS = (MPI.ERR_REVOKED, MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
# Open MPI supports Revoke and Shrink only if mpiexec was started with `--with-ft ulfm`, which sets this variable;
# without it Revoke does nothing and Shrink never returns. Other MPIs are not trusted: none was seen to survive the
# death of a rank.
_FT = "OMPI_MCA_mpi_ft_enable"
_ULFM = MPI.get_vendor()[0] == "Open MPI" and os.environ.get(_FT) in ("1", "true")
# Requests in flight that nothing waits for any more, and the buffers that MPI still reads and writes for them.
_left: dict[int, tuple[Sequence[MPI.Request], Sequence[Tensor]]] = {}
_numbers = count()
# Messages are sent as the longest words that divide them, whatever their elements: MPI moves data but never does
# arithmetic on it, and counts words in 32 bits.
_MOST_WORDS = 2**31 - 1
_WORDS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


def _is_complete(request: MPI.Request) -> bool:
    """Return whether MPI no longer uses the request's memory."""
    try:
        return MPI.Is_finalized() or request.Test()
    except MPI.Exception:
        return True


def _free_requests(requests: Iterable[MPI.Request]) -> None:
    """Free those of completed requests that are persistent: MPI frees the others as they complete."""
    # Only completed ones: MPI ends the program if a request that was freed after a failure fails later.
    for request in requests:
        if isinstance(request, MPI.Prequest) and request and not MPI.Is_finalized():
            request.Free()


Staged = Sequence[tuple[Tensor, Tensor]]


class _Requests:
    """MPI requests in flight. Results staged through the host are copied to their device on completion.

    `buffers` are the tensors that MPI reads and writes until then.
    """

    def __init__(
        self, world: MpiWorld, requests: Sequence[MPI.Request], buffers: Sequence[Tensor], staged: Staged = ()
    ) -> None:
        self.world, self.buffers, self.staged, self.requests = world, buffers, staged, list(requests)

    def __del__(self) -> None:
        """After a failure nothing waits for these requests: keep their buffers for as long as MPI may use them."""
        if not hasattr(self, "requests"):  # an interrupt has ended `__init__`
            return
        if all(map(_is_complete, self.requests)):
            _free_requests(self.requests)
        else:
            _left[next(_numbers)] = self.requests, self.buffers

    def wait(self, nap_s: float = _NAP_S) -> None:
        with self.world:
            # Test once before measuring: where messages were faster than computation, no wait is counted.
            if not MPI.Request.Testall(self.requests):
                with measure_wait():
                    looks, began_s = 1, time.perf_counter()
                    while not MPI.Request.Testall(self.requests):
                        looks += 1
                        if looks > _YIELDING:
                            # Polling alone would never end if a peer has died: persistent requests do not report it.
                            self.world.check()
                            # In proportion to the time waited: it delays a long wait by 1/16 at most, and a rank that
                            # waits for minutes leaves its core to the others.
                            time.sleep(min(max(nap_s, (time.perf_counter() - began_s) * _PART), _REST_S))
                        elif looks > _EAGER:
                            os.sched_yield()
        self._copy_to_device()

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
    """Messages between the same tensors, started repeatedly: MPI persistent requests, created on the first call."""

    def __init__(self, world: MpiWorld, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.world, self.sends, self.receives = world, sends, receives
        self.comm: MPI.Comm | None = None
        self.requests: list[MPI.Prequest] = []
        self.pending = _Requests(world, [], [])

    def __call__(self) -> _Requests:
        with self.world:
            comm = self.world.comm
            if self.comm is not comm:  # the first call, or the first after a failure
                self.requests = [comm.Recv_init(_make_buffer(m.tensor), m.peer, m.tag) for m in self.receives]
                self.requests += [comm.Send_init(_make_buffer(m.tensor), m.peer, m.tag) for m in self.sends]
                buffers = [message.tensor for message in (*self.receives, *self.sends)]
                self.comm, self.pending = comm, _Requests(self.world, self.requests, buffers)
            _wait_for_streams(self.pending.buffers)
            MPI.Prequest.Startall(self.requests)
        return self.pending


class MpiWorld(World):
    """A communicator, replaced by `recover` after a failure. `with world:` converts MPI's errors to the project's."""

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self._set_comm((comm or MPI.COMM_WORLD).Dup())

    def _set_comm(self, comm: MPI.Comm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._collectives: dict[torch.device, Collectives | None] = {}

    def __enter__(self) -> MpiWorld:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Convert MPI errors to RankError or ReleasedError, and revoke the communicator so that no other rank waits."""
        if not isinstance(error, MPI.Exception):
            return
        # The error's class alone does not tell who has failed: for several requests MPI reports only that one of them
        # has. So ask the communicator too, and before `revoke`.
        by_others = error.Get_error_class() in _BY_OTHERS
        released = _ULFM and (by_others or self.comm.Is_revoked() or self.comm.Get_failed().size > 0)
        self.revoke()
        text = error.Get_error_string()
        if released:
            raise ReleasedError(f"released: another rank has failed ({text})") from error
        raise RankError(f"MPI failed ({text})") from error

    def check(self) -> None:
        """Raise ReleasedError if the communicator was revoked: persistent requests do not report failed ranks."""
        if self.comm.Is_revoked():
            raise ReleasedError("released: another rank has failed")

    def can_access(self, device: torch.device) -> bool:
        """Return whether messages may be in a device's memory: the host's always, a GPU's if this MPI is CUDA-aware."""
        return not has_own_memory(device) or is_cuda_aware()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Requests:
        """Start messages. Tensors that MPI cannot access are staged through the host."""
        incoming = [(message, self._stage_tensor(message.tensor)) for message in receives]
        outgoing = [(message, self._stage_tensor(message.tensor, filled=True)) for message in sends]
        buffers = [host for _, host in (*incoming, *outgoing)]
        _wait_for_streams(buffers)
        staged = [(message.tensor, host) for message, host in incoming if host is not message.tensor]
        # An interrupt may come between two messages: those that MPI has begun are in `pending`, with their buffers.
        pending = _Requests(self, [], buffers, staged)
        with self:
            # Receives first: a message whose receive is posted needs no buffer inside MPI.
            for message, host in incoming:
                pending.requests.append(self.comm.Irecv(_make_buffer(host), message.peer, message.tag))
            for message, host in outgoing:
                pending.requests.append(self.comm.Isend(_make_buffer(host), message.peer, message.tag))
        return pending

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], _Requests]:
        """Return a function that starts the same messages each time, persistent ones if MPI accesses all tensors."""
        # A staged tensor is copied to a new host buffer in every round, to which no persistent request could be tied.
        all_reached = all(self.can_access(message.tensor.device) for message in (*sends, *receives))
        return _PersistentRequests(self, sends, receives) if all_reached else partial(self.exchange, sends, receives)

    def collectives(self, device: torch.device) -> Collectives | None:
        """Return NCCL's collectives if each rank has a GPU of its own, else None; collective."""
        if device not in self._collectives:
            self._collectives[device] = make_collectives(self, device, self._check_alive)
        return self._collectives[device]

    def _check_alive(self) -> None:
        """Raise ReleasedError if a rank has failed, even while no MPI request is waited for that would report it."""
        with self:
            # Only a call on the communicator makes MPI report a failure; the result of the probe does not matter.
            self.comm.Iprobe(MPI.ANY_SOURCE, VALUE_TAG)
        self.check()

    def _stage_tensor(self, tensor: Tensor, filled: bool = False) -> Tensor:
        """Return the tensor itself if MPI can access it, else a host buffer for it, `filled` with its content."""
        if self.can_access(tensor.device):
            return tensor
        return tensor.cpu() if filled else torch.empty_like(tensor, device="cpu")

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, each sent by `pack_value`; collective."""
        # Free abandoned requests that have completed meanwhile. Over a copy: garbage collection may add requests
        # (`_Requests.__del__`), or another thread remove them.
        for key, (requests, _) in _left.copy().items():
            if all(map(_is_complete, requests)):
                _free_requests(requests)
                _left.pop(key, None)
        # A rank that is early sleeps in the barrier, so that the polls for the messages after it are few.
        self.barrier()
        return super().all_gather(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, received one after another; [] on other ranks."""
        self.barrier()
        if self.rank == 0:
            return [value, *(receive_value(self, peer) for peer in range(1, self.size))]
        send_value(self, 0, pack_value(value)).wait()
        return []

    def check_received(self) -> None:
        """Raise ReleasedError if a rank has failed: a message received without an error may then be invalid."""
        self.check()
        if _ULFM and self.comm.Get_failed().size:
            self.revoke()
            raise ReleasedError("released: another rank has died")

    def barrier(self) -> None:
        """Return when every rank is here. Ranks sleep while they wait; a second barrier then aligns their wake-up.

        A dissemination barrier (Hensgen, Finkel and Manber, 1988): each round doubles the number of ranks that a rank
        knows to be here. Of 5 ranks, rank 0 knows after the rounds:

            step 1, from rank 4:    4 0
            step 2, from rank 3:    2 3 4 0
            step 4, from rank 1:    2 3 4 0 1
        """
        nothing = torch.empty(0)
        for nap_s in (_REST_S, _NAP_S):
            step = 1
            while step < self.size:
                peers = self.rank + step, self.rank - step
                after, before = ([Message(peer % self.size, BARRIER_TAG, nothing)] for peer in peers)
                self.exchange(after, before).wait(nap_s)
                step *= 2

    def exit_process(self, code: int) -> NoReturn:
        """Finalise MPI and end this process with any code; collective. (An exit by exception would abort the job.)"""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.Finalize()
        os._exit(code)

    def revoke(self) -> None:
        """Revoke the communicator (see `World.revoke`). Without ULFM, ranks wait until they are interrupted."""
        if _ULFM:
            self.comm.Revoke()

    def renew(self) -> None:
        """Drop all messages in flight while every rank is alive, with or without ULFM; collective."""
        if _ULFM:
            super().renew()
        else:
            self._abort_collectives()
            self._set_comm(self.comm.Dup())  # messages never match those of another communicator

    def recover(self) -> None:
        """Make a new communicator of the surviving ranks. (The revoked one cannot be freed: that is collective.)

        Raises RankError if this MPI has no ULFM: there only new processes help.
        """
        if not _ULFM:
            raise RankError(
                f"{' '.join(map(str, MPI.get_vendor()))} was started without fault tolerance (ULFM): after a failure "
                "all ranks must be started again. Call heal() on the cluster."
            )
        self._abort_collectives()  # before Shrink: NCCL kernels that wait for the failed rank would block the GPU
        with measure_wait():
            common = self.comm.Shrink()
        self._set_comm(common)

    def _abort_collectives(self) -> None:
        for ended in filter(None, self._collectives.values()):
            ended.abort()


def _wait_for_streams(buffers: Sequence[Tensor]) -> None:
    """Wait until the CUDA streams have finished with the buffers: MPI reads and writes outside of torch's streams."""
    for device in {buffer.device for buffer in buffers}:
        wait_for_stream(device)


def _make_buffer(tensor: Tensor) -> list[Any]:
    """Return a tensor's memory as MPI takes it; passing the tensor itself (by DLPack) costs ten times as much."""
    if not tensor.is_contiguous():
        raise RankError(f"a message of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    size = tensor.nbytes
    word = min(size & -size, 16) or 16  # the lowest bit that is set is the largest power of 2 that divides the size
    if size // word > _MOST_WORDS:
        raise RankError(
            f"a message of shape {tuple(tensor.shape)} has {format_bytes(size)}, and MPI sends "
            f"{format_bytes(_MOST_WORDS * word)} at most. Use more tiles or stages, or smaller micro-batches."
        )
    return [MPI.memory.fromaddress(tensor.data_ptr(), size), size // word, _WORDS[word]]
