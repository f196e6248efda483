"""The cost of a monitor is measured by running the same training with and without one."""

from __future__ import annotations

import json

import pytest

from mpi4dl_nb.bench_monitor import main


@pytest.mark.parametrize("wrong", [("--pairs", "0"), ("--steps", "1"), ("--tiles", "-2")])
def test_numbers_that_measure_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert f"argument {wrong[0]}: " in capsys.readouterr().err


@pytest.mark.nightly
def test_it_tells_what_a_monitor_costs(capsys):
    main(["--backend", "loopback", "--pairs", "1", "--steps", "3", "--size", "16"])
    *said, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    assert len([text for text in said if text.startswith("pair 1")]) == 2
    assert (line["ranks"], line["steps"], line["pairs"]) == (3, 3, 1)
    assert abs(line["ratio"] - line["steps_per_s_monitored"] / line["steps_per_s"]) < 0.01
    assert 0 < line["telling_share"] < 0.1
    assert line["drawing_share"] >= 0
