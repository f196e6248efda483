"""An error in a cell: the user's own lines and the message, without forty lines of ours."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mpi4dl_nb import Cluster

CELL = """
from mpi4dl_nb import Cluster

def mine(cluster):
    cluster.call(print)

mine(Cluster(3, backend="loopback"))
"""


@pytest.fixture
def shell():
    yield InteractiveShell()
    InteractiveShell.clear_instance()


def test_a_cell_tells_the_users_lines_and_the_message(shell, capsys):
    shell.run_cell(CELL)
    told = capsys.readouterr().out
    assert "mine(Cluster(3" in told
    assert "cluster.call(print)" in told
    assert told.strip().endswith(
        "RankError: The cluster is not started. Call start(), or use `with Cluster(...) as cluster:`."
    )
    assert "cluster.py" not in told
    assert "IPython" not in told
    assert len(told.splitlines()) < 10


def test_what_is_known_of_a_failed_rank_is_reported(shell, capsys):
    shell.run_cell(
        "from mpi4dl_nb import Cluster\n"
        "with Cluster(2, backend='loopback') as cluster:\n"
        "    cluster.call(lambda host: 1 // host.world.rank)"
    )
    told = capsys.readouterr().out
    assert "Rank 0: ZeroDivisionError" in told
    assert "On rank 0" in told


def test_all_of_it_is_still_there():
    with pytest.raises(RuntimeError) as caught:
        Cluster(3, backend="loopback").call(print)
    assert any("mpi4dl_nb" in str(entry.path) for entry in caught.traceback)


TRACED = """
import torch
from mpi4dl_nb import Plan, forecast

class Chooses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return {line}

forecast(torch.nn.Sequential(Chooses()), Plan(split_size=1), (1, 3, 32, 32), "Summit")
"""


@pytest.mark.parametrize(
    "line",
    [
        "self.first(images) if images.sum() > 0 else images",
        "self.first(images[:, :2])",
        "torch.cat([images, images[1:]], 1)",
    ],
)
def test_of_a_trace_the_users_own_lines_are_shown_and_not_those_of_pytorch(shell, capsys, line):
    shell.run_cell(TRACED.format(line=line))
    shown = capsys.readouterr().out
    assert "forecast(torch.nn.Sequential(Chooses())" in shown
    assert f"return {line}" in shown, "the layer that fails"
    assert "site-packages" not in shown
    assert "contextlib" not in shown
    assert len(shown.splitlines()) < 14
    *_, note = shown.strip().splitlines()
    assert note.startswith("The traceback of PyTorch is hidden: ")
    # What the note says gives all of it.
    shell.run_cell(note.partition(": ")[2])
    complete = capsys.readouterr()
    assert (complete.out + complete.err).count("site-packages") > 5


def test_a_plan_that_is_wrong_has_no_note_of_pytorch(shell, capsys):
    shell.run_cell("from mpi4dl_nb import Plan\nPlan(split_size=0)")
    shown = capsys.readouterr().out.strip()
    assert shown.endswith("PlanError: split_size=0 must be a whole number of at least 1.")
    assert len(shown.splitlines()) < 5


def test_an_error_that_ranks_raise_on_purpose_has_no_traceback_of_theirs(shell, capsys):
    shell.run_cell(
        "from mpi4dl_nb import Cluster, ImageError\n"
        "def refuse(host):\n"
        "    raise ImageError('no such image')\n"
        "with Cluster(2, backend='loopback') as cluster:\n"
        "    cluster.call(refuse)"
    )
    shown = capsys.readouterr().out.strip()
    assert shown.endswith("ImageError: Rank 0: no such image (And so on rank 1.)")
    assert "On rank" not in shown
