"""`python -m tests.chaos.soak --minutes 20`: steps without end on three ranks, after which nothing has grown.

Memory, open files and threads of the notebook, the ranks and every process between them, shared memory, and the
cluster's folder with its logs: what they are in the last quarter of the time is held against the second one. Prints
JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.server.rank_server import RankServer
from mpi4dl_nb.training.training import Training
from tests.chaos.faults import Images, list_family
from tests.chaos.training import SHAPE, make_model

PLAN = Plan(split_size=2, spatial_size=1, num_spatial_parts=2, slice_method="vertical", parts=2, precision="float64")
MORE = {"memory_mb": 10.0, "files": 0.5, "threads": 0.5, "shared_mb": 0.5, "folder_kb": 8.0}
"""How much more is taken for the same, of all processes together."""


def measure_usage(cluster: Cluster) -> dict[str, float]:
    """What the cluster and this process hold now."""
    place = cluster._ranks._place
    processes = [psutil.Process(), *list_family(place.name)]
    return {
        "memory_mb": sum(process.memory_info().rss for process in processes) / 1e6,
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
        "shared_mb": _measure_bytes(Path("/dev/shm")) / 1e6,
        "folder_kb": _measure_bytes(place.home) / 1e3,
    }


def use_names(_: RankServer, count: int) -> None:
    """Let Python's table of interned names grow to its size before memory is measured.

    Each message that ipyparallel runs on a rank has variables with names of its own. They are gone with the message,
    but each of them uses a free place of the table, which is made anew, several megabytes large, when no place is free.
    The first few times that takes memory which the process did not have; later ones take what an earlier table had.
    """
    for number in range(count):
        compile(f"_{number}_result = _{number}_f(*_{number}_args, **_{number}_kwargs)", "names", "exec")


def _measure_bytes(folder: Path) -> int:
    """Of all files, as much of them as there is."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            found += 512 * path.lstat().st_blocks
    return found


def compute_growth(seen: Sequence[dict[str, float]]) -> dict[str, float]:
    """By how much the last quarter is above the second one, by their medians."""
    quarter = len(seen) // 4
    before, after = seen[quarter : 2 * quarter], seen[-quarter:]
    median = statistics.median
    return {name: round(median(x[name] for x in after) - median(x[name] for x in before), 2) for name in MORE}


def main(arguments: Sequence[str]) -> int:
    """0 where nothing has grown."""
    flags = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.splitlines()[0])
    flags.add_argument("--minutes", type=float, default=20)
    flags.add_argument("--every-s", type=float, default=10)
    chosen = flags.parse_args(arguments)
    seen: list[dict[str, float]] = []
    with Cluster(PLAN.ranks) as cluster:
        training = Training(make_model(), PLAN, cluster, SHAPE)
        cluster.call(use_names, 600_000)
        start_s = time.monotonic()
        while (now_s := time.monotonic() - start_s) < 60 * chosen.minutes:
            while time.monotonic() - start_s < now_s + chosen.every_s:
                training.fit(Images(), steps=20, progress=False)
            seen.append(measure_usage(cluster))
            print(json.dumps({"minute": round(now_s / 60, 1), "steps": training.steps, **seen[-1]}), flush=True)
    more = compute_growth(seen)
    flat = all(more[name] <= most for name, most in MORE.items())
    print(json.dumps({"flat": flat, "steps": training.steps, "grown": more, "last": seen[-1]}), flush=True)
    return int(not flat)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
