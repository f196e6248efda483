"""Enforce a memory limit, by the kernel or by a GPU's allocator."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engines.comm.device import has_own_memory, limit_device_memory, read_process_bytes

__all__ = ["KEPT_BYTES", "MIB", "limit_memory"]

MIB = 1 << 20
KEPT_BYTES = 4 * MIB
"""Freed blocks below this size are better kept: most tensors of a tile are smaller, and fresh pages are slow."""


@contextmanager
def limit_memory(device: torch.device, size_bytes: int) -> Iterator[None]:
    """Within the context, allocations beyond `size_bytes` fail.

    On the host the limit counts from the memory that the process has already (`RLIMIT_DATA`, Linux: mapped files do not
    count). On a GPU it covers everything, and it stays in force afterwards.
    """
    if has_own_memory(device):
        limit_device_memory(device, size_bytes)
        yield
        return
    # RLIMIT_DATA bounds private writable memory: heap and anonymous mappings, where tensors lie, but no libraries'
    # code.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_process_bytes("VmData") + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
