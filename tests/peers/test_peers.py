"""Who is exact: this project is, what is wrong is called so, and a peer that fails or hangs is said to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mpi4dl_nb.engines.errors import PlanError
from tests.peers import compare
from tests.peers.forked import run_forked
from tests.peers.jobs import JOBS, Arrays, Job
from tests.peers.outcome import measure_errors
from tests.peers.table import BEGIN, END, make_table, write_table
from tests.peers.torch_operators import compute_reference

NAMES = [job.name for job in JOBS]
SOME = ["convolution 3 x 3, stride 2", "batch norm", "U-Net"]


@pytest.mark.parametrize("job", JOBS, ids=NAMES)
def test_a_job_has_a_gradient_for_each_of_its_values(job: Job):
    reference = compute_reference(job)
    assert reference.keys() == {"output", "image", *job.shapes}
    assert reference["image"].shape == job.image_shape
    assert all(np.abs(values).max() > 0.001 for values in reference.values())


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", compare.RANKS)
def test_this_project_is_exact_in_every_job(ranks: int):
    lines = list(compare.run_system("mpi4dl_nb", ranks, NAMES))
    assert [line["job"] for line in lines] == NAMES
    assert [line for line in lines if line["verdict"] != "exact"] == []


@pytest.mark.nightly
def test_a_peer_has_a_line_for_each_job():
    lines = list(compare.run_system("torch DTensor", 2, SOME))
    assert [line["job"] for line in lines] == SOME
    assert {line["verdict"] for line in lines} <= {"exact", "wrong", "error"}
    assert all(torch.__version__.startswith(line["version"]) for line in lines)


def test_what_is_not_installed_is_a_line_too(monkeypatch):
    monkeypatch.setitem(compare.NEEDS, "JAX NamedSharding", "a-package-that-nobody-has")
    lines = list(compare.run_system("JAX NamedSharding", 2, SOME))
    assert [(line["job"], line["verdict"]) for line in lines] == [(name, "not installed here") for name in SOME]


def test_a_system_that_cannot_begin_or_end_is_cut_off():
    (line,) = compare.run_system("another", 2, SOME[:1])
    assert (line["verdict"], line["reason"]) == ("error", "ended with code 1: KeyError: 'another'")
    (line,) = compare.run_system("mpi4dl_nb", 2, SOME[:1], limit_s=0.2)
    assert (line["verdict"], line["reason"]) == ("cut off", "cut off after 0.2 s")


def test_jobs_fail_hang_and_die_alone():
    def compute(job: Job, rank: int, _folder: Path) -> Iterator[Arrays]:
        yield {"output": np.ones(2)}
        if job.name == NAMES[0] and rank == 1:
            raise ValueError("rank 1 cannot do this")
        if job.name in NAMES[:2]:
            time.sleep(60)
        if job.name == NAMES[2]:
            os._exit(3)
        yield {"image": np.zeros(2)}

    start_s = time.monotonic()
    failed, hung, dead, done = run_forked(NAMES[:4], 2, compute, limit_s=2)
    assert time.monotonic() - start_s < 30
    assert failed.refusal == "ValueError: rank 1 cannot do this"
    assert hung.refusal == "cut off after 2 s"
    assert dead.refusal.startswith("its processes ended with codes")
    assert (list(hung.results), hung.results["output"].tolist()) == (["output"], [1.0, 1.0])
    assert (done.refusal, sorted(done.results)) == ("", ["image", "output"])


def test_the_processes_of_a_job_end_with_their_parent(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import os, time\n"
        "from tests.peers.forked import run_forked\n"
        "def compute(job, rank, folder):\n"
        f"    open('{tmp_path}/pid', 'w').write(f'{{os.getpid()}} ')\n"
        "    time.sleep(600)\n"
        f"list(run_forked(['{NAMES[0]}'], 1, compute))\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=environment) as parent:
        pid = tmp_path / "pid"
        assert wait_for(lambda: pid.exists() and pid.read_text().endswith(" "))
        parent.kill()
    assert wait_for(lambda: not psutil.pid_exists(int(pid.read_text())))


def wait_for(condition: Callable[[], bool], most_s: float = 30) -> bool:
    deadline = time.monotonic() + most_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_errors_are_relative_to_the_largest_value():
    reference = {"output": np.array([4.0, 1.0]), "image": np.array([2.0]), "a": np.array([1.0]), "b": np.array([10.0])}
    results = {"output": np.array([4.0, 2.0]), "a": np.array([1.0]), "b": np.array([5.0])}
    assert measure_errors(results, reference) == {"output": 0.25, "weights": 0.5}
    assert measure_errors({"output": np.array([4.0])}, reference) == {"output": float("inf")}
    assert measure_errors({"output": np.array([4.0, np.nan])}, reference) == {"output": float("inf")}


@pytest.mark.parametrize(
    ("factor", "refusal", "verdict"),
    [(1, "", "exact"), (1.5, "", "wrong"), (1, "no backward", "error"), (1.5, "no backward", "wrong")],
)
def test_a_wrong_result_counts_also_where_the_job_fails_after_it(factor, refusal, verdict, tmp_path):
    reference = compute_reference(JOBS[0])
    reference["output"] *= factor
    np.savez(tmp_path / "results.npz", **reference)
    answer = {"job": JOBS[0].name, "results": str(tmp_path / "results.npz"), "refusal": refusal}
    line = compare._evaluate_answer(answer)
    assert (line["verdict"], line["output"], line.get("reason", "")) == (verdict, factor - 1, refusal)


def test_a_job_without_all_results_is_not_exact(tmp_path):
    np.savez(tmp_path / "results.npz", output=compute_reference(JOBS[0])["output"])
    line = compare._evaluate_answer({"job": JOBS[0].name, "results": str(tmp_path / "results.npz"), "refusal": ""})
    assert line["verdict"] == "error"
    assert "kernel" in line["reason"]


def test_the_table_takes_its_place_in_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter", encoding="utf-8")
    about = {"system": "A", "version": "1.0", "ranks": 2}
    lines = [
        {**about, "job": "pool", "verdict": "exact", "output": 0.0, "image": 3e-16},
        {**about, "job": "norm", "verdict": "wrong", "output": 0.28, "weights": 2.8},
        {**about, "job": "slice", "verdict": "wrong", "output": None},
        {**about, "job": "roll", "verdict": "error", "reason": "it cannot"},
    ]
    write_table(page, lines)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "old" not in text
    assert make_table(lines) in text
    assert [row.split(" | ")[1] for row in make_table(lines).splitlines()[2:]] == [
        "3e-16 |", "**2.8** |", "**other shape** |", "error |",
    ]  # fmt: skip


def test_flags_that_name_nothing_are_refused_before_anything_is_computed(tmp_path):
    with pytest.raises(PlanError, match="torch DTensor"):
        next(compare.print_comparison(["--systems", "torch DTensr"]))
    with pytest.raises(PlanError, match="batch norm"):
        next(compare.print_comparison(["--jobs", "attention"]))
    with pytest.raises(PlanError, match="two lines"):
        next(compare.print_comparison(["--write", str(tmp_path / "no page.md")]))
    line = json.loads(next(compare.print_comparison(["--systems", "JAX NamedSharding", "--jobs", "batch norm"])))
    assert (line["system"], line["job"]) == ("JAX NamedSharding", "batch norm")
