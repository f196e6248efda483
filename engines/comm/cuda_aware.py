"""Detects whether this MPI reads and writes the memory of NVIDIA GPUs itself (CUDA-aware MPI)."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

from mpi4py import MPI

__all__ = ["is_cuda_aware"]

_MAPS = Path("/proc/self/maps")


@cache
def is_cuda_aware() -> bool:
    """Return what the running MPI library reports: Open MPI and MPICH have a function for this, others none.

    An MPI that does not report support gets its messages in host memory.
    """
    for library in _find_mpi_libraries():
        if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
            if library.MPIX_Query_cuda_support():
                return True
        elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH; the first argument is MPIX_GPU_SUPPORT_CUDA
            supported = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(0, ctypes.byref(supported))
            if not failed and supported.value:
                return True
    return False


def _find_mpi_libraries() -> list[ctypes.CDLL]:
    """Return the MPI library that mpi4py has loaded, if the system lists the files mapped into this process."""
    lines = _MAPS.read_text().splitlines() if _MAPS.exists() and MPI.Is_initialized() else []
    files = {line.split(maxsplit=5)[-1] for line in lines if re.search(r"/libmpi[^/]*\.so[.\d]*$", line)}
    return [ctypes.CDLL(file) for file in sorted(files)]
