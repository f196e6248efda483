"""A cluster in odd surroundings: it works, or says in one sentence why it cannot. Notebooks are processes here."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import ImageError, RankError
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.launch.mpi_library import make_mpi_environment
from mpi4dl_nb.launch.startup_monitor import check_cluster

ROOT = Path(__file__).parents[2]
WORKS = """
from mpi4dl_nb.cluster.cluster import Cluster
with Cluster(2) as cluster:
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2
"""


def run(code: str, **changed: str | None) -> subprocess.CompletedProcess[str]:
    """In a Python process of its own; None takes a variable away."""
    environment: Mapping[str, str | None] = {**os.environ, "PYTHONPATH": str(ROOT), **changed}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("home", [None, "/dev/null/home", "/proc/self"], ids=["unset", "not there", "not writable"])
def test_a_home_is_not_needed(home, tmp_path, tmp_path_factory):
    settings = str(tmp_path_factory.mktemp("matplotlib"))  # it says itself where it has none
    changed = {"HOME": home, "TMPDIR": str(tmp_path), "MPLCONFIGDIR": settings}
    done = run(WORKS, **changed, XDG_RUNTIME_DIR=None, XDG_CACHE_HOME=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


# Each makes MPI fail where it is read (`btl` would not: ranks have a variable for it).
PLANTED = {".openmpi": "pml = nosuch\n", ".prte": "ess = nosuch\n", ".pmix": "gds = nosuch\n"}
SEES = """
import os, psutil
from mpi4dl_nb.cluster.cluster import Cluster
with Cluster(2) as cluster:
    place = cluster._ranks._place
    assert cluster.call(lambda host: (os.environ["HOME"], os.path.expanduser("~"))) == [(os.environ["HOME"],) * 2] * 2
    family = psutil.Process().children(recursive=True)
    mpi = [process.environ()["HOME"] for process in family if process.name() in ("mpiexec", "prterun")]
    assert mpi == [str(place.home)], mpi
    shown = [word for process in family for word in process.cmdline() if "very-secret" in word]
    assert not shown, shown
"""


def write_settings(folder: Path) -> None:
    for name, text in PLANTED.items():
        (folder / name).mkdir()
        (folder / name / "mca-params.conf").write_text(text, encoding="utf-8")


@pytest.mark.nightly
def test_no_file_of_a_home_or_of_a_shared_folder_decides_what_mpi_starts(tmp_path, monkeypatch):
    """Not in a notebook's cluster, nor by a command; the ranks still have the home of their user."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
        write_settings(tmp_path / name)
    changed = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary"), "A_TOKEN": "very-secret"}
    done = run(SEES, **changed)
    assert (done.returncode, done.stderr) == (0, "")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    command = [
        sys.executable,
        "-m",
        "mpi4dl_nb",
        "-n",
        "2",
        "bench",
        "allreduce",
        "--iterations",
        "1",
        "--max-bytes",
        "64",
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


WARNS = """
import warnings
from mpi4dl_nb.cluster.cluster import Cluster

def warn(host):
    try:
        warnings.warn("mine")
    except UserWarning as error:
        return str(error)

with Cluster(2) as cluster:
    assert cluster.call(warn) == ["mine"] * 2
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2
"""


@pytest.mark.nightly
def test_ranks_start_where_warnings_are_errors_and_those_of_the_user_stay_errors():
    done = run(WARNS, PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("most", [64, 128])
def test_too_few_open_files_are_reported_before_anything_starts(most):
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))\n{WORKS}"
    done = run(code)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpi4dl_nb.engines.errors.")]
    assert f"A process may open {most} files here, but to start 2 ranks takes" in line
    assert "ulimit -n" in line


@pytest.mark.nightly
def test_a_limit_of_open_files_that_may_be_raised_is_raised():
    done = run(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\n{WORKS}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_limit_of_open_files_that_is_high_enough_is_left_alone():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_cluster(2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.fixture
def deleted(tmp_path, monkeypatch) -> Path:
    """The folder that this process works in, which is gone."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    return folder


def test_in_a_folder_that_was_deleted_nothing_starts(deleted):
    with pytest.raises(RankError, match=r"^The folder that this process works in was deleted: .* \(os.chdir\)\.$"):
        Cluster(2).start()


def test_a_picture_of_a_folder_that_was_deleted_is_not_there(deleted):
    with pytest.raises(ImageError, match=r"^a.png does not exist \(looked for in a folder that was deleted"):
        open_image("a.png")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["mpi", "loopback"])
def test_ranks_work_on_where_the_folder_is_deleted(backend, tmp_path):
    code = f"""
import os, pathlib
from torch import nn
import torch
from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import CheckpointError
with Cluster(2, backend={backend!r}) as cluster:
    plan = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical")
    training = Training(nn.Conv2d(3, 2, 3), plan, cluster, (1, 3, 8, 8))
    os.rmdir(os.getcwd())
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2
    labels = torch.zeros(1, 6, 6, dtype=torch.long)
    assert training.step(torch.ones(1, 3, 8, 8), labels) > 0
    try:
        training.save("here")
    except CheckpointError as error:
        print(error)
"""
    (tmp_path / "gone").mkdir()
    done = run(f"import os; os.chdir({str(tmp_path / 'gone')!r})\n{code}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


FORKS = """
import multiprocessing, os, sys
import torch
from mpi4dl_nb.cluster.cluster import Cluster

def gather(host):
    return host.world.all_gather(host.world.rank)

cluster = Cluster(2).start()
home = cluster._ranks._place.home

def ended(child):
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert home.exists()
    assert cluster.call(gather) == [[0, 1]] * 2
    return code

def by_exit():
    sys.exit(3)

def by_block():
    with cluster:
        pass
    cluster.stop()

def by_garbage():
    global cluster
    cluster = None
    import gc
    gc.collect()

for leave in (by_exit, by_block, by_garbage):
    if not (child := os.fork()):
        leave()
        sys.exit(3)  # through atexit, as Python ends
    assert ended(child) == 3

context = multiprocessing.get_context("fork")
worker = context.Process(target=by_block)
worker.start()
worker.join(60)
assert worker.exitcode == 0 and cluster.call(gather) == [[0, 1]] * 2

images = torch.utils.data.TensorDataset(torch.zeros(4, 1))
assert len(list(torch.utils.data.DataLoader(images, num_workers=2))) == 4
assert home.exists() and cluster.call(gather) == [[0, 1]] * 2
cluster.stop()
assert not home.exists()

if not (child := os.fork()):
    with Cluster(1) as mine:  # a copy of this process has no threads of its own yet
        mine.call(gather)
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
print("all done")
"""


@pytest.mark.nightly
def test_copies_of_the_notebook_leave_its_ranks_alone():
    done = run(FORKS)
    assert done.stdout.endswith("all done\n"), done.stderr


def test_the_user_may_say_what_ranks_keep_of_freed_memory(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert make_mpi_environment(4)["MALLOC_MMAP_MAX_"] == "0"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert make_mpi_environment(4)["MALLOC_MMAP_MAX_"] == "0"
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    assert not any(name.startswith("MALLOC_") for name in make_mpi_environment(4))


def test_more_ranks_than_cores_start_under_each_open_mpi():
    """Open MPI 5 reads the first variable, and older ones the second: they would find no slot for the last ranks."""
    environment = make_mpi_environment(4)
    assert environment["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert environment["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
