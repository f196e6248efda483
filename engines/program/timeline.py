"""The timeline of a step: every instruction of every rank, with measured times."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import FactTable, format_seconds, format_shares
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import FINITE_CHECK
from mpi4dl_nb.engines.program.program import Step

WORK = ("compute", "ring", "update")
"""The kinds of instructions of which the time without waiting is spent on a rank's own work."""


class TimelineEvent(NamedTuple):
    """One instruction on one rank. Times are in seconds of one clock per host; `bytes` is what this rank sent.

    `wait_s` is the time in which the rank was idle until messages of others arrived, their transfer included.
    """

    rank: int
    name: str
    kind: str
    phase: str
    micro_batch: int
    start_s: float
    end_s: float
    bytes: int
    wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """The duration in seconds without the waiting."""
        return self.end_s - self.start_s - self.wait_s

    @classmethod
    def of(cls, rank: int, step: Step, start_s: float, end_s: float, sent: int, wait_s: float = 0.0) -> TimelineEvent:
        """Return the event of one step of a program."""
        kind, phase = step.instruction.kind, step.phase.value
        return cls(rank, step.instruction.name, kind, phase, step.micro_batch, start_s, end_s, sent, wait_s)


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The fractions of a rank's time, 0 to 1: its own work, handling messages, and waiting for messages of others."""

    work: float
    communication: float
    waiting: float

    @property
    def other(self) -> float:
        """The remaining fraction, between instructions."""
        return max(0.0, 1 - self.work - self.communication - self.waiting)


