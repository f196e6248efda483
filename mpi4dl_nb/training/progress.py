"""State of a running `fit`: recorded step by step, and displayed from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

from tqdm.auto import tqdm

from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.formatting import format_number
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.history import History, Progress
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.training_events import EpochResult, Recovered, SkippedImage, StepResult, TrainingEvent
from mpi4dl_nb.training.training_handle import TrainingHandle


class ProgressRecorder:
    """Records events and returns Progress snapshots. Thread-safe: one thread records while another one reads."""

    def __init__(self, plan: Plan, one_process: bool = False, total: int | None = None) -> None:
        # The lists grow in place; snapshots have tuples instead.
        self._losses, self._speeds = list[float](), list[float]()
        self._epochs, self._ends = list[EpochResult](), list[int]()
        now = Progress(plan, total=total, one_process=one_process)
        self.current = replace(now, losses=self._losses, speeds=self._speeds, epochs=self._epochs, ends=self._ends)
        self._lock = Lock()
        self._start_s = self._now_s = time.perf_counter()
        self._first_s = 0.0  # end of the first step

    def add(self, event: TrainingEvent, reports: Sequence[StepReport], plan: Plan | None = None) -> None:
        """Record an event, with the ranks' reports on the last step and the plan of the training (None: as before).

        The time between an epoch's end and the next step does not count for that step.
        """
        before_s, now_s = self._now_s, time.perf_counter()
        with self._lock:
            # A bad image is met within a step, whose time goes on.
            self._now_s = before_s if isinstance(event, SkippedImage) else now_s
            now = self.current
            match event:
                case StepResult():
                    self._first_s = self._first_s or now_s
                    self._losses.append(event.loss)
                    self._speeds.append(event.images / (now_s - before_s))
                    self.current = replace(now, last=event, reports=reports)
                case EpochResult():
                    self._epochs.append(event)
                    self._ends.append(len(self._losses))
                case SkippedImage():
                    self.current = replace(now, left_out=now.left_out + 1)
                case Recovered(steps=steps, epochs=epochs):  # what follows the checkpoint will come again
                    del self._losses[steps:], self._speeds[steps:], self._epochs[epochs:], self._ends[epochs:]
                    # The reports may be of another plan, with more ranks than the training has now.
                    last = now.last if self._losses else None
                    self.current = replace(now, plan=plan or now.plan, reports=(), last=last)

    def get_progress(self, state: str, running: bool) -> Progress:
        """Return a snapshot of the current state."""
        with self._lock:
            # The rest is estimated from all steps but the first, which includes the setup; evaluations count.
            now, left_s = self.current, None
            done = len(now.losses)
            if running and now.total is not None and done >= 2:
                left_s = (now.total - done) * (self._now_s - self._first_s) / (done - 1)
            lists: dict[str, Any] = {name: tuple(getattr(now, name)) for name in ("losses", "speeds", "epochs", "ends")}
            seconds = self._now_s - self._start_s
            return replace(now, state=state, running=running, seconds=seconds, left_s=left_s, **lists)


class RefreshRate:
    """Limits redrawing to once in `every_s` seconds, and to a `share` of the processor time of all cores.

    The rest is left to the ranks on this machine.
    """

    def __init__(self, share: float, every_s: float = 1.0) -> None:
        self.every_s, self.share = every_s, share
        self._due_s = 0.0

    @contextmanager
    def begin_refresh(self) -> Iterator[bool]:
        """Yield whether to draw now, and measure the processor time of this thread as the cost of drawing."""
        start_s = time.thread_time()
        due = time.perf_counter() >= self._due_s
        yield due
        # If drawing takes 50 ms, and 1 % of 4 cores is granted, the next is due after 0.05 / (0.01 * 4) = 1.25 s.
        if due:
            cost_s = time.thread_time() - start_s
            self._due_s = time.perf_counter() + max(self.every_s, cost_s / (self.share * count_cores()))


class ProgressBar:
    """Callback that shows loss and images per second, and a line per epoch; not `shown`, only bad images."""

    stops = False

    def __init__(self, shown: bool) -> None:
        self.shown, self.images = shown, 0

    def begin(self, training: TrainingHandle, total: int | None) -> None:
        """Show an empty bar."""
        self.bar, self.start_s = tqdm(total=total, unit="step", disable=not self.shown), time.perf_counter()

    def handle_event(self, event: TrainingEvent) -> None:
        """Advance the bar by a step, or print a line."""
        match event:
            case SkippedImage():
                tqdm.write(f"Left out from now on: {event.text}")
            case StepResult():
                self.images += event.images
                rate = self.images / (time.perf_counter() - self.start_s)
                self.bar.set_postfix_str(f"loss {event.loss:.4f}, {format_number(rate)} images/s")
                self.bar.update()
            case Recovered():
                tqdm.write(event.text)
                self.bar.n = event.steps
                self.bar.refresh()
            case EpochResult() if self.shown:
                tqdm.write(str(event))

    def end(self, outcome: History | BaseException) -> None:
        """Close the bar, which stays visible."""
        self.bar.close()
