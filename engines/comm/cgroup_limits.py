"""The cores and memory that this process may use: a container or a job has less than the machine reports."""

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
    """Return the number of whole cores that this process may use, by its affinity and its control group's quota."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (max(1, quota // period) for quota, period in _read_limits(_QUOTA, groups, own, 2))
    return min([here, *quotas])


def get_memory_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Return the memory in bytes of this machine, or of this process's control group if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for (limit,) in _read_limits(_MEMORY, groups, own, 1))])


def _read_limits(
    kinds: Sequence[tuple[str, Sequence[str]]], groups: Path, own: Path, count: int
) -> Iterator[tuple[int, ...]]:
    """Yield the limits, of `count` numbers each, of this process's control group and of all groups above it."""
    for controller, names in kinds:
        top = groups / controller
        # A limit on any group above holds for this process, too: a job's limit is often set two levels up.
        place = top / _find_group(controller, _read_text(own))
        for folder in (place, *place.parents):
            told = " ".join(_read_text(folder / name) for name in names).split()
            if len(told) == count and all(map(str.isdecimal, told)):  # skips "max" and -1: no limit
                yield tuple(map(int, told))
            if folder == top:
                break


def _find_group(controller: str, told: str) -> str:
    """Return the path of this process's group under a controller, relative to the controller's root.

    >>> _find_group("memory", "4:memory:/jobs/7\\n0::/other"), _find_group("", "4:memory:/jobs/7\\n0::/other")
    ('jobs/7', 'other')
    """
    lines = (line.split(":", 2) for line in told.splitlines() if line.count(":") >= 2)
    return next((path.strip("/") for _, kinds, path in lines if controller in kinds.split(",")), "")


def _read_text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
