"""What this process may use of its machine: a container has less of it than the system tells."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cores", "memory_bytes"]

_GROUPS = Path("/sys/fs/cgroup")
# Of control groups, version 2 and 1.
_MEMORY = ("memory.max", "memory/memory.limit_in_bytes")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def cores(groups: Path = _GROUPS) -> int:
    """The cores that this process may use: whole ones of what a container is allowed."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in _QUOTAS:
        told = " ".join(_told(groups / name) for name in names).split()
        if len(told) == 2 and all(map(str.isdecimal, told)):  # not where it is "max", or -1
            here = min(here, max(1, int(told[0]) // int(told[1])))
    return here


def memory_bytes(groups: Path = _GROUPS) -> int:
    """The memory of this machine, or of the container that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = (_told(groups / name) for name in _MEMORY)
    return min([machine, *(int(text) for text in told if text.isdecimal())])


def _told(path: Path) -> str:
    """What a file says, where there is one."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
