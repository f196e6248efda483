"""Random plans on real MPI ranks: `mpiexec` once, all plans in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.combinations.drawn_plans import draw_flags, format_command, make_plan
from tests.sampling import SEED

RANKS = 8


def list_plans(count: int) -> list[list[str]]:
    """Plans for at most `RANKS` ranks, other ones every night."""
    found: list[list[str]] = []

    @seed(SEED)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(flags=draw_flags(most_ranks=RANKS))
    def collect(flags: list[str]) -> None:
        found.append(flags)

    collect()
    return found


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.nightly)])
def test_random_plans_are_exact_over_mpi(count: int, mpiexec, tmp_path: Path) -> None:
    chosen = list_plans(count)
    assert len(chosen) >= count
    file = tmp_path / "plans.json"
    file.write_text(json.dumps(chosen))
    done = mpiexec(RANKS, Path(__file__).parent / "run_plans.py", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout, done.stderr
    troubles = json.loads(done.stdout.splitlines()[-1])
    told = [
        f"{text}\n{format_command(chosen[int(n)], make_plan(chosen[int(n)]).ranks)}" for n, text in troubles.items()
    ]
    assert not told, "\n\n".join(told)
