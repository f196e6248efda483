"""What happened when: every instruction of every rank, measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from engines.program.instructions import Phase
from engines.program.program import Step

__all__ = ["Event", "Timeline"]


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction on one rank. Times are of one clock per host; `bytes` were sent by this rank."""

    rank: int
    name: str
    kind: str
    phase: str
    micro_batch: int
    start_s: float
    end_s: float
    bytes: int

    @classmethod
    def of(cls, rank: int, step: Step, start_s: float, end_s: float, sent_bytes: int) -> Event:
        """The event of one step of a program."""
        kind, phase = step.instruction.kind, step.phase.value
        return cls(rank, step.instruction.name, kind, phase, step.micro_batch, start_s, end_s, sent_bytes)


@dataclass(frozen=True)
class Timeline:
    """The events of one training step on all ranks."""

    events: tuple[Event, ...]

    @classmethod
    def of(cls, per_rank: Iterable[Sequence[Event]]) -> Timeline:
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

    def share(self, rank: int, kind: str) -> float:
        """The part of the step's time that a rank spent in instructions of one kind.

        Time in `compute` and `update` is work; in the other kinds it is traffic and waiting for others.
        """
        mine = (event for event in self.events if event.rank == rank and event.kind == kind)
        return sum(event.end_s - event.start_s for event in mine) / self.seconds

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they do not compute, from the first forward to the last backward."""
        passes = Timeline(tuple(event for event in self.events if event.phase != Phase.UPDATE.value))
        return 1 - sum(passes.share(rank, "compute") for rank in self.ranks) / len(self.ranks)

    def to_chrome(self, path: str | Path) -> Path:
        """Write Chrome trace JSON, which Perfetto and chrome://tracing open."""
        rows = [_chrome(event, self.start_s) for event in self.events]
        Path(path).write_text(json.dumps({"traceEvents": rows}))
        return Path(path)


def _chrome(event: Event, zero_s: float) -> dict[str, object]:
    return {
        "name": f"{event.name} ({event.phase})",
        "cat": event.kind,
        "ph": "X",
        "ts": (event.start_s - zero_s) * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "pid": 0,
        "tid": event.rank,
        "args": asdict(event),
    }
