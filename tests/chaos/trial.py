"""A training on five ranks that faults befall, one in each round, and how it is judged: the same five questions.

Was it told, and in time? Of whom? Is anything left of what ended? Does the cluster work again? Are the weights, to the
bit, those of a training without faults? A fault that harms nobody, as where a rank has its answer already, need not be
told. A hang is a round that does not end: the process ends then, by SIGALRM, with a trace of all its threads.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import Mpi4dlError, RankError
from mpi4dl_nb.engines.train.interrupts import StoppedError
from mpi4dl_nb.launch.reaper_process import MARK, is_running
from mpi4dl_nb.planning.plan_benchmark import PlanTrial, run_interleaved
from mpi4dl_nb.planning.plan_tuner import PlanTuner
from mpi4dl_nb.training.training import Training
from tests.chaos.faults import (
    HELPERS,
    Fault,
    Images,
    add_targets,
    cancel_faults,
    find_roles,
    give_back,
    list_family,
    schedule_fault,
    start_fault,
    wait_for_all,
)
from tests.chaos.training import PLAN, SHAPE, Heard, make_model

HANG_AFTER_S = 3.0
STEPS = 3  # of a round
EVERY = 2  # steps between two checkpoints
GONE_S = 10.0
_ROUND_S, _END_S = 240, 5.0
_NAMES = {"controller": ("controller",), "mpiexec": ("mpiexec",)}


def _get_names(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of the clusters that are this process's: others on this machine have theirs."""
    mine, found = set(psutil.Process().children(recursive=True)), set()
    for process in processes:
        with suppress(psutil.Error):
            if process in mine:
                found.add(process.environ()[MARK])
    return found


@dataclass
class Verdict:
    """Of one fault: what was told of it after how many seconds, and what was `wrong`.

    In a calibration the notebook measures by itself for some seconds, and asks the ranks nothing: it counts from
    `asked_s`, when they were asked for what has failed.
    """

    fault: Fault
    happened: bool = False
    asked_s: float = 0.0
    told_s: float | None = None
    texts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def limit_s(self) -> float:
        """How soon it should be told: at once where a process is gone, later where one only does not go on."""
        slow = {"stop", "hang", "pipe", "cut"}.intersection(kind for kind, _ in self.fault.parts)
        return HANG_AFTER_S + 2 if slow else 1.0 if self.fault.when not in ("start", "heal") else 2.0

    @property
    def is_late(self) -> bool:
        """Whether that was too late. What a cut does to a start shows only as a start for which nothing is done."""
        told = self.told_s is not None and self.told_s > self.limit_s
        return told and not (self.fault.when in ("start", "heal") and "cut" in self.fault.kind)

    def tell(self, text: str, now_s: float) -> None:
        """Something was told, be it of this fault or of what came of it."""
        self.texts.append(text)
        if self.told_s is None and self.fault.is_noted:
            self.told_s = now_s - max(self.fault.happened_s, self.asked_s)


