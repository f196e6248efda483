"""Faults as data: what happens, to whom, and in the midst of what; and how each is made to happen.

A fault inside a rank, or one sent from there, comes with a number of events of that rank, which writes on its board
before each instruction of a step; outside of steps also before and after it waits for a message. So the same seed means
the same place.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from mpi4dl_nb.cluster.mpi_ranks import CONTROLLER_PROGRAM
from mpi4dl_nb.engines.comm.status_board import StatusBoard
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.server.rank_server import RankServer, allow_during_step
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.launch.reaper_process import MARK
from tests.chaos.links import cut_connections
from tests.chaos.training import PLAN, SHAPE

SIGNALS = {
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "crash": signal.SIGSEGV,
    "interrupt": signal.SIGINT,
}  # fmt: skip
RESOURCES = {"disk": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS, "files": resource.RLIMIT_NOFILE}
_EVENTS = {  # about as many as there are
    "step": 40, "save": 12, "load": 8, "calibrate": 40, "reader": 5, "verify": 60, "tune": 40, "predict": 20,
}  # fmt: skip
_NUMBERLESS = ("controller", "mpiexec")
HELPERS = ("controller", "mpiexec", "supervisor", "nanny", "reaper")
_WORDS = {
    "save": b"save",
    "load": b"load",
    "calibrate": b"run_calibration_part",
    "verify": b"record_reference",
    "tune": b"time_step",
    "predict": b"call_prediction",
}  # on a rank's board, while it does so

_PHASES = ("calibrate", "verify", "tune", "predict")
_PAIRS = ("rank+controller", "rank+mpiexec", "supervisor+rank", "controller+mpiexec", "mpiexec+supervisor")

# (kinds, whom, when): all that can be drawn, each combination of a line as likely as any other one of it.
_LINES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("kill", "stop", "terminate", "crash", "raise", "exit", "hang"), ("rank",), ("step", "save", "load", "reader")),
    (("kill", "stop", "terminate", "raise"), ("ranks",), ("step", "save", "load")),
    (("kill", "stop", "terminate"), HELPERS, ("step", "save", "load")),
    (("kill", "stop", "terminate"), ("rank", "ranks", *HELPERS), ("idle",)),
    (("kill", "stop", "terminate"), ("rank", *HELPERS), ("heal", "start")),
    (("kill", "stop", "raise"), ("rank",), _PHASES),
    (("kill", "stop"), ("controller", "mpiexec", "supervisor", "nanny"), _PHASES),
    (("cut",), ("rank", "controller", "mpiexec"), ("step", "save", "load", "heal", "start", *_PHASES)),
    (("kill+kill", "kill+stop", "stop+stop", "cut+kill"), _PAIRS, ("step", "save", "load", "verify", "heal", "start")),
    (("disk", "files"), ("rank", "ranks"), ("save",)),
    (("pipe",), ("rank",), ("step", "save")),
    (("memory",), ("rank", "ranks"), ("step",)),
    (("interrupt",), ("notebook",), ("step", "save")),
    (("kill", "terminate", "interrupt", "stop"), ("kernel",), ("step", "save", "start")),
)  # fmt: skip
FAULTS = tuple(
    (kind, whom, when) for kinds, whoms, whens in _LINES for whom in whoms for when in whens for kind in kinds
)


class Images(SyntheticImages):
    """Random ones; a fault of a reader befalls the rank that reads so many parts of them, once."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(400, SHAPE[2:], 4)
        self.fault, self.parts = fault, 0

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """As of all synthetic images, after the fault."""
        self.parts += 1
        if self.fault and os.getpid() in self.fault.pids and self.parts > self.fault.at and not self.fault.is_noted:
            start_fault(self.fault)
        return super().part(index, tile, draw)


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `whom` in the midst of `when`: as `rank` comes to its event `at` of that, or after `delay_s`.

    `kill+stop` of `rank+controller` are two at once. `notebook` is the pid of the process that holds the cluster,
    `targets` are the pids that it is sent to, with the kind, and the moment is written into the file `note`.
    """

    kind: str
    whom: str
    when: str
    rank: int
    at: int
    delay_s: float
    note: Path
    others: tuple[int, ...] = ()
    notebook: int = 0
    targets: tuple[tuple[str, int], ...] = ()
    pause_s: float = 0.0

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Each kind with whom it befalls: one, or two at once."""
        return list(zip(self.kind.split("+"), self.whom.split("+"), strict=True))

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that it befalls."""
        return tuple(pid for _, pid in self.targets)

    @property
    def hurt(self) -> tuple[int, ...]:
        """The ranks that it befalls, where it befalls ranks."""
        of_ranks = {"rank", "ranks", "supervisor", "nanny"}.intersection(whom for _, whom in self.parts)
        return (self.rank, *self.others) if of_ranks else ()

    @property
    def is_noted(self) -> bool:
        """Whether it has happened."""
        return self.note.exists()

    @property
    def happened_s(self) -> float:
        """When, by `time.time()`."""
        return float(self.note.read_text())

    def __str__(self) -> str:
        who = f"{self.whom} {self.rank}" if self.hurt else self.whom
        return f"{self.kind} of {who} in {self.when}"


def draw(dice: random.Random, ranks: int, note: Path, kinds: Sequence[str] = ()) -> Fault:
    """One at random: of `kinds`, such as `kill:rank:step`, where there are any."""
    asked = [each for each in FAULTS if not kinds or ":".join(each) in kinds]
    kind, whom, when = dice.choice(asked)
    rank, *others = dice.sample(range(ranks), 1 + (dice.randrange(1, ranks) if whom == "ranks" else 0))
    if when == "reader":
        rank %= PLAN.num_spatial_parts  # the others read labels alone
    if whom == "rank" and kind in RESOURCES and when == "save":
        rank = 0  # which writes
    note.unlink(missing_ok=True)
    return Fault(
        kind, whom, when, rank, dice.randrange(_EVENTS.get(when, 1)), dice.random(), note, tuple(others), os.getpid()
    )


# ---- who there is


def list_family(name: str = "") -> list[psutil.Process]:
    """The processes of a cluster, or of any cluster on this machine, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(MARK)
            if mark and name in ("", mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_roles(name: str) -> dict[str, list[int]]:
    """The pids of a cluster by what they are for; ranks, supervisors and nannies in the order of the ranks."""
    found: dict[str, list[tuple[int, int]]] = {}
    for process in list_family(name):
        with suppress(psutil.Error):
            words, rank = " ".join(process.cmdline()), int(process.environ().get("OMPI_COMM_WORLD_RANK", 0))
            found.setdefault(_find_role(words, process), []).append((rank, process.pid))
    return {role: [pid for _, pid in sorted(pids)] for role, pids in found.items()}


def _find_role(words: str, process: psutil.Process) -> str:
    """A command line also holds that of what it starts, so that the outermost comes first."""
    if process.name() in ("prterun", "mpiexec"):
        return "mpiexec"
    if "mpi4dl_nb.engines.comm.supervisor" in words:
        return "supervisor"
    parent = " ".join(process.parent().cmdline())
    if CONTROLLER_PROGRAM in words:
        return "other" if CONTROLLER_PROGRAM in parent else "controller"
    if "ipyparallel.engine" in words:
        return "rank" if "mpi4dl_nb.engines.comm.supervisor" in parent else "nanny"
    return "other"


# ---- how it happens


@allow_during_step
def schedule_fault(host: RankServer, fault: Fault) -> None:
    """Have the fault happen as its rank comes to the event. Called on all ranks; each one raises by itself."""
    if host.world.rank not in ((fault.rank, *fault.others) if fault.kind == "raise" else (fault.rank,)):
        return
    left = [fault.at]

    def count() -> None:
        if left[0] == 0:
            cancel_faults(host)
            time.sleep(fault.pause_s)
            start_fault(fault)
        left[0] -= 1

    if fault.when == "step":
        for training in host.get_kept(RankTraining).values():
            _call_before(training.worker, "step", count)
    else:
        _count_reports(host.board, _WORDS[fault.when], count)


def _call_before(worker: Worker, name: str, count: Callable[[], None]) -> None:
    act = getattr(worker, name)

    def count_and_act() -> Any:
        count()
        return act()

    setattr(worker, name, count_and_act)


def _count_reports(board: StatusBoard, word: bytes, count: Callable[[], None]) -> None:
    """Count what is written on the board while the rank does what has this word in its name."""
    at, waits, inside = board.report, board.report_waiting, [False]

    def report_and_count(text: bytes, step: int = 0) -> None:
        at(text, step)
        inside[0] = word in text or (inside[0] and bool(text))
        if inside[0]:
            count()

    def report_waiting_and_count(now: bool) -> None:
        waits(now)
        if inside[0]:
            count()

    board.report, board.report_waiting = report_and_count, report_waiting_and_count  # type: ignore[method-assign]


@allow_during_step
def cancel_faults(host: RankServer) -> None:
    """No fault happens any more that has not."""
    for each in (host.board, *(training.worker for training in host.get_kept(RankTraining).values())):
        for name in ("report", "report_waiting", "step"):
            vars(each).pop(name, None)


@allow_during_step
def wait_for_all(host: RankServer) -> None:
    """Wait for all ranks, by MPI."""
    host.world.barrier()


def start_fault(fault: Fault) -> None:
    """Have it happen now, to `pids` or to this process."""
    if not fault.is_noted:
        fault.note.write_text(repr(time.time()))
    if {kind for kind, _ in fault.parts} <= {*SIGNALS, "cut"}:
        targets = fault.targets or ([(fault.kind, os.getpid())] if fault.whom == "rank" else [])
        # This process last, or it would send nothing more; what cuts must run before what ends.
        for kind, pid in sorted(targets, key=lambda each: (each[1] == os.getpid(), each[0] != "cut")):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if kind == "cut":
                    cut_connections(pid)
                else:
                    os.kill(pid, SIGNALS[kind])
    elif fault.kind in RESOURCES:
        for pid in fault.pids:
            _take_away(fault.kind, psutil.Process(pid))
    elif fault.kind == "raise":
        raise ValueError("a fault")
    elif fault.kind == "hang":
        time.sleep(1e6)
    elif fault.kind == "pipe":
        os.close(1)
    else:
        os._exit(3)


def _take_away(kind: str, process: psutil.Process) -> None:
    """From now on there is no room for another file, byte or handle; until it is given back."""
    least = {"disk": 1000, "memory": process.memory_info().vms + 4096, "files": process.num_fds()}[kind]
    _, most = process.rlimit(RESOURCES[kind])
    process.rlimit(RESOURCES[kind], (least, most))


def give_back(pids: Sequence[int]) -> None:
    """What was taken away."""
    for pid in pids:
        for kind in RESOURCES.values():
            with suppress(psutil.Error):
                _, most = psutil.Process(pid).rlimit(kind)
                psutil.Process(pid).rlimit(kind, (most, most))


def _find_reapers(notebook: int, name: str) -> list[int]:
    """It is none of the cluster's processes, which it ends, but a child of the notebook that knows the name."""
    children = psutil.Process(notebook).children()
    return [each.pid for each in children if {"hold", name} <= set(each.cmdline())]


def add_targets(fault: Fault, name: str) -> Fault:
    """At the processes of this cluster that it is for."""
    found = find_roles(name)
    ranks = [fault.rank, *fault.others] if fault.whom in ("rank", "ranks") else [fault.rank]
    known = {
        "notebook": [fault.notebook],
        "reaper": _find_reapers(fault.notebook, name),
        **{each: found.get(each, []) for each in _NUMBERLESS},
    }
    targets = []
    for kind, whom in fault.parts:
        role = "rank" if whom == "ranks" else whom
        pids = (
            known[role] if role in known else [found[role][rank] for rank in ranks if rank < len(found.get(role, ()))]
        )
        targets += [(kind, pid) for pid in pids]
    return replace(fault, targets=tuple(targets))
