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
    told_groups = [line.split(":", 2) for line in _read_text(own).splitlines() if line.count(":") >= 2]
    for controller, names in kinds:
        # The group's path below the controller, of lines such as `4:memory:/jobs/7` and (version 2) `0::/other`.
        group = next((path.strip("/") for _, found, path in told_groups if controller in found.split(",")), "")
        # A limit on any group above holds for this process, too: a job's limit is often set two levels up.
        top = groups / controller
        place = top / group
        for folder in (place, *place.parents):
            told = " ".join(_read_text(folder / name) for name in names).split()
            if len(told) == count and all(map(str.isdecimal, told)):  # skips "max" and -1: no limit
                yield tuple(map(int, told))
            if folder == top:
                break


def _read_text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
