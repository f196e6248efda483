"""How tests start ranks: a launcher that waits for itself is started again, one whose ranks work is not."""

from __future__ import annotations

import subprocess

import pytest

from tests.mpi import run_launcher


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr("tests.mpi._LOOK_S", 0.2)


def test_a_launcher_without_ranks_is_started_again(tmp_path):
    script = f"[ -e {tmp_path}/tried ] && echo here && exit 3; touch {tmp_path}/tried; exec sleep 60"
    found = run_launcher(["sh", "-c", script], {"PATH": "/bin:/usr/bin"})
    assert (found.stdout, found.returncode) == ("here\n", 3)


def test_one_whose_ranks_work_is_awaited(tmp_path):
    script = f"echo again >> {tmp_path}/log; sleep 2; cat {tmp_path}/log"
    assert run_launcher(["sh", "-c", script], {"PATH": "/bin:/usr/bin"}).stdout == "again\n"


def test_three_are_enough():
    with pytest.raises(subprocess.TimeoutExpired):
        run_launcher(["sh", "-c", "exec sleep 60"], {"PATH": "/bin:/usr/bin"})
