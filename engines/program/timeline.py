"""What happened when: every instruction of every rank, measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from engines.program.instructions import Phase
from engines.program.program import Step

__all__ = ["WORK", "TimeShares", "Timeline", "TimelineEvent"]

WORK = ("compute", "update")
"""The kinds of instructions in which a rank works by itself."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One instruction on one rank. Times are of one clock per host; `bytes` were sent by this rank.

    For `wait_s` of its time it had nothing to do until messages of others came, their travel included.
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
        """Without the waiting."""
        return self.end_s - self.start_s - self.wait_s

    @classmethod
    def of(
        cls, rank: int, step: Step, start_s: float, end_s: float, sent_bytes: int, wait_s: float = 0.0
    ) -> TimelineEvent:
        """The event of one step of a program."""
        kind, phase = step.instruction.kind, step.phase.value
        return cls(rank, step.instruction.name, kind, phase, step.micro_batch, start_s, end_s, sent_bytes, wait_s)


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The parts of a rank's time: its own work, handling messages, and waiting for those of others."""

    work: float
    communication: float
    waiting: float

    @property
    def other(self) -> float:
        """The rest: between two instructions."""
        return max(0.0, 1 - self.work - self.communication - self.waiting)

    @property
    def idle(self) -> float:
        """Waiting, or between two instructions."""
        return max(0.0, 1 - self.work - self.communication)


@dataclass(frozen=True)
class Timeline:
    """The events of one training step on all ranks."""

    events: tuple[TimelineEvent, ...]

    @classmethod
    def of(cls, per_rank: Iterable[Sequence[TimelineEvent]]) -> Timeline:
        """From what each rank recorded."""
        return cls(tuple(event for events in per_rank for event in events))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def start_s(self) -> float:
        """When the first rank began."""
        return min(event.start_s for event in self.events)

    @cached_property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(event.end_s for event in self.events) - self.start_s

    def compute_share(self, rank: int, kind: str) -> float:
        """The part of the step's time that a rank spent in instructions of one kind.

        Time in `compute` and `update` is work; in the other kinds it is traffic and waiting for others.
        """
        mine = (event for event in self.events if event.rank == rank and event.kind == kind)
        return sum(event.end_s - event.start_s for event in mine) / self.seconds

    @cached_property
    def time_shares(self) -> dict[int, TimeShares]:
        """What each rank did with the time of the step."""
        parts = {rank: [0.0, 0.0, 0.0] for rank in self.ranks}
        for event in self.events:
            mine = parts[event.rank]
            mine[event.kind not in WORK] += event.busy_s / self.seconds
            mine[2] += event.wait_s / self.seconds
        return {rank: TimeShares(*mine) for rank, mine in parts.items()}

    def find_bubbles(self, rank: int) -> list[tuple[float, float]]:
        """When a rank waited, or was between two instructions: (start, end) in seconds of the step, in their order.

        Where an instruction has waited, it counts as its end: messages are asked for first, and used last.
        """
        mine = sorted((event for event in self.events if event.rank == rank), key=lambda event: event.start_s)
        begins = [event.start_s - self.start_s for event in mine] + [self.seconds]
        ends = [0.0] + [event.end_s - event.wait_s - self.start_s for event in mine]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they do not compute, from the first forward to the last backward."""
        passes = Timeline(tuple(event for event in self.events if event.phase != Phase.UPDATE.value))
        return 1 - sum(passes.compute_share(rank, "compute") for rank in self.ranks) / len(self.ranks)

    def to_chrome(self, path: str | Path, predicted: Timeline | None = None) -> Path:
        """Write Chrome trace JSON, which Perfetto and chrome://tracing open; both begin at 0, as two processes."""
        parts = {"measured": self} | ({"predicted": predicted} if predicted else {})
        rows = [
            row for number, (name, part) in enumerate(parts.items()) for row in _make_process_rows(name, number, part)
        ]
        Path(path).write_text(json.dumps({"traceEvents": rows}))
        return Path(path)


def _make_process_rows(name: str, number: int, timeline: Timeline) -> Iterator[dict[str, object]]:
    """The names of a process and of its ranks, and the events."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    for rank in timeline.ranks:
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": rank, "args": {"name": f"rank {rank}"}}
    for event in timeline.events:
        yield _to_chrome(event, number, timeline.start_s)


def _to_chrome(event: TimelineEvent, process: int, zero_s: float) -> dict[str, object]:
    return {
        "name": f"{event.name} ({event.phase})",
        "cat": event.kind,
        "ph": "X",
        "ts": (event.start_s - zero_s) * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": process,
        "tid": event.rank,
        "args": asdict(event),
    }
