"""How tests start ranks: a launcher that waits for itself is started again, one whose ranks work is not."""

from __future__ import annotations

import sys

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


def test_a_rank_that_has_ended_counts_as_none_while_its_launcher_does_not_ask(tmp_path):
    script = f"[ -e {tmp_path}/tried ] && exit 3; touch {tmp_path}/tried; true & exec sleep 60"
    assert run_launcher(["sh", "-c", script], {"PATH": "/bin:/usr/bin"}).returncode == 3


def test_ranks_that_hang_tell_where(monkeypatch):
    monkeypatch.setattr("tests.mpi._LOOKS", 5)
    script = f"{sys.executable} -X faulthandler -c 'import time; time.sleep(60)'; echo the launcher goes on"
    with pytest.raises(TimeoutError, match=r"(?s)the launcher goes on.*Fatal Python error: Aborted"):
        run_launcher(["sh", "-c", script], {"PATH": "/bin:/usr/bin"})


def test_three_are_enough():
    with pytest.raises(TimeoutError, match="3 times"):
        run_launcher(["sh", "-c", "exec sleep 60"], {"PATH": "/bin:/usr/bin"})
