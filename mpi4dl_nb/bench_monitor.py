"""`python -m mpi4dl_nb.bench_monitor`: the cost of a monitor for a training, as a ratio of speeds.

The same training runs alternately with and without a monitor on a real cluster; the last line printed is JSON. There is
no web page: what a monitor draws and reports is computed, but not sent. If other work shares the machine, the ratio is
noisy; `drawing_share` and `telling_share` are counted rather than compared, so they are not, and they bound the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence

import psutil
import torch

from mpi4dl_nb import Cluster, Monitor, Plan, Training
from mpi4dl_nb.engines.cli.options import parse_positive
from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.train.history import History
from mpi4dl_nb.engines.train.training_events import StepResult, TrainingEvent
from mpi4dl_nb.training.training_handle import TrainingHandle


class StepTimer:
    """Callback that measures the time from the first step's end to the last one's, with or without a monitor."""

    def __init__(self, monitor: Monitor | None) -> None:
        self.monitor = monitor
        self.ends_s: list[float] = []
        self.telling_s = self.drawing_s = 0.0
        self.stops = False

    def begin(self, training: TrainingHandle, total: int | None) -> None:
        """Forward the call to the monitor."""
        if self.monitor:
            self.monitor.begin(training, total)

    def handle_event(self, event: TrainingEvent) -> None:
        """Forward the event to the monitor, and record the end of a step."""
        start_s = time.perf_counter()
        if self.monitor:
            self.monitor.handle_event(event)
        self.telling_s += time.perf_counter() - start_s
        if isinstance(event, StepResult):
            self.ends_s.append(time.perf_counter())

    def end(self, outcome: History | BaseException) -> None:
        """Read the processor time of the drawing thread, then forward the call to the monitor."""
        if self.monitor:
            threads = psutil.Process().threads()
            mine = (thread for thread in threads if thread.id == self.monitor.thread_id)
            self.drawing_s = sum(thread.user_time + thread.system_time for thread in mine)
            self.monitor.end(outcome)

    @property
    def steps_per_s(self) -> float:
        """Steps per second without the first step, which includes the setup."""
        return (len(self.ends_s) - 1) / self.seconds

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first step to that of the last one."""
        return self.ends_s[-1] - self.ends_s[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurement and print one line of JSON as the last one."""
    flags = argparse.ArgumentParser(description="Compare the speed of a training with and without a monitor.")
    flags.add_argument("--pairs", type=parse_positive, default=7)
    flags.add_argument("--steps", type=parse_positive, default=100, help="at least 2: the first is not timed")
    flags.add_argument("--tiles", type=parse_positive, default=2)
    flags.add_argument("--batch-size", type=parse_positive, default=2)
    flags.add_argument("--size", type=parse_positive, default=64, help="height and width of the images, in pixels")
    flags.add_argument("--backend", choices=["mpi", "loopback"], default="mpi")
    chosen = flags.parse_args(arguments)
    if chosen.steps < 2:
        flags.error(f"argument --steps: {chosen.steps} is too few. Give at least 2: the first is not timed.")
    plan = Plan(split_size=2, spatial_size=1, num_spatial_parts=chosen.tiles, slice_method="vertical")
    size = (chosen.size, chosen.size)
    torch.manual_seed(0)
    with Cluster(plan.ranks, backend=chosen.backend) as cluster:
        training = Training(resnet20_v1(), plan, cluster, (chosen.batch_size, 3, *size))
        images = SyntheticImages(chosen.steps * chosen.batch_size, size, 10)
        runs: dict[bool, list[StepTimer]] = {False: [], True: []}
        for pair in range(chosen.pairs + 1):  # the first pair is a warm-up
            for watched in (False, True) if pair % 2 else (True, False):
                timed = StepTimer(Monitor() if watched else None)
                training.fit(images, steps=chosen.steps, progress=False, go_on=False, monitor=timed)
                runs[watched] += [timed] if pair else []
                kind = "with" if watched else "without"
                print(f"pair {pair}, {kind} a monitor: {timed.steps_per_s:.3f} steps/s", flush=True)
    # `ratio` is the median over adjacent pairs, `spread` half of its interquartile range. `drawing_share` is a share of
    # the processor time of all cores, `telling_share` one of the time of the thread that runs `fit`.
    speeds = {watched: [timed.steps_per_s for timed in all_of_them] for watched, all_of_them in runs.items()}
    seconds = sum(timed.seconds for timed in runs[True])
    ratios = [with_it / without for without, with_it in zip(speeds[False], speeds[True], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    line = {
        "ranks": plan.ranks,
        "steps": chosen.steps,
        "pairs": len(ratios),
        "steps_per_s": round(statistics.median(speeds[False]), 3),
        "steps_per_s_monitored": round(statistics.median(speeds[True]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "spread": round((high - low) / 2, 4),
        "drawing_share": round(sum(timed.drawing_s for timed in runs[True]) / seconds / count_cores(), 5),
        "telling_share": round(sum(timed.telling_s for timed in runs[True]) / seconds, 5),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
