"""CUDA streams and events: copies between a device and its host that overlap with computation.

A GPU has three streams here: one computes, one copies outgoing halos, activations and gradients to the host, one copies
what arrives. The send stream waits for what was computed before; computation after an arrival waits for the arrival;
nothing else waits. (The few numbers of a sum within a pass are copied on the compute stream.) On the CPU there is only
program order.

  compute  ---A---.--------B---------------.---C--->    C reads the arrival; B waits for neither copy
                  v wait_stream            ^ wait_stream
  send            copy of A out -> event   |
  receive                          copy in '
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import has_own_memory


class DeviceEvent(Protocol):
    """A point in the sequence of operations enqueued on a device, as a CUDA event."""

    def query(self) -> bool:
        """Return at once whether the device has passed the event."""

    def synchronize(self) -> None:
        """Return when the device has passed the event."""


class _PassedEvent:
    """An event of a device without a queue."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


_PASSED = _PassedEvent()


def wait_for_device(device: torch.device) -> None:
    """Return when the device has finished all that was enqueued."""
    if has_own_memory(device):
        torch.cuda.synchronize(device)


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`, until the device has finished it."""
    start_s = time.perf_counter()
    work()
    wait_for_device(device)
    return time.perf_counter() - start_s


def wait_for_stream(device: torch.device) -> None:
    """Return when the device has finished this thread's current stream, so that its results may be read."""
    if has_own_memory(device):
        torch.cuda.current_stream(device).synchronize()


def record_event(device: torch.device, memory: torch.device) -> DeviceEvent:
    """Record an event on this thread's stream: once passed, what was copied to `memory` before may be read.

    If `memory` is the device itself, no event is needed: its readers there are enqueued in order.
    """
    return torch.cuda.current_stream(device).record_event() if memory != device else _PASSED


@contextmanager
def use_send_stream(device: torch.device, memory: torch.device, read: Sequence[Tensor]) -> Iterator[None]:
    """Enqueue the operations of the context, copies of `read` to `memory`, on the send stream.

    They overlap with what is computed afterwards. All that was enqueued on the compute stream before runs first,
    including reads of earlier arrivals: once an event recorded within the context has passed, new messages may be
    received into that memory. The tensors `read` must not be written to any more.
    """
    if memory == device:
        yield
        return
    # Work enqueued before may still write to `read`, or read the buffers of earlier arrivals: the send stream waits for
    # it.
    computing, (there, _) = torch.cuda.current_stream(device), _get_copy_streams(device)
    there.wait_stream(computing)
    with torch.cuda.stream(there):
        yield
    for tensor in read:
        tensor.record_stream(there)  # the allocator must not reuse its memory before the copy


def copy_to_device(arrived: Sequence[Tensor], device: torch.device, memory: torch.device) -> Sequence[Tensor]:
    """Copy arrived tensors to the device on the receive stream; computation enqueued later waits for them."""
    if memory == device:
        return arrived
    computing, (_, here) = torch.cuda.current_stream(device), _get_copy_streams(device)
    with torch.cuda.stream(here):
        # No wait for the compute stream first: the transport has filled the host buffers, and the results are new
        # tensors.
        copies = [tensor.to(device, non_blocking=True, copy=True) for tensor in arrived]
    computing.wait_stream(here)
    # Allocated on the receive stream but read on the compute stream: without this, the allocator could give the memory
    # to the next arrival while a kernel still reads it.
    for tensor in copies:
        tensor.record_stream(computing)
    return copies


@cache
def _get_copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of outgoing and incoming copies: separate, as a link transfers both ways at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
