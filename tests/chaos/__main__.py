"""`python -m tests.chaos --seed 0 --count 100`: faults drawn at random befall trainings on five ranks; JSON lines.

`--kinds kill:rank:step stop:controller:save` draws from these alone; `--list` prints all. The last line is the sum.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpi4dl_nb.cluster.cluster import Cluster
from tests.chaos.faults import FAULTS, draw, list_family
from tests.chaos.kernel import Kernels
from tests.chaos.training import PLAN
from tests.chaos.trial import HANG_AFTER_S, Trial, Verdict


def print_line(**facts: object) -> None:
    """One line."""
    print(json.dumps(facts), flush=True)


def tell(number: int, verdict: Verdict) -> None:
    """The line of one fault."""
    told = {} if verdict.told_s is None else {"told_s": round(verdict.told_s, 3)}
    print_line(
        number=number, fault=str(verdict.fault), happened=verdict.happened, **told, late=verdict.is_late,
        seconds=round(verdict.seconds, 1), wrong=verdict.wrong,
    )  # fmt: skip


def make_summary(verdicts: Sequence[Verdict], left: Sequence[str], seconds: float) -> dict[str, object]:
    """Of all of them."""
    by_limit: dict[str, list[float]] = {"at once": [], "after hang_after_s": []}
    for verdict in verdicts:
        if verdict.told_s is not None and verdict.fault.when not in ("start", "heal"):
            by_limit["at once" if verdict.limit_s < HANG_AFTER_S else "after hang_after_s"].append(verdict.told_s)
    told = {
        name: {"n": len(found), "median_s": round(statistics.median(found), 3), "worst_s": round(max(found), 3)}
        for name, found in by_limit.items()
        if found
    }
    return {
        "faults": len(verdicts), "happened": sum(each.happened for each in verdicts),
        "kinds": len({(each.fault.kind, each.fault.whom, each.fault.when) for each in verdicts}),
        "hangs": sum("hangs" in text for each in verdicts for text in each.wrong),
        "left": list(left), "wrong": sum(bool(each.wrong) for each in verdicts),
        "unequal": sum("other weights" in text for each in verdicts for text in each.wrong),
        "late": sum(each.is_late for each in verdicts), "told": told,
        "by_kind": dict(Counter(each.fault.kind for each in verdicts)), "seconds": round(seconds),
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """0 where nothing was wrong."""
    flags = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    flags.add_argument("--count", type=int, default=10)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--kinds", nargs="+", default=(), metavar="KIND:WHOM:WHEN")
    flags.add_argument("--list", action="store_true")
    chosen = flags.parse_args(arguments)
    if chosen.list:
        print("\n".join(":".join(each) for each in FAULTS))
        return 0
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # a hang ends this process, with its trace
    dice, verdicts, start_s = random.Random(chosen.seed), list[Verdict](), time.monotonic()
    with tempfile.TemporaryDirectory() as place, Cluster(PLAN.ranks, hang_after_s=HANG_AFTER_S) as cluster:
        folder = Path(place)
        trial, kernels = Trial(cluster, folder / "saved"), Kernels(folder)
        for number in range(chosen.count):
            fault = draw(dice, PLAN.ranks, folder / "note", chosen.kinds)
            verdicts.append((kernels if fault.whom == "kernel" else trial).round(fault))
            tell(number, verdicts[-1])
        trial.close()
    left = [f"{process.pid} {process.name()}" for process in list_family() if process.pid not in kernels.others]
    line = make_summary(verdicts, left, time.monotonic() - start_s)
    print_line(**line)
    return int(bool(line["wrong"] or line["late"] or left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
