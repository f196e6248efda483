"""A bound of memory that is kept: the kernel's, or a GPU's allocator's."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engines.comm.device import has_own_memory, limit_device_memory, read_process_bytes

__all__ = ["KEPT_BYTES", "MIB", "limit_memory"]

MIB = 1 << 20
KEPT_BYTES = 4 * MIB
"""Of smaller blocks memory is best kept: most tensors of a tile are, and fresh pages take long."""


@contextmanager
def limit_memory(device: torch.device, size_bytes: int) -> Iterator[None]:
    """While it lasts, this process gets so many bytes beyond what it has, or of a GPU in all: an allocation fails then.

    Of the host's memory it is `RLIMIT_DATA` (Linux): files that are mapped do not count.
    """
    if has_own_memory(device):
        limit_device_memory(device, size_bytes)
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_process_bytes("VmData") + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
