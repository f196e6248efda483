"""A device with streams, of which only the order exists: whatever two of them do to the same bytes must come in order.

Kernels run on the processor, at once. Each is written down with its stream and with what that one has waited for
(vector clocks; Mattern, 1989), and each byte with who wrote and read it last: a sanitizer, as CUDA has one.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpi4dl_nb.engines.comm import streams
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld
from mpi4dl_nb.engines.comm.world import Message, Pending
from mpi4dl_nb.engines.program import exchange_runner, message_buffers, update

HOST_MEMORY = torch.device("cpu", 1)  # another one than that of kernels, for those who ask
_UNREAD = ("aten::empty_like", "aten::zeros_like", "aten::full_like", "aten::new_empty", "aten::new_zeros")
_COPIES = ("aten::copy_", "aten::_to_copy")


class RaceError(AssertionError):
    """Two streams have used the same bytes in no order."""


class Stream:
    """What is done in it comes in order; `seen` is what it knows to be done, by stream."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, defaultdict(int)

    def wait_stream(self, other: Stream) -> None:
        self.join(other.seen)

    def join(self, seen: dict[str, int]) -> None:
        for name, time in seen.items():
            self.seen[name] = max(self.seen[name], time)

    def record_event(self) -> Event:
        return Event(dict(self.seen))


class Event:
    """Never passed before somebody waits for it: the device is as slow as can be."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        rank().host.join(self.seen)


class Bytes:
    """When each byte of a storage was last written and read, by stream. `pool`: the stream that it was made in."""

    def __init__(self, count: int, pool: Stream | None = None) -> None:
        self.times = {False: {}, True: {}}
        self.count, self.pool, self.recorded = count, pool, set()

    def use(self, tensor: Tensor, stream: Stream, writes: bool, what: str) -> None:
        for kind in (True, False) if writes else (True,):
            for name, times in self.times[kind].items():
                if name != stream.name and _select_times(times, tensor).max(initial=0) > stream.seen[name]:
                    raise RaceError(f"{what} in {stream.name}, which has not waited for {name}")
        mine = self.times[writes].setdefault(stream.name, np.zeros(self.count, np.int32))
        _select_times(mine, tensor)[...] = stream.seen[stream.name]

    def check_free(self, stream: Stream) -> None:
        """A caching allocator gives memory to others in `stream`, that of its pool, unless it was told of others."""
        used = [(name, times.max(initial=0)) for kind in self.times.values() for name, times in kind.items()]
        for name, last in used:
            if name not in (stream.name, *self.recorded) and last > stream.seen[name]:
                raise RaceError(f"memory is used again in {stream.name}, which has not waited for {name}")


def _select_times(times: np.ndarray, tensor: Tensor) -> np.ndarray:
    size = tensor.itemsize
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    strides = tuple(stride * times.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(times[tensor.storage_offset() * size :], shape, strides)


class Rank(TorchDispatchMode):
    """One rank's device and its host, and what is known of each byte of both."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.computing = Stream("host"), Stream("computing")
        self.beside = Stream("leaving"), Stream("arriving")
        self.current, self.off = self.computing, False
        self.bytes: dict[int, Bytes] = {}
        self.freed: list[Bytes] = []
        self.on_host: dict[int, Tensor] = {}  # held, so that no other tensor gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.off or _is_view_operator(func)):
            self._write_down(func, args, kwargs or {}, _list_tensors(result))
        return result

    def _write_down(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Sequence[Tensor]) -> None:
        name, places = func._schema.name, func._schema.arguments
        given = dict(zip((place.name for place in places), args, strict=False)) | kwargs
        written = _list_tensors(
            [given.get(place.name) for place in places if place.alias_info and place.alias_info.is_write]
        )
        read = _list_tensors(given)
        fresh = [tensor for tensor in made if get_address(tensor) not in set(map(get_address, read))]
        for tensor in fresh:
            self._record_allocation(tensor)
            if read and all(map(self.is_host, read)) and given.get("device") is None:
                self.on_host[get_address(tensor)] = tensor
        self.use(name, [] if name in _UNREAD else read, [*written, *fresh], given.get("non_blocking", False))
        if name == "aten::_local_scalar_dense":
            self.host.join(self.current.seen)

    def _record_allocation(self, tensor: Tensor) -> None:
        """Check all freed memory that is large enough: which of it the allocator chooses is chance."""
        self.current.join(self.host.seen)
        storage = tensor.untyped_storage()
        for block in list(self.freed):
            if block.pool is self.current and block.count >= storage.nbytes():
                block.check_free(self.current)
                self.freed.remove(block)  # what this stream has waited for once, it need not wait for again
        block = self.bytes[storage.data_ptr()] = Bytes(storage.nbytes(), self.current)
        weakref.finalize(storage, self._free, storage.data_ptr(), block).atexit = False

    def _free(self, address: int, block: Bytes) -> None:
        self.freed.append(block)
        if self.bytes.get(address) is block:
            del self.bytes[address]

    def use(self, what: str, read: Sequence[Tensor], written: Sequence[Tensor], in_stream: bool = False) -> None:
        where = {self.is_host(tensor) for tensor in (*read, *written)}
        stream = self.host if where == {True} else self.current
        if len(where) > 1 and what not in _COPIES:
            raise RaceError(f"{what} computes with memory of the host and of the device")
        if stream is not self.host:
            stream.join(self.host.seen)  # it is told now
        stream.seen[stream.name] += 1
        for tensor in read:
            self._use(tensor, stream, False, what)
        for tensor in written:
            self._use(tensor, stream, True, what)
        if len(where) > 1 and not in_stream:
            self.host.join(stream.seen)

    def _use(self, tensor: Tensor, stream: Stream, writes: bool, what: str) -> None:
        count, there = tensor.untyped_storage().nbytes(), self.bytes.get(get_address(tensor))
        if there is None or there.count != count:  # another one's memory, used again
            there = self.bytes[get_address(tensor)] = Bytes(count)
        there.use(tensor, stream, writes, what)

    def is_host(self, tensor: Tensor) -> bool:
        return get_address(tensor) in self.on_host

    @contextmanager
    def pause_watching(self) -> Iterator[None]:
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before


