"""A notebook whose `fit(save=)` is told to end by a batch system, alone or with all of its ranks: saved, then ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.interrupts import Interrupts
from mpi4dl_nb.launch.reaper_process import MARK
from mpi4dl_nb.training.training import Training
from tests.chaos.training import SHAPE, make_batches, make_model
from tests.mpi import make_mpi_environment
from tests.training.test_healing import PLAN

STEPS = 400
SCRIPT = """
import sys
from mpi4dl_nb import Cluster, Training
from tests.chaos.training import SHAPE, make_batches, make_model
from tests.training.test_healing import PLAN

class Told:
    stops = False
    def begin(self, training, total): pass
    def handle_event(self, event): print("step", flush=True)
    def end(self, outcome): pass

with Cluster(3, backend=sys.argv[2]) as cluster:
    training = Training(make_model(), PLAN, cluster, SHAPE)
    saved = {"save": sys.argv[1], "save_every": int(sys.argv[3])}
    training.fit(make_batches(4, seed=3), epochs=100, progress=False, monitor=Told(), **saved)
"""


def start_script(folder: Path, backend: str, every: int) -> subprocess.Popen[str]:
    """It has done some steps."""
    command = [sys.executable, "-c", SCRIPT, str(folder), backend, str(every)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=make_mpi_environment(),
        start_new_session=True,
    )
    for _ in range(5):
        assert process.stdout.readline() == "step\n", process.stderr.read()
    return process


def list_family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if MARK in each.environ()]


def check_goes_on(folder: Path) -> None:
    """What was saved is a training of so many steps, to the bit."""
    with Cluster(3, backend="loopback") as cluster:
        loaded, fresh = (Training(make_model(), PLAN, cluster, SHAPE) for _ in range(2))
        steps = loaded.load(folder)
        assert 3 <= steps < STEPS
        data = make_batches(4, seed=3)
        for number in range(steps):
            fresh.step(*data[number % 4])
        for one, other in zip(loaded.state_dict().values(), fresh.state_dict().values(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["mpi", "loopback"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notebook_that_is_asked_to_end_saves_and_ends(tmp_path, backend, number):
    process = start_script(tmp_path / "saved", backend, 1000)
    ranks = list_family(process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -number
    path = list_checkpoints(tmp_path / "saved")[-1]
    assert f"Stopped by {number.name} after " in said
    assert f"Saved as {path}: go on from there." in said
    assert "Traceback" not in said
    assert not psutil.wait_procs(ranks, timeout=20)[1]
    check_goes_on(tmp_path / "saved")


@pytest.mark.nightly
def test_where_the_ranks_are_asked_too_the_last_checkpoint_is_named(tmp_path):
    """As systemd does, and batch systems at the end of a job's time."""
    process = start_script(tmp_path / "saved", "mpi", 1)
    ranks = list_family(process)
    for each in [psutil.Process(process.pid), *ranks]:
        with contextlib.suppress(psutil.NoSuchProcess):  # mpiexec, told before, may have ended a rank already
            each.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "go on from there" in said
    assert not psutil.wait_procs(ranks, timeout=20)[1]
    check_goes_on(tmp_path / "saved")


def test_a_signal_is_passed_to_the_handler_that_was_set_before(capsys):
    """An interrupt is for the work under way alone; the others are for the process."""
    heard: list[int] = []
    before = {
        each: signal.signal(each, lambda got, frame: heard.append(got)) for each in (signal.SIGTERM, signal.SIGINT)
    }

    def work(number: int) -> None:
        with Interrupts(tuple(before), obeyed=True) as asked:
            os.kill(os.getpid(), number)
            assert asked() == number
            raise ValueError("saved")

    try:
        for number in before:
            with pytest.raises(ValueError, match="saved"):
                work(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM]
    assert capsys.readouterr().err == "saved\n"
