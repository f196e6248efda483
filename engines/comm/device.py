"""A rank's share of its machine: the one place that chooses a device, its threads, and how tensors lie in memory."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engines import layout
from engines.comm import vml_warmup  # noqa: F401
from engines.comm.cgroup_limits import count_cores
from engines.errors import PlanError
from engines.plan import Plan

__all__ = [
    "choose_autocast_type",
    "choose_device",
    "choose_memory_format",
    "choose_thread_count",
    "compute_threads_per_rank",
    "count_local_ranks",
    "get_gpu_id",
    "get_used_bytes",
    "has_own_memory",
    "keep_memory_tight",
    "limit_device_memory",
    "measure_device_peak",
    "read_process_bytes",
    "share_process",
    "trim_memory",
    "use_threads",
]


# How MPIs tell a process its number among those of its host, and how many these are: Open MPI, MPICH.
_RANK_HERE = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_RANKS_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_STATUS = Path("/proc/self/status")
_own = threading.local()
_MMAP_THRESHOLD, _MMAP_MAX = -3, -4  # of `mallopt`, from glibc's malloc.h


def choose_device(wish: str, rank: int) -> torch.device:
    """`auto`: the GPUs of this host in turn, the CPU where there is none; else what `wish` names.

    In turn goes the number that the process has among those of its host, where MPI tells it, and not its rank.
    Raises PlanError where the wish cannot be fulfilled.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise PlanError(f"device={wish!r} is unknown. Use auto, cpu, cuda or cuda:0.") from error
    if not has_own_memory(device):
        if device.type != "cpu":
            raise PlanError(f"device={wish!r} is nothing that ranks compute on. Use auto, cpu, cuda or cuda:0.")
        return device
    count = torch.cuda.device_count()
    if not count:
        raise PlanError(f"device={wish!r}, but torch sees no GPU here. Use device='auto' or 'cpu'.")
    if device.index is None:
        return torch.device("cuda", _read_env_int(_RANK_HERE, rank) % count)
    if device.index >= count:
        raise PlanError(f"device={wish!r}, but torch sees {count} GPUs here, numbered from 0. Use device='auto'.")
    return device


def count_local_ranks(n: int) -> int:
    """How many of `n` ranks are on this host, where MPI tells it."""
    return max(1, min(n, _read_env_int(_RANKS_HERE, n)))


def _read_env_int(names: Sequence[str], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), otherwise)


def choose_autocast_type(wish: str) -> str:
    """The type of device whose rules for half precision hold: the one wished for, if it is here to be asked."""
    try:
        return choose_device(wish, 0).type
    except PlanError:
        return "cpu"


def has_own_memory(device: torch.device) -> bool:
    """Whether its tensors lie elsewhere than the host's: copies from there want pinned memory."""
    return device.type == "cuda"


def get_gpu_id(device: torch.device) -> str:
    """Which of all machines' GPUs it is, nothing where it is none: the same for all ranks that share one."""
    if not has_own_memory(device):
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def measure_device_peak(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes that tensors of this process take on a device with memory of its own while `work` runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def limit_device_memory(device: torch.device, size_bytes: int) -> None:
    """From now on this process gets no more than so many bytes of a device with memory of its own."""
    whole_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / whole_bytes), device)


def get_used_bytes(device: torch.device) -> int:
    """What this rank holds now: of a GPU the tensors there, otherwise all memory of its process."""
    if has_own_memory(device):
        return torch.cuda.memory_allocated(device)
    if _STATUS.exists():
        return read_process_bytes("VmRSS")
    import psutil  # where the kernel has no such file: a machine that only checks its GPU need not have it

    return int(psutil.Process().memory_info().rss)


def keep_memory_tight(tight: bool, above_bytes: int = 1 << 20) -> None:
    """Whether blocks of so many bytes go back to the system as soon as they are free, where the C library can (glibc).

    Otherwise it keeps what is free for later, and what a process holds is more than its tensors by as much again.
    Huge pages (`THP_MEM_ALLOC_ENABLE=1`) make up for the time that fresh pages take.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if tight:
        trim_memory()
    mallopt(_MMAP_THRESHOLD, above_bytes if tight else 32 << 20)
    mallopt(_MMAP_MAX, 1 << 16 if tight else int(os.environ.get("MALLOC_MMAP_MAX_", "65536")))


def read_process_bytes(field: str) -> int:
    """The kernel's account of this process (Linux): `VmRSS` is what memory it has now, `VmHWM` the most it ever had."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def share_process(threads: int = 1) -> None:
    """This thread is one rank of several in its process: its kernels have so many, whatever it asks for later.

    More than one only where no other rank is at work: where several threads of a process run kernels of several threads
    each, convolutions were seen to end the process with a division by zero (torch 2.13, 4 ranks on 4 cores).
    """
    torch.set_num_threads(threads)
    _own.shares = True


def use_threads(count: int) -> None:
    """So many for the kernels of this thread, unless it shares its process with other ranks."""
    if not getattr(_own, "shares", False):
        torch.set_num_threads(count)


def compute_threads_per_rank(n: int) -> int:
    """The cores of this machine, shared out among `n` ranks."""
    return max(1, count_cores() // n)


def trim_memory() -> None:
    """Return the pages that this process has freed to the system, where its C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def choose_thread_count(plan: Plan, rank: int) -> int:
    """A rank's share of the cores of this host."""
    return layout.compute_threads(plan, rank, count_cores(), count_local_ranks(plan.ranks))


def choose_memory_format(dimensions: int) -> torch.memory_format:
    """Images lie with their channels last: convolutions are faster so, on the CPU as on tensor cores."""
    return torch.channels_last if dimensions == 4 else torch.contiguous_format
