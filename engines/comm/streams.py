"""The order of what a device is told: marks in it, and copies to and from its host beside what it computes.

A GPU has three streams here: what it computes, what of halos, activations and gradients leaves it, and what arrives.
What leaves waits for what was computed before, what is computed after an arrival waits for that; nothing else waits.
(The few numbers of a sum in the midst of a pass are copied where they are computed.) Where memory is the host's there
is one order only: that of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from engines.comm.device import has_own_memory

__all__ = ["DeviceEvent", "copy_to_device", "record_event", "use_send_stream", "wait_for_device", "wait_for_stream"]


class DeviceEvent(Protocol):
    """A place in what a device was told to do."""

    def query(self) -> bool:
        """Whether the device has come as far; returns at once."""

    def synchronize(self) -> None:
        """Return when it has."""


class _CompletedEvent:
    """Where nothing is only told: all has been done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


_PASSED = _CompletedEvent()


def wait_for_device(device: torch.device) -> None:
    """Return when the device has done all that it was told."""
    if has_own_memory(device):
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Return when the device has computed what this thread told it, and its memory may be read."""
    if has_own_memory(device):
        torch.cuda.current_stream(device).synchronize()


def record_event(device: torch.device, memory: torch.device) -> DeviceEvent:
    """Behind all that this thread has told the device so far: once passed, what it copied to `memory` may be read.

    What lies on the device itself comes in order by whoever reads it there.
    """
    return torch.cuda.current_stream(device).record_event() if memory != device else _PASSED


@contextmanager
def use_send_stream(device: torch.device, memory: torch.device, read: Sequence[Tensor]) -> Iterator[None]:
    """What is told within it, copies of what is `read` to `memory`, goes beside what is computed from here on.

    What was told before comes first, and so do the reads of what arrived before: whoever waits for a mark made within
    may have new messages arrive where those did. Nothing may be written to what is read any more.
    """
    if memory == device:
        yield
        return
    computing, (there, _) = torch.cuda.current_stream(device), _get_copy_streams(device)
    there.wait_stream(computing)
    with torch.cuda.stream(there):
        yield
    for tensor in read:
        tensor.record_stream(there)  # its memory is not given to others before it has been read


def copy_to_device(arrived: Sequence[Tensor], device: torch.device, memory: torch.device) -> Sequence[Tensor]:
    """What has arrived in `memory` on the device, which computes on meanwhile, and with it behind that."""
    if memory == device:
        return arrived
    computing, (_, here) = torch.cuda.current_stream(device), _get_copy_streams(device)
    with torch.cuda.stream(here):
        found = [tensor.to(device, non_blocking=True, copy=True) for tensor in arrived]
    computing.wait_stream(here)
    for tensor in found:
        tensor.record_stream(computing)
    return found


@cache
def _get_copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For what leaves, and for what arrives: a link carries both at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
