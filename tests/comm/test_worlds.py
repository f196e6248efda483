"""The same cases over threads in this process, and over MPI: `mpiexec` once, all cases in it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.comm.world import SubGroup, pack_value, unpack_value
from mpi4dl_nb.engines.errors import ReleasedError

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


@pytest.mark.sampled(6)
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
    *("Is_finalized", "Is_initialized", "Exception", "Comm", "Intracomm", "Request", "Prequest"),
    *("MPIX_Query_cuda_support", "MPIX_GPU_query_support"),
}


def test_no_call_of_mpi_waits_for_another_rank() -> None:
    """A communicator that is revoked just as such a call begins may leave it waiting. (`Shrink` is made for that.)"""
    source = (HERE.parents[1] / "engines" / "comm" / "mpi.py").read_text()
    asked = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert {name for name in asked if name[0].isupper() and not name.isupper()} <= AT_ONCE


class Broken:
    """A world in which another rank has died."""

    rank, size = 0, 2

    def check_received(self) -> None:
        raise ReleasedError("released")


def test_what_a_group_receives_is_checked_by_its_world():
    with pytest.raises(ReleasedError):
        SubGroup(Broken(), (0, 1)).check_received()


@pytest.mark.parametrize("value", [None, "a", list(range(100)), bytes(1001)])
def test_a_packed_value_may_be_as_long_as_any_message(value):
    """MPI counts words of 16 bytes in 32 bits, but only in messages that they divide."""
    sealed = pack_value(value)
    assert len(sealed) % 16 == 0
    assert unpack_value(sealed) == value


SIZES = """
import torch
from mpi4dl_nb.engines.comm.mpi import _make_buffer
print(*(_make_buffer(torch.empty(size, dtype=torch.uint8))[1] for size in (0, 1, 6, 48)))
for size in (2**34 + 4, 2**36):
    try:
        _make_buffer(torch.empty(size, dtype=torch.uint8, device="meta"))
    except Exception as error:
        print(type(error).__name__, str(error).partition("and")[0])
"""


@pytest.mark.nightly
def test_a_long_message_is_counted_in_long_words(mpiexec, tmp_path: Path):
    (tmp_path / "sizes.py").write_text(SIZES)
    done = mpiexec(1, tmp_path / "sizes.py")
    words, *refused = done.stdout.splitlines()
    assert words == "0 1 3 3", done.stderr
    assert [text.partition(",) ")[2] for text in refused] == ["has 16.0 GB, ", "has 64.0 GB, "]