class Trial:
    """A training, its reference in threads that no fault befalls, and the verdicts so far."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.training, self.heard, self.folder = Training(make_model(), PLAN, cluster, SHAPE), Heard(), folder
        self.reference = Training(make_model(), PLAN, Cluster(PLAN.ranks, backend="loopback").start(), SHAPE)
        self.verdict: Verdict | None = None
        self._names: set[str] = set()
        self._began_to_heal: Callable[[], None] = lambda: None
        self._tuner = PlanTuner(make_model(), SHAPE, cluster)
        self._watch(cluster)
        # Ranks import this folder, and all that it needs, here: on a busy machine that takes longer than the limit.
        limit_s, cluster.hang_after_s = cluster.hang_after_s, None
        cluster.call(cancel_faults)
        cluster.hang_after_s = limit_s
        self.training.save(folder)
        self._state: dict[str, Tensor] = self.training.state_dict()

    def round(self, fault: Fault) -> Verdict:
        """Some steps, in the midst of which, or before which, a fault happens."""
        start_s = time.monotonic()
        cluster, target = self.training.cluster, self.training.steps + STEPS
        self._names.add(cluster._ranks._place.name)
        fault = add_targets(fault, cluster._ranks._place.name)
        self.verdict = verdict = Verdict(fault)
        signal.alarm(_ROUND_S)
        with self._schedule_fault(fault):
            operation = {
                "save": self._save, "load": self._load, "start": self._restart, "calibrate": self._calibrate,
                "verify": self._verify, "tune": self._tune, "predict": self._predict,
            }  # fmt: skip
            if act := operation.get(fault.when):
                self._run_or_heal(act)
            while self.training.steps < target or not self._run_or_heal(self._look):
                if self.training.steps < target:
                    self._run_or_heal(lambda: self._fit(fault))
        signal.alarm(0)
        verdict.happened = fault.is_noted
        self.reference.fit(Images(), steps=STEPS, progress=False)
        self._check_round(verdict)
        verdict.seconds = time.monotonic() - start_s
        return verdict

    def close(self) -> None:
        """End the reference."""
        self.reference.cluster.stop()

    # ---- what is done while it happens

    def _run_or_heal(self, act: Callable[[], object]) -> bool:
        """Whether it comes to its end. If a failure is told, the cluster is healed, and the training is whole again."""
        try:
            act()
            return True
        except (Mpi4dlError, KeyboardInterrupt, StoppedError) as error:
            self.verdict.tell(
                " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), time.time()
            )
        for _ in range(3):  # a fault may befall the healing itself
            with suppress(Mpi4dlError):
                self.training.cluster.heal()
                self.training.load(self.folder)
                return False
        self.verdict.wrong.append("the cluster was not healed in three attempts")
        return False

    def _look(self) -> None:
        """What has come of it; a fault may show only now, if a helper takes its time to end."""
        cluster, fault = self.training.cluster, self.verdict.fault
        if fault.is_noted and self.verdict.told_s is None:
            if "cut" in fault.kind:  # MPI ends a rank that has lost its connection, once the rank speaks
                self._wait_while(lambda: self._count_ranks() == PLAN.ranks)
            elif fault.kind == "terminate" and fault.whom in HELPERS:
                asked = [process for process in list_family(cluster._ranks._place.name) if process.pid in fault.pids]
                self._wait_while(lambda: any(map(is_running, asked)))
        give_back([pid for pids in find_roles(cluster._ranks._place.name).values() for pid in pids])
        cluster.call(cancel_faults)
        self._state = self.training.state_dict()

    def _count_ranks(self) -> int:
        """Have all ranks speak with each other by MPI, and return how many there are then."""
        cluster = self.training.cluster
        cluster.call(wait_for_all)
        return len(find_roles(cluster._ranks._place.name).get("rank", ()))

    def _wait_while(self, is_whole: Callable[[], bool]) -> None:
        """Wait a few seconds at most until something has ended: before that there is nothing to tell."""
        deadline = time.monotonic() + _END_S
        while is_whole() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.verdict.fault.note.write_text(str(time.time()))

    def _fit(self, fault: Fault) -> None:
        images = Images(fault if fault.when == "reader" else None)
        self.training.fit(
            images, steps=STEPS, progress=False, save=self.folder, save_every=EVERY, on_failure="heal",
            monitor=self.heard,
        )  # fmt: skip

    def _save(self) -> None:
        self.training.save(self.folder)

    def _load(self) -> None:
        self.training.load(self.folder)

    def _restart(self) -> None:
        self.training.cluster.restart()
        self.training.load(self.folder)

    def _calibrate(self) -> None:
        cluster, call = self.training.cluster, self.training.cluster.call

        def call_and_record(*args: object, **kwargs: object) -> object:
            begin_s = time.time()
            try:
                return call(*args, **kwargs)
            except Mpi4dlError:
                self.verdict.asked_s = self.verdict.asked_s or begin_s
                raise

        with patch.object(cluster, "call", call_and_record):
            cluster.calibrate(again=True, quick=True, accept_noise=True, progress=False)

    def _verify(self) -> None:
        if not self.training.verify()["ok"]:
            self.verdict.wrong.append("verify says that the ranks are wrong")

    def _predict(self) -> None:
        with torch.no_grad():
            found, wanted = (
                each.predict(torch.ones(SHAPE, dtype=torch.float64)) for each in (self.training, self.reference)
            )
        self.verdict.wrong += ["another prediction"] * (not torch.equal(found, wanted))

    def _tune(self) -> None:
        """Measure a plan, as tuning does with each that it has predicted to be fast."""
        trial = PlanTrial(self.training.cluster, lambda: self._tuner.make_recipe(PLAN))
        run_interleaved([trial], steps=2)
        if trial.failure:
            raise RankError(trial.failure)

    # ---- how it is made to happen

    @contextmanager
    def _schedule_fault(self, fault: Fault) -> Iterator[None]:
        """Within it the fault happens, at its own time."""
        cluster = self.training.cluster
        match fault.when:
            case "idle":
                start_fault(fault)
                time.sleep(fault.delay_s)
            case "start":
                self._start_fault_later(fault)
            case "heal":
                first = replace(fault, kind="kill", whom="rank", when="step", note=fault.note.with_name("first"))
                first.note.unlink(missing_ok=True)
                cluster.call(schedule_fault, add_targets(first, cluster._ranks._place.name))
                self._began_to_heal = lambda: self._start_fault_later(fault)
            case "reader":
                pass
            case _:
                cluster.call(schedule_fault, fault)
        try:
            yield
        finally:
            self._began_to_heal = lambda: None

    def _start_fault_later(self, fault: Fault) -> None:
        """At a process of the next cluster, some time after it has come."""
        self._began_to_heal = lambda: None
        before = {process.pid for process in list_family()}

        def wait_and_start_fault() -> None:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                for name in _get_names(process for process in list_family() if process.pid not in before):
                    if (now := add_targets(fault, name)).pids and not before.intersection(now.pids):
                        time.sleep(2 * fault.delay_s)
                        start_fault(now)
                        return
                time.sleep(0.05)

        threading.Thread(target=wait_and_start_fault, daemon=True).start()

    # ---- how it is judged

    def _watch(self, cluster: Cluster) -> None:
        """Note when something is told: a failure that is healed then, or a checkpoint that could not be written."""
        heal, write = cluster.heal, tqdm.write

        def heal_and_record(fewer: bool = False) -> Cluster:
            if self.verdict:
                self.verdict.tell("", time.time())
                give_back(self.verdict.fault.pids)
            self._began_to_heal()
            return heal(fewer)

        def write_and_record(text: str, *args: object, **kwargs: object) -> None:
            if self.verdict and text.startswith("Not saved"):
                self.verdict.tell(text, time.time())
                give_back(self.verdict.fault.pids)
            write(text, *args, **kwargs)

        cluster.heal, tqdm.write = heal_and_record, write_and_record  # type: ignore[method-assign]

    def _check_round(self, verdict: Verdict) -> None:
        fault, name = verdict.fault, self.training.cluster._ranks._place.name
        verdict.texts += [event.text for event in self.heard.healed]
        self.heard.healed.clear()
        told = " ".join(filter(None, verdict.texts))
        if verdict.told_s is not None and fault.when not in ("start", "heal"):
            wanted = [f"{word}ank {rank}" for rank in fault.hurt for word in "Rr"]
            wanted += [name for _, whom in fault.parts for name in _NAMES.get(whom, ())]
            if fault.whom not in ("reaper", "notebook") and not any(word in told for word in wanted):
                verdict.wrong.append(f"told of others: {told}")
        if not fault.is_noted and told and fault.when != "heal":
            verdict.wrong.append(f"told without a fault: {told}")
        deadline = time.monotonic() + GONE_S
        while (left := self._list_left(name)) and time.monotonic() < deadline:
            time.sleep(0.1)
        verdict.wrong += [f"left: {left}"] * bool(left)
        found, wanted_state = self._state, self.reference.state_dict()
        unequal = [key for key, tensor in wanted_state.items() if not torch.equal(found[key], tensor)]
        verdict.wrong += [f"other weights: {unequal}"] * bool(unequal)
        if self.training.steps != self.reference.steps:
            verdict.wrong.append(f"{self.training.steps} steps instead of {self.reference.steps}")

    def _list_left(self, name: str) -> list[str]:
        """Processes of clusters that this process has had before; others on this machine have theirs."""
        self._names.add(name)
        return [f"{each.pid} {each.name()}" for before in self._names - {name} for each in list_family(before)]
