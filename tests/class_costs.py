"""`python -m tests.class_costs [01 05] [--backend mpi]`: the memory and the time of each tutorial, as lines of JSON.

Tutorials run one after another, as `jupyter nbconvert` runs them, on ranks of a chosen backend. `memory_mb` is the
largest sum over the kernel and all its processes, with pages that they share counted once; in `rss_mb` such pages count
in each process. Linux only. docs/how-to/teach-a-class.md has some of these numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHOICE = re.compile(r'(BACKEND = |backend=)"auto"')
BETWEEN_S = 0.5
PATIENCE = "--ExecutePreprocessor.startup_timeout=600"  # of a kernel on a busy machine; the default is 60 s


def copy_tutorial(path: Path, folder: Path, backend: str) -> Path:
    """Copy a tutorial, and let it choose the backend. Raises ValueError if it does not choose one."""
    book, count = nbformat.read(path, as_version=4), 0
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.source, places = CHOICE.subn(rf'\1"{backend}"', cell.source)
            count += places
    if count != 1:
        raise ValueError(f"{path.name} chooses its backend in {count} places, not in one.")
    nbformat.write(book, folder / path.name)
    return folder / path.name


def measure_processes(parent: psutil.Process) -> tuple[int, int]:
    """Return the bytes of all descendants of a process: shared pages counted once, and in each process."""
    memories = []
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            memories.append(process.memory_full_info())
    # Shared are mostly libraries, which are the same in all. Their `pss` is smaller if other programs have them, too.
    shared = max((memory.rss - memory.uss for memory in memories), default=0)
    return sum(memory.uss for memory in memories) + shared, sum(memory.rss for memory in memories)


def run_tutorial(path: Path, backend: str) -> dict[str, object]:
    """Run one tutorial, and return its line."""
    peaks, started_s = (0, 0), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copied, errors = copy_tutorial(path, Path(folder), backend), Path(folder, "errors.txt")
        convert = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", PATIENCE]
        command = [*convert, str(copied)]
        with errors.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as running:
            while running.poll() is None:
                with suppress(psutil.Error):
                    memory, rss = measure_processes(psutil.Process(running.pid))
                    peaks = max(peaks[0], memory), max(peaks[1], rss)
                time.sleep(BETWEEN_S)
        line: dict[str, object] = {"tutorial": path.stem, "backend": backend, "ok": not running.returncode}
        line |= {"memory_mb": round(peaks[0] / 1e6), "rss_mb": round(peaks[1] / 1e6)}
        line["seconds"] = round(time.perf_counter() - started_s)
        return line if line["ok"] else line | {"error": errors.read_text(encoding="utf-8", errors="replace")[-2000:]}


def measure_tutorials(names: Sequence[str], backend: str) -> Iterator[dict[str, object]]:
    """Yield a line for each tutorial whose file begins with one of the names; without names, for each."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.name.startswith(tuple(names)):
            yield run_tutorial(path, backend)


def main(arguments: Sequence[str]) -> int:
    """0 if all tutorials ran to their end."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("names", nargs="*", help="the first letters of tutorials, such as 01; without any: all")
    flags.add_argument("--backend", choices=("mpi", "loopback"), default="mpi")
    chosen, whole = flags.parse_args(arguments), True
    for line in measure_tutorials(chosen.names, chosen.backend):
        whole = whole and bool(line["ok"])
        print(json.dumps(line), flush=True)
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
