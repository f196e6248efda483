"""`python -m mpi4dl_nb.engines plans`: the best plans for a known machine, by speed or by memory, within a limit."""

from __future__ import annotations

import json

import pytest

from mpi4dl_nb.engines.cli.plans_command import run_plans
from mpi4dl_nb.engines.errors import PlanError

FLAGS = ("--model", "resnet20_v1", "--image-size", "64", "--ranks", "2", "--batch-size", "2")


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[list[dict[str, float]], str]:
    """Return the lines of the best three plans, and the explanation."""
    assert run_plans([*FLAGS, "--top", "3", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line) for line in lines[:3]], "\n".join(lines[3:])


@pytest.mark.nightly
def test_it_prints_the_best_plans_by_speed_or_memory(capsys):
    fast, why = run(capsys)
    assert [each["images_per_s"] for each in fast] == sorted((each["images_per_s"] for each in fast), reverse=True)
    assert why.startswith("The best for 2 ranks, as predicted, is ")
    lean, why = run(capsys, "--by", "memory")
    sizes = [each["peak_bytes"] for each in lean]
    assert sizes == sorted(sizes)
    assert sizes[0] < min(each["peak_bytes"] for each in fast)
    assert why.startswith("What needs least memory for 2 ranks, as predicted, is ")
    limit_mb = (sizes[2] >> 20) + 1
    within, _ = run(capsys, "--memory-mb", str(limit_mb))
    assert all(each["peak_bytes"] <= limit_mb << 20 for each in within)


def test_what_it_cannot_take_is_refused_in_a_sentence():
    with pytest.raises(PlanError, match=r"Argument --by: invalid choice: 'cost'"):
        run_plans([*FLAGS, "--by", "cost"])
    with pytest.raises(PlanError, match="There is no machine 'Sumit'"):
        run_plans([*FLAGS, "--machine", "Sumit"])
