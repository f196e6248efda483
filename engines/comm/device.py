"""A rank's share of its machine: cores and memory; the only place that chooses devices, threads and memory formats."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import PlanError

# Makes the first call into the library of vector functions from one thread, before several threads can.
#
# PyTorch takes square roots, exponentials and the like of contiguous tensors from MKL, which looks up its functions on
# the first call. If several threads make that call at once, one of them occasionally computes its part to 12 bits only
# (seen with PyTorch 2.13: in 2 of 100 processes, most often in the first update of Adam). Once any of these functions
# has been called, all are found: here, from one thread. `python -m tests.first_call` shows the difference.
torch.ones(8).sqrt()


# Environment variables for a process's number on its host, and for the number of these: Open MPI, MPICH.
_RANK_HERE = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_RANKS_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_STATUS = Path("/proc/self/status")
_own = threading.local()
_MMAP_THRESHOLD, _MMAP_MAX = -3, -4  # of `mallopt`, from glibc's malloc.h


def choose_device(wish: str, rank: int) -> torch.device:
    """Return the device named by `wish`; `auto` is one of this host's GPUs, or the CPU if there is none.

    GPUs are assigned round-robin by the process's number on its host where MPI gives it, else by its rank. Raises
    PlanError if the wish cannot be met.
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
    if device == torch.device(device.type):  # without a number
        # By the number on this host: ranks 0 and 4 may be on different hosts, each with 4 GPUs.
        return torch.device("cuda", _read_env_int(_RANK_HERE, rank) % count)
    if device.index >= count:
        raise PlanError(f"device={wish!r}, but torch sees {count} GPUs here, numbered from 0. Use device='auto'.")
    return device


def count_local_ranks(n: int) -> int:
    """Return how many of `n` ranks run on this host; `n` if MPI does not say."""
    return max(1, min(n, _read_env_int(_RANKS_HERE, n)))


def _read_env_int(names: Sequence[str], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), otherwise)


def choose_autocast_type(wish: str) -> str:
    """Return the device type whose half-precision rules apply: the one wished for if it is present, else `cpu`."""
    try:
        return choose_device(wish, 0).type
    except PlanError:
        return "cpu"


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device's memory is separate from the host's; asynchronous copies need pinned memory."""
    return device.type == "cuda"


def get_gpu_id(device: torch.device) -> str:
    """Return an identifier of a GPU, unique over all machines and equal for ranks that share it; "" for the CPU."""
    if not has_own_memory(device):
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def measure_device_peak(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak bytes that this process's tensors add on a device with memory of its own while `work` runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def limit_device_memory(device: torch.device, size_bytes: int) -> None:
    """Limit this process to so many bytes of a device with memory of its own."""
    whole_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / whole_bytes), device)


def get_used_bytes(device: torch.device) -> int:
    """Return the bytes this rank uses now: on a GPU its tensors there, else all memory of its process."""
    if has_own_memory(device):
        return torch.cuda.memory_allocated(device)
    if _STATUS.exists():
        return read_process_bytes("VmRSS")
    import psutil  # imported only without /proc: a machine that only checks its GPU need not have it

    return int(psutil.Process().memory_info().rss)


def keep_memory_tight(tight: bool, above_bytes: int = 1 << 20) -> None:
    """Set whether freed blocks of at least `above_bytes` return to the system at once, where the C library can (glibc).

    Otherwise glibc keeps freed memory for reuse, and a process may hold twice as much as its tensors. Huge pages
    (`THP_MEM_ALLOC_ENABLE=1`) make up for the time that fresh pages take.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # A block above the threshold gets a mapping of its own, which ends when the block is freed. A smaller one is cut
    # from the heap, which shrinks only from its end: one living block there keeps all freed memory below it.
    if tight:
        trim_memory()
    mallopt(_MMAP_THRESHOLD, above_bytes if tight else 32 << 20)
    mallopt(_MMAP_MAX, 1 << 16 if tight else int(os.environ.get("MALLOC_MMAP_MAX_", "65536")))


def read_process_bytes(field: str) -> int:
    """Return a memory figure of this process from the kernel: `VmRSS` is the current size, `VmHWM` the peak.

    Raises PlanError on systems other than Linux.
    """
    if not _STATUS.exists():
        raise PlanError(
            f"Only Linux tells how much memory a process takes ({_STATUS}). Give the side of tiles instead."
        )
    lines = _STATUS.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def read_peak_bytes() -> int:
    """Return the largest size of this process so far, in bytes."""
    if _STATUS.exists():
        return read_process_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def share_process(threads: int = 1) -> None:
    """Mark this thread as one rank of several in its process, and fix the number of threads of its kernels.

    `use_threads` has no effect afterwards. More than one thread is safe only while no other rank computes: with several
    threads of a process running multi-threaded kernels, convolutions were seen to end the process with a division by
    zero (torch 2.13, 4 ranks on 4 cores).
    """
    torch.set_num_threads(threads)
    _own.shares = True


def use_threads(count: int) -> None:
    """Set the number of threads for the kernels of this thread, unless it shares its process with other ranks."""
    if not getattr(_own, "shares", False):
        torch.set_num_threads(count)


def compute_threads_per_rank(n: int) -> int:
    """Return the cores of this machine divided among `n` ranks, at least 1."""
    return max(1, count_cores() // n)


def trim_memory() -> None:
    """Return freed pages of this process to the system, where its C library can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def choose_memory_format(dimensions: int) -> torch.memory_format:
    """Return channels-last for images and volumes (4 and 5 dimensions), contiguous for all else.

    Convolutions are faster, on the CPU as on tensor cores; those of volumes also need no copy of a window per voxel.
    """
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(dimensions, torch.contiguous_format)


def place_inputs(inputs: Mapping[int, Mapping[str, Tensor]], device: torch.device) -> dict[int, dict[str, Tensor]]:
    """Return the parts of a step's inputs, by micro-batch, on a rank's device, in the ranks' memory format."""

    def place(part: Tensor) -> Tensor:
        return part.to(device, memory_format=choose_memory_format(part.dim()))

    return {micro_batch: {name: place(part) for name, part in parts.items()} for micro_batch, parts in inputs.items()}


# The cores and memory that this process may use: a container or a job has less than the machine reports.

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
    entries = [line.split(":", 2) for line in _read_text(own).splitlines() if line.count(":") >= 2]
    for controller, names in kinds:
        # The group's path below the controller, of lines such as `4:memory:/jobs/7` and (version 2) `0::/other`.
        group = next((path.strip("/") for _, controllers, path in entries if controller in controllers.split(",")), "")
        # A limit on any group above holds for this process, too: a job's limit is often set two levels up.
        top = groups / controller
        group_folder = top / group
        for folder in (group_folder, *group_folder.parents):
            limits = " ".join(_read_text(folder / name) for name in names).split()
            if len(limits) == count and all(map(str.isdecimal, limits)):  # skips "max" and -1: no limit
                yield tuple(map(int, limits))
            if folder == top:
                break


def _read_text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
