"""The same cases over threads in this process, and over MPI: `mpiexec` once, all cases in it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from engines.comm.loopback import run_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cases import CASES, HEAVY, RANKS  # noqa: E402


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_over_loopback(name: str) -> None:
    run_ranks(RANKS, CASES[name])


@pytest.fixture(scope="module")
def mpi_results(mpiexec, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Of the cases that are run here."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    done = mpiexec(RANKS, HERE / "run.py", *(name for name in CASES if f"test_over_mpi[{name}]" in asked))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in HEAVY)) for name in CASES])
def test_over_mpi(name: str, mpi_results: dict[str, list[str]]) -> None:
    assert mpi_results[name] == []


@pytest.mark.nightly
def test_a_failing_case_is_reported(mpiexec, tmp_path: Path) -> None:
    """The runner cannot pass by saying nothing: a case that fails on one rank is told."""
    bad = "def bad(world):\n    assert world.rank != 2\n"
    (tmp_path / "cases.py").write_text(f"{bad}CASES = {{'bad': bad}}\n")
    (tmp_path / "run.py").write_text((HERE / "run.py").read_text())
    done = mpiexec(RANKS, tmp_path / "run.py")
    (trouble,) = json.loads(done.stdout.splitlines()[-1])["bad"]
    assert "assert world.rank != 2" in trouble


AT_ONCE = {
    *("Dup", "Free", "Get_error_class", "Get_error_string", "Get_failed", "Iprobe", "Irecv", "Is_revoked", "Isend"),
    *("Recv_init", "Revoke", "Send_init", "Set_errhandler", "Shrink", "Startall", "Test", "Testall", "Finalize"),
    *("Is_finalized", "Is_initialized", "Exception", "Intracomm", "Request", "Prequest"),
    *("MPIX_Query_cuda_support", "MPIX_GPU_query_support"),
}


def test_no_call_of_mpi_waits_for_another_rank() -> None:
    """A communicator that is revoked just as such a call begins may leave it waiting. (`Shrink` is made for that.)"""
    source = (HERE.parents[1] / "engines" / "comm" / "mpi.py").read_text()
    asked = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert {name for name in asked if name[0].isupper() and not name.isupper()} <= AT_ONCE