@dataclass(frozen=True, repr=False)
class Timeline(FactTable):
    """The events of one training step on all ranks."""

    events: tuple[TimelineEvent, ...]

    @property
    def caption(self) -> str:
        return f"Timeline of {len(self.ranks)} ranks"

    @property
    def facts(self) -> dict[str, object]:
        if not self.events:
            return {"events": 0}
        return {
            "events": f"{len(self.events):,}",
            "time": format_seconds(self.seconds),
            "time of a rank": format_shares(compute_time_shares(self)),
        }

    @classmethod
    def of(cls, per_rank: Iterable[Sequence[TimelineEvent]], clocks: Iterable[str] = ()) -> Timeline:
        """Return the timeline of the events that each rank recorded, by `clocks[rank]` (none given: by one clock).

        Several clocks are aligned. Raises PlanError if they cannot be, because the step is not complete.
        """
        recorded, names = list(per_rank), list(clocks)
        aligned = _align_clocks(recorded, names) if len(set(names)) > 1 else recorded
        return cls(tuple(event for events in aligned for event in events))

    @property
    def layers(self) -> Mapping[str, str]:
        """The module or layer of each instruction, by its name, as far as it is known."""
        return {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def start_s(self) -> float:
        """The time at which the first rank began."""
        return min(event.start_s for event in self.events)

    @cached_property
    def seconds(self) -> float:
        """The time from the first start to the last end."""
        return max(event.end_s for event in self.events) - self.start_s

    @cached_property
    def time_shares(self) -> dict[int, TimeShares]:
        """The fractions of the step's time by rank."""
        parts = {rank: [0.0, 0.0, 0.0] for rank in self.ranks}
        for event in self.events:
            mine = parts[event.rank]
            mine[event.kind not in WORK] += event.busy_s / self.seconds
            mine[2] += event.wait_s / self.seconds
        return {rank: TimeShares(*mine) for rank, mine in parts.items()}

    def find_bubbles(self, rank: int) -> list[tuple[float, float]]:
        """Return when a rank waited or was between instructions: (start, end) in seconds of the step, in order.

        Waiting within an instruction counts as its end: an instruction posts its receives first and uses the messages
        last.
        """
        mine = sorted((event for event in self.events if event.rank == rank), key=lambda event: event.start_s)
        begins = [event.start_s - self.start_s for event in mine] + [self.seconds]
        ends = [0.0] + [event.end_s - event.wait_s - self.start_s for event in mine]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    @property
    def idle(self) -> float:
        """The fraction of all ranks' time not spent computing, from the first forward to the last backward."""
        passes = Timeline(tuple(event for event in self.events if event.phase != Phase.UPDATE.value))
        work = [event for event in passes.events if event.kind in WORK]
        shares = (sum(event.busy_s for event in work if event.rank == rank) / passes.seconds for rank in self.ranks)
        return 1 - sum(shares) / len(self.ranks)

    def to_chrome(self, path: str | Path, predicted: Timeline | None = None) -> Path:
        """Write Chrome trace JSON for Perfetto or chrome://tracing and return its path.

        `predicted` is written as a second process beside the measured one; both begin at 0.
        """
        parts = {"measured": self} | ({"predicted": predicted} if predicted else {})
        rows: list[dict[str, object]] = []
        for process, (name, part) in enumerate(parts.items()):
            # "M" rows (metadata) name the process and its threads, the ranks; "X" rows are events, in microseconds.
            rows.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
            for rank in part.ranks:
                thread = {"pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
                rows.append({"ph": "M", "name": "thread_name", **thread})
            for event in part.events:
                row = {
                    "name": f"{event.name} ({event.phase})",
                    "cat": event.kind,
                    "ph": "X",
                    "ts": (event.start_s - part.start_s) * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "pid": process,
                    "tid": event.rank,
                    "args": event._asdict(),
                }
                rows.append(row)
        Path(path).write_text(json.dumps({"traceEvents": rows}), encoding="utf-8")
        return Path(path)


# Each host has a clock of its own, which counts from its start.


@cache
def identify_clock() -> str:
    """Return what identifies the clock of `time.perf_counter`, which the processes of a host share."""
    try:
        # Names of hosts need not be unique.
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _align_clocks(per_rank: Sequence[Sequence[TimelineEvent]], clocks: Sequence[str]) -> list[Sequence[TimelineEvent]]:
    """Return the events by the clock of the first rank, exact to the time that a message travels."""
    # No rank leaves the all-reduce before the update until the last one has entered it: its first end is about the same
    # moment on all hosts.
    #
    #   host a   rank 0  |  work  |  all-reduce  | update          the clocks of b are shifted as a whole, so that
    #   host b   rank 1  |    work     | all-red.| update          what its ranks did at once stays so
    moments: dict[str, float] = {}
    for events, clock in zip(per_rank, clocks, strict=True):
        end_s = next((event.end_s for event in events if event.name == FINITE_CHECK), None)
        if end_s is None:
            raise PlanError(
                f"The ranks are on {len(set(clocks))} hosts, whose clocks are aligned by the all-reduce before the "
                "update, but not every rank has reached it. Complete the step first."
            )
        moments[clock] = min(end_s, moments.get(clock, end_s))
    shifts = {clock: moments[clocks[0]] - end_s for clock, end_s in moments.items()}
    return [
        [event._replace(start_s=event.start_s + shifts[clock], end_s=event.end_s + shifts[clock]) for event in events]
        for events, clock in zip(per_rank, clocks, strict=True)
    ]


# The breakdown of a step's time: computing, handling messages and all-reduces, and waiting for either.


SHARES = ("compute", "messages", "waiting for messages", "sums", "waiting for sums")
"""`compute` includes updates. `messages` are halos and transfers between stages, packed and unpacked. `sums` are
all-reduces of gradients, norms and statistics. Waiting includes the travel time and the delay of other ranks."""


def compute_time_shares(timeline: Timeline) -> Mapping[str, float]:
    """Return the fractions of all ranks' time, by `SHARES`; they add up to 1."""
    durations = dict.fromkeys(SHARES, 0.0)
    for event in timeline.events:
        kind = "compute" if event.kind in WORK else "sums" if event.kind == "all-reduce" else "messages"
        durations[kind] += event.busy_s
        durations[f"waiting for {'sums' if kind == 'sums' else 'messages'}"] += event.wait_s
    # Events do not cover all of a rank's time. What is missing is waiting, so that the shares add up to 1.
    whole = len(timeline.ranks) * timeline.seconds
    parts = {kind: seconds / whole for kind, seconds in durations.items()}
    parts["waiting for messages"] += max(0.0, 1 - sum(parts.values()))  # between instructions, or after the rank's end
    return parts
