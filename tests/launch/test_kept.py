"""`python -m mpi4dl_nb`: whatever ends it, no process, folder or shared memory is left, and it ends as mpiexec does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mpi4dl_nb.__main__ import main
from mpi4dl_nb.launch import reaper_process
from mpi4dl_nb.launch.run_directory import remove_stale_clusters
from tests.launch.test_orphans import GONE_S, ROOT, wait_within

MODEL = """
import os, pathlib, sys, time
pathlib.Path(os.environ["TOLD"], os.environ["OMPI_COMM_WORLD_RANK"]).touch()
time.sleep(600)
"""

VERIFY = ("verify", "--split-size", "1", "--slice-method", "1x2", "--image-size", "16")


@pytest.fixture
def begin(tmp_path, monkeypatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`begin()` is the process of a command whose two ranks have begun, and wait; files go into `tmp_path`."""
    for name in ("runtime", "tmp", "told"):
        (tmp_path / name).mkdir()
    (tmp_path / "slow_model.py").write_text(MODEL)
    changed = {
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "TMPDIR": str(tmp_path / "tmp"), "TOLD": str(tmp_path / "told"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }  # fmt: skip
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    begun: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mpi4dl_nb", "-n", "2", *VERIFY, "--model", "slow_model:net"]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        assert wait_within(60, lambda: len(list((tmp_path / "told").iterdir())) == 2), begun[-1].poll()
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def list_folders(tmp_path: Path) -> list[Path]:
    """Of what was started in a test: its files, what its ranks share, and its record."""
    homes = list((tmp_path / "tmp").glob("mpi4dl_nb-*"))
    return [*homes, *(Path("/dev/shm", home.name) for home in homes), *tmp_path.glob("runtime/mpi4dl_nb/*")]


def is_gone(paths: list[Path], family: list[psutil.Process]) -> bool:
    return not any(path.exists() for path in paths) and not any(map(reaper_process.is_running, family))


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["mpiexec", "keeper"])
def test_after_a_kill_nothing_is_left(begin, tmp_path, who):
    keeper = begin()
    paths, family = list_folders(tmp_path), psutil.Process(keeper.pid).children(recursive=True)
    assert len([path for path in paths if path.exists()]) == 3
    assert list(paths[1].glob("sm_segment.*"))
    assert len(family) == 3
    (family[0] if who == "mpiexec" else keeper).kill()
    keeper.wait(GONE_S)
    assert keeper.returncode == -signal.SIGKILL
    if who == "mpiexec":
        assert is_gone(paths, family)
        return
    assert wait_within(GONE_S, lambda: not any(map(reaper_process.is_running, family)))
    assert remove_stale_clusters() == [paths[0].name]
    assert is_gone(paths, family)


@pytest.mark.nightly
def test_what_even_the_keeper_did_not_survive_is_ended_by_the_next_start(begin, tmp_path):
    keeper = begin()
    paths, family = list_folders(tmp_path), psutil.Process(keeper.pid).children(recursive=True)
    assert remove_stale_clusters() == []  # it runs
    family[0].suspend()  # it can't hear that it is to end
    keeper.kill()
    keeper.wait()
    time.sleep(0.5)
    assert not is_gone(paths, family)
    assert remove_stale_clusters() == [paths[0].name]
    assert wait_within(GONE_S, lambda: is_gone(paths, family))


@pytest.mark.nightly
def test_a_signal_is_passed_on(begin, tmp_path):
    keeper = begin()
    paths, family = list_folders(tmp_path), psutil.Process(keeper.pid).children(recursive=True)
    keeper.send_signal(signal.SIGINT)
    keeper.wait(30)
    assert keeper.returncode != 0
    assert is_gone(paths, family)


def test_it_ends_where_nobody_is_informed_of_children():
    """As whoever has started it may have left it."""
    keep = [
        sys.executable,
        "-P",
        reaper_process.__file__,
        "keep",
        "mpi4dl_nb-nobody",
        "--",
        sys.executable,
        "-c",
        "exit(3)",
    ]
    done = subprocess.run(keep, preexec_fn=_set_sigchld_ignored, timeout=20, check=False)
    assert done.returncode == 3


def _set_sigchld_ignored() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@pytest.mark.nightly
def test_it_ends_as_the_launcher_does_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    command = [sys.executable, "-m", "mpi4dl_nb", *VERIFY, "--slice-method", "1x1", "--image-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PlanError: --image-size '0' must be" in done.stderr
    assert [*tmp_path.glob("mpi4dl_nb*"), *tmp_path.glob("runtime/mpi4dl_nb/*")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-n", "0"), "PlanError: Argument -n: '0' must be a whole number of at least 1."),
        (("-n",), "PlanError: Argument -n: expected one argument."),
        (("--tiles", "4"), "PlanError: Unrecognized arguments: --tiles"),
    ],
)
def test_wrong_flags_are_reported_in_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith(says)


def test_in_a_folder_that_was_deleted_that_is_said(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", code, "-m", "mpi4dl_nb", "verify"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "gone", env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: The folder that this process works in was deleted")
