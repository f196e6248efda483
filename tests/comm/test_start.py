"""What a rank's process begins with: whose HOME it has, and variables that come from a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpi4dl_nb.engines.comm import start
from mpi4dl_nb.launch.run_directory import RunDirectory

SHOW = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


def run(command: list[str], **environment: str) -> dict[str, str]:
    """Return the variables that a command sees."""
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout)


def test_a_command_has_the_variables_of_its_file(tmp_path):
    file = tmp_path / "variables.json"
    file.write_text(json.dumps({"A": "a b\n'ü\udcff", "GONE": None}), encoding="utf-8")
    found = run(start.add_variables(str(file), SHOW), GONE="1", KEPT="1", LC_ALL="C.UTF-8")
    assert (found["A"], found["KEPT"], "GONE" in found) == ("a b\n'ü\udcff", "1", False)


def test_a_daemon_has_its_home_in_the_folder_of_the_cluster(tmp_path):
    ours, theirs = tmp_path / "mpi4dl_nb-b", tmp_path / "mpi4dl_nb-a"
    for folder, mode in ((ours, 0o700), (theirs, 0o777)):  # where others may write is no folder of ours
        folder.mkdir()
        folder.chmod(mode)
        (folder / "the-mark").touch()
    found = run(start.enter_folder("the-mark", SHOW), TMPDIR=str(tmp_path), HOME="/tmp")
    assert (found["HOME"], found["TMPDIR"]) == (str(ours), str(ours))
    (ours / "the-mark").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        run(start.enter_folder("the-mark", SHOW), TMPDIR=str(tmp_path))


@pytest.mark.parametrize("home", ["/home/me", None])
def test_a_rank_has_the_home_of_its_user_and_mpi_that_of_the_cluster(home, tmp_path):
    (tmp_path / "shows.py").write_text(SHOW[-1], encoding="utf-8")
    users = {} if home is None else {"HOME": home}
    variables = start.make_home_variables("/cluster", users)
    assert variables["HOME"] == "/cluster"
    found = run(start.make_command("shows"), **variables, PYTHONPATH=str(tmp_path))
    assert (found.get("HOME"), found[start.MPI_HOME]) == (home, "/cluster")
    assert start.USER_HOME not in found


@pytest.mark.parametrize(("ours", "expected"), [("/cluster", "/cluster"), (None, os.devnull)])
@pytest.mark.parametrize("users", ["/home/me", None])
def test_mpi_begins_with_a_home_that_nobody_else_can_write(ours, expected, users, monkeypatch):
    for name, value in ((start.MPI_HOME, ours), ("HOME", users)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with start.use_mpi_home():
        assert os.environ["HOME"] == expected
    assert os.environ.get("HOME") == users


def test_a_rank_begins_mpi_before_its_own_program(tmp_path):
    library = tmp_path / "mpi4py"  # in place of the real one, which says nothing about when it began
    library.mkdir()
    (library / "__init__.py").touch()
    (library / "MPI.py").write_text("import os\nhome = os.environ['HOME']", encoding="utf-8")
    shows = "import json, os, mpi4py.MPI; print(json.dumps({'MPI': mpi4py.MPI.home, 'user': os.environ['HOME']}))"
    (library / "__main__.py").write_text(shows, encoding="utf-8")
    variables = start.make_home_variables("/cluster", {"HOME": "/home/me"})
    homes = run(start.make_command("mpi4py"), **variables, PYTHONPATH=str(tmp_path))
    assert homes == {"MPI": "/cluster", "user": "/home/me"}


@pytest.mark.parametrize("chosen", [None, "/mine"])
def test_ranks_run_no_compiled_code_that_others_can_have_made(chosen, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    home = Path("/tmp/mpi4dl_nb-x")
    found = RunDirectory(home, home).make_environment()["TORCHINDUCTOR_CACHE_DIR"]
    assert found == (chosen or "/tmp/mpi4dl_nb-x/torchinductor")
