"""The batch script of the notebooks folder, in a job that is made up: its hosts are two names of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "notebooks" / "slurm.sh"
NOTEBOOK = """
from mpi4dl_nb import Cluster

with Cluster(2) as cluster:
    print(*cluster.hosts.hosts, *cluster.call(lambda host: f"{host.world.rank} of {host.world.size}"), sep="; ")
"""


def test_the_script_is_sound():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
def test_a_cluster_in_a_job_takes_its_hosts(tmp_path):
    """No ssh is needed: both names are this machine's."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip("this machine does not know its own name")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"localhost,{name}", "SLURM_TASKS_PER_NODE": "1(x2)"}
    paths = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(SCRIPT.parents[1]),
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run(
        ["bash", SCRIPT, "notebook.py"], env={**os.environ, **job, **paths, "MPI4DL_NB_SSH": "ssh"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == f"localhost:1; {name}:1; 0 of 2; 1 of 2\n", done.stderr
