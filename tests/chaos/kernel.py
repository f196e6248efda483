"""Faults of the process that holds the cluster, as a notebook's kernel does: what it had started ends, or goes on.

The process is this file's `main`, a training that saves after each step. It is hurt, and started again if it has ended;
in the end it has the weights of the training that nothing befell.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.training.training import Training
from tests.chaos.faults import SIGNALS, Fault, Images, list_family
from tests.chaos.training import PLAN, SHAPE, make_model
from tests.chaos.trial import GONE_S, HANG_AFTER_S, Verdict
from tests.mpi import make_mpi_environment

STEPS = 30
_ENDS_S = 120


class Kernels:
    """Judges such faults; `others` are the processes of clusters that were here before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.others = folder / "kernel", {process.pid for process in list_family()}
        self._wanted: dict[str, torch.Tensor] = {}

    def round(self, fault: Fault) -> Verdict:
        """One training that is hurt once."""
        start_s, verdict = time.monotonic(), Verdict(fault)
        shutil.rmtree(self.folder, ignore_errors=True)
        process = self._start_process()
        self._await(process, fault)
        with_it = {each.pid for each in psutil.Process(process.pid).children(recursive=True)}
        mine = [each for each in list_family() if each.pid in with_it]
        fault.note.write_text(repr(time.time()))
        process.send_signal(SIGNALS[fault.kind])
        if fault.kind == "stop":
            time.sleep(HANG_AFTER_S + 4 * fault.delay_s)
            process.send_signal(signal.SIGCONT)
        said = self._end(process, verdict)
        verdict.happened = True
        if process.returncode:
            self._check_end(process, said, verdict)
            left = psutil.wait_procs(mine, timeout=GONE_S)[1]
            verdict.wrong += [f"left: {[each.name() for each in left]}"] * bool(left)
            said = self._end(again := self._start_process(), verdict)
            verdict.wrong += [f"it did not go on: {said[-500:]}"] * bool(again.returncode)
        self._compare(verdict)
        verdict.seconds = time.monotonic() - start_s
        return verdict

    def _start_process(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.kernel", self.folder], text=True, env=make_mpi_environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def _await(self, process: subprocess.Popen[str], fault: Fault) -> None:
        """The moment: while it starts, or after some steps, each of which is saved."""
        if fault.when == "start":
            time.sleep(4 * fault.delay_s)
            return
        for _ in range(2 + fault.rank):
            process.stdout.readline()
        time.sleep(fault.delay_s / (20 if fault.when == "save" else 4))

    def _end(self, process: subprocess.Popen[str], verdict: Verdict) -> str:
        try:
            return process.communicate(timeout=_ENDS_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            verdict.wrong.append("it hangs")
            return process.communicate()[1]

    def _check_end(self, process: subprocess.Popen[str], said: str, verdict: Verdict) -> None:
        """It ended as it was told to, and says so where it could."""
        fault = verdict.fault
        code = {"interrupt": 1}.get(fault.kind, -SIGNALS[fault.kind])
        if process.returncode not in (code, -SIGNALS[fault.kind]):
            verdict.wrong.append(f"it ended with code {process.returncode}: {said[-500:]}")
        if fault.when != "start" and fault.kind in ("terminate", "interrupt") and "go on from there" not in said:
            verdict.wrong.append(f"it does not say where it is saved: {said[-500:]}")

    def _compare(self, verdict: Verdict) -> None:
        if not self._wanted:
            with Cluster(PLAN.ranks, backend="loopback") as cluster:
                training = Training(make_model(), PLAN, cluster, SHAPE)
                training.fit(Images(), steps=STEPS, progress=False)
                self._wanted = training.state_dict()
        saved = _list_saved(self.folder)
        found = load_file(saved[-1] / "model.safetensors") if saved else {}
        unequal = [
            name for name, tensor in self._wanted.items() if not torch.equal(found.get(name, torch.empty(0)), tensor)
        ]
        verdict.wrong += [f"other weights: {unequal}"] * bool(unequal)


def _list_saved(folder: Path) -> list[Path]:
    return list_checkpoints(folder) if folder.is_dir() else []


class _Told:
    """Prints a line for each step."""

    stops = False

    def begin(self, training: Training, total: int | None) -> None:
        """Nothing."""

    def handle_event(self, event: object) -> None:
        """It is done."""
        print("step", flush=True)

    def end(self, outcome: object) -> None:
        """Nothing."""


def main(folder: Path) -> None:
    """A training of so many steps, from where it is saved."""
    with Cluster(PLAN.ranks, hang_after_s=HANG_AFTER_S) as cluster:
        training = Training(make_model(), PLAN, cluster, SHAPE)
        if _list_saved(folder):
            training.load(folder)
        if training.steps < STEPS:
            training.fit(Images(), steps=STEPS, progress=False, save=folder, save_every=1, monitor=_Told())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
