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


def test_what_is_known_of_a_failed_rank_is_told(shell, capsys):
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