class World(LoopbackWorld):
    """Messages of the host's memory are the host's business from when they start; others it waits for."""

    def can_access(self, device: torch.device) -> bool:
        """No MPI that reads a GPU's memory."""
        return False

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        mine = rank()
        self._use([message.tensor for message in sends], [message.tensor for message in receives])
        with mine.pause_watching():
            return _Watched(super().exchange(sends, receives), mine)

    def _use(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        mine = rank()
        mine.host.join({} if all(map(mine.is_host, (*read, *written))) else mine.computing.seen)
        mine.use("a message", [t for t in read if mine.is_host(t)], [t for t in written if mine.is_host(t)])


class _Watched:
    def __init__(self, pending: Pending, rank: Rank) -> None:
        self.pending, self.rank = pending, rank

    def wait(self) -> None:
        with self.rank.pause_watching():
            self.pending.wait()

    def is_completed(self) -> bool:
        with self.rank.pause_watching():
            return self.pending.is_completed()


_here = threading.local()


def rank() -> Rank:
    """That of this thread."""
    return _here.rank


@contextmanager
def watch_streams(world: LoopbackWorld) -> Iterator[World]:
    """Within it the thread is a rank whose device has streams."""
    _here.rank = Rank()
    with _here.rank:
        yield World(world.rank, world.size, world._mail)


def get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_view_operator(func: Any) -> bool:
    """Whether an operator makes views alone."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _list_tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes()]


def _make_host_allocator(device: torch.device, world: object, allocate: object = None) -> Callable[[int], Tensor]:
    def make(count: int) -> Tensor:
        with rank().pause_watching():
            made = torch.empty(count, dtype=torch.uint8)
        rank().on_host[get_address(made)] = made
        return made

    return make


@contextmanager
def _use_stream(stream: Stream) -> Iterator[None]:
    mine = rank()
    before, mine.current = mine.current, stream
    try:
        yield
    finally:
        mine.current = before


def _record(tensor: Tensor, stream: Stream) -> None:
    rank().bytes[get_address(tensor)].recorded.add(stream.name)


class _Cuda:
    stream = staticmethod(_use_stream)

    @staticmethod
    def current_stream(device: torch.device) -> Stream:
        return rank().current


class _Torch:
    cuda = _Cuda


def use_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks believe that what they compute with lies elsewhere than on their host."""
    monkeypatch.setattr(streams, "torch", _Torch)
    monkeypatch.setattr(streams, "_get_copy_streams", lambda device: rank().beside)
    monkeypatch.setattr(Tensor, "record_stream", _record)
    for module in (exchange_runner, message_buffers, update):
        monkeypatch.setattr(module, "choose_message_device", lambda device, world: HOST_MEMORY)
    for module in (exchange_runner, update):
        monkeypatch.setattr(module, "make_message_allocator", _make_host_allocator)
