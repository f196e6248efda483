"""What is known of a `fit` while it runs: gathered step by step, shown from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from engines.comm.cgroup_limits import count_cores
from engines.plan import Plan
from engines.training import StepReport
from engines.training_events import EpochResult, Recovered, SkippedImage, StepResult, TrainingEvent

__all__ = ["Progress", "ProgressRecorder", "RefreshRate"]


@dataclass(frozen=True)
class Progress:
    """A `fit` as it is now: what all its steps told so far, and the `reports` of the ranks on the last one.

    `speeds` are images per second of each step, waiting for images included. `in_epoch` is the epoch under way, and
    `ends` after how many steps each of `epochs` was over. `one_process`: all ranks are threads of one, and share its
    memory.
    """

    plan: Plan
    state: str = "not begun"
    running: bool = False
    total: int | None = None
    losses: Sequence[float] = ()
    speeds: Sequence[float] = ()
    last: StepResult | None = None
    epochs: Sequence[EpochResult] = ()
    ends: Sequence[int] = ()
    reports: Sequence[StepReport] = ()
    seconds: float = 0.0
    left_s: float | None = None
    left_out: int = 0
    one_process: bool = False


@dataclass
class ProgressRecorder:
    """Gathers what becomes a Progress: told by one thread, asked by another."""

    plan: Plan
    one_process: bool = False
    total: int | None = None
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    epochs: list[EpochResult] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    last: StepResult | None = None
    reports: Sequence[StepReport] = ()
    left_out: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._start_s = self._now_s = time.perf_counter()
        self._first_s = 0.0  # when the first step was over

    def add(self, event: TrainingEvent, reports: Sequence[StepReport]) -> None:
        """One event more. What lies between an epoch and the next step is no time of that step."""
        before_s, now_s = self._now_s, time.perf_counter()
        with self._lock:
            self._now_s = now_s
            match event:
                case StepResult():
                    self._first_s = self._first_s or now_s
                    self.losses.append(event.loss)
                    self.speeds.append(event.images / (now_s - before_s))
                    self.last, self.reports = event, reports
                case EpochResult():
                    self.epochs.append(event)
                    self.ends.append(len(self.losses))
                case SkippedImage():
                    self.left_out += 1
                case Recovered(steps=steps, epochs=epochs):
                    del self.losses[steps:], self.speeds[steps:], self.epochs[epochs:], self.ends[epochs:]

    def get_progress(self, state: str, running: bool) -> Progress:
        """All of it, as it is now."""
        with self._lock:
            return Progress(
                self.plan, state, running, self.total, tuple(self.losses), tuple(self.speeds), self.last,
                tuple(self.epochs), tuple(self.ends), self.reports, self._now_s - self._start_s,
                self._estimate_left_s() if running else None, self.left_out, self.one_process,
            )  # fmt: skip

    def _estimate_left_s(self) -> float | None:
        """By what steps took so far, the judging between epochs included; the first one, which prepares, is not."""
        done = len(self.losses)
        if self.total is None or done < 2:
            return None
        return (self.total - done) * (self._now_s - self._first_s) / (done - 1)


class RefreshRate:
    """When to draw again: once in `every_s` at most, and so seldom that it takes no more than a `share` of all cores.

    Ranks on this machine have the rest.
    """

    def __init__(self, share: float, every_s: float = 1.0) -> None:
        self.every_s, self.share = every_s, share
        self._due_s = 0.0

    @contextmanager
    def begin_refresh(self) -> Iterator[bool]:
        """Whether it is time. What this thread computes within it is what drawing costs."""
        start_s = time.thread_time()
        due = time.perf_counter() >= self._due_s
        yield due
        if due:
            cost_s = time.thread_time() - start_s
            self._due_s = time.perf_counter() + max(self.every_s, cost_s / (self.share * count_cores()))
