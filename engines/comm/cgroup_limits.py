"""What this process may use of its machine: a container, or a job, has less of it than the system tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["count_cores", "get_memory_bytes"]

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The controller and its files, of control groups version 2 and 1.
_MEMORY = (("", ("memory.max",)), ("memory", ("memory.limit_in_bytes",)))
_QUOTA = (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")))


def count_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The cores that this process may use: whole ones of what its group is allowed."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (max(1, quota // period) for quota, period in _read_limits(_QUOTA, groups, own, 2))
    return min([here, *quotas])


def get_memory_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The memory of this machine, or of the group that this process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for (limit,) in _read_limits(_MEMORY, groups, own, 1))])


def _read_limits(
    kinds: Sequence[tuple[str, Sequence[str]]], groups: Path, own: Path, count: int
) -> Iterator[tuple[int, ...]]:
    """So many numbers of this process's group, and of each one that it lies in, as far as they are limits."""
    for controller, names in kinds:
        top = groups / controller
        place = top / _find_group(controller, _read_text(own))
        for folder in (place, *place.parents):
            told = " ".join(_read_text(folder / name) for name in names).split()
            if len(told) == count and all(map(str.isdecimal, told)):  # not where it is "max", or -1
                yield tuple(map(int, told))
            if folder == top:
                break


def _find_group(controller: str, told: str) -> str:
    """Where a controller has this process, from its top on.

    >>> _find_group("memory", "4:memory:/jobs/7\\n0::/other"), _find_group("", "4:memory:/jobs/7\\n0::/other")
    ('jobs/7', 'other')
    """
    lines = (line.split(":", 2) for line in told.splitlines() if line.count(":") >= 2)
    return next((path.strip("/") for _, kinds, path in lines if controller in kinds.split(",")), "")


def _read_text(path: Path) -> str:
    """What a file says, where there is one."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
