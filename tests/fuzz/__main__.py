"""`python -m tests.fuzz pictures --count 2000`: damaged cases of one kind before the judge; one line of JSON.

The cases run in a process of their own. One that crashes or hangs ends it, is counted as wrong, and another process
goes on behind it. `--first CASE --count 1 --here` runs one case in this process, for a debugger.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUZZERS = {
    "checkpoints": "checkpoints", "commands": "commands", "machines": "machines", "pictures": "pictures",
    "tables": "tables", "zarr": "stores", "faulty": "faulty",
}  # fmt: skip
"""Each and its module in this folder; the last one is for the judge's own test."""
_TOLD = 20  # wrong cases


@dataclass
class Tally:
    """What came of all cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    canaries: int = 0
    warned: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, object]] = field(default_factory=list)

    def add(self, found: dict[str, object]) -> None:
        """One more."""
        self.outcomes[str(found["outcome"])] += 1
        for name in ("address_bytes", "resident_bytes", "seconds"):
            self.most[name] = max(self.most[name], found.get(name, 0))
        self.canaries += len(found.get("outside", ()))
        self.warned.update(found.get("warned", ()))
        if found["outcome"] == "wrong":
            self.wrong.append({name: found[name] for name in ("case", "told", "why")})

    def make_line(self, fuzzer: str, seed: int) -> dict[str, object]:
        """For people and programs."""
        counts = {name: self.outcomes[name] for name in ("read", "refused", "wrong")}
        return {
            "fuzzer": fuzzer,
            "seed": seed,
            "cases": sum(counts.values()),
            **counts,
            "canaries_read": self.canaries,
            "slowest_s": self.most["seconds"],
            "address_bytes": self.most["address_bytes"],
            "resident_bytes": self.most["resident_bytes"],
            "warnings": dict(self.warned),
            "wrong_cases": self.wrong[:_TOLD],
        }


def run_elsewhere(fuzzer: str, first: int, count: int, seed: int) -> Tally:
    """Processes, one after another, until each case has had its turn."""
    tally, number, stop = Tally(), first, first + count
    while number < stop:
        words = [fuzzer, "--first", str(number), "--count", str(stop - number), "--seed", str(seed), "--here"]
        ended = {"case": number - 1}
        begun: dict[str, object] = {}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            command = [sys.executable, "-m", "tests.fuzz", *words]
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            environment = os.environ | {"PYTHONPATH": paths}
            with subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as child:
                for text in child.stdout or ():
                    found = json.loads(text)
                    if "outcome" in found:
                        tally.add(found)
                        ended = found
                    else:
                        begun = found
            if child.returncode:
                if not begun or begun["case"] == ended["case"]:
                    errors.seek(0)
                    raise RuntimeError(f"The fuzzer itself failed, code {child.returncode}: {errors.read()[-4000:]}")
                tally.add(begun | {"outcome": "wrong", "why": _describe_end(child.returncode)})
                ended = begun
        number = int(str(ended["case"])) + 1
    return tally


def _describe_end(code: int) -> str:
    if code == -signal.SIGALRM:
        return "took too long"
    return f"ended the process, by {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def run_here(fuzzer: str, first: int, count: int, seed: int) -> None:
    """In this process, with a line for each case."""
    from tests.fuzz.judge import check_all

    module = importlib.import_module(f"tests.fuzz.{FUZZERS[fuzzer]}")
    with tempfile.TemporaryDirectory() as place:
        for found in check_all(module, range(first, first + count), seed, Path(os.path.realpath(place))):
            print(json.dumps(found), flush=True)


def main() -> int:
    """0 where all cases are as they should be."""
    flags = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    flags.add_argument("fuzzer", choices=FUZZERS)
    flags.add_argument("--count", type=int, default=2000)
    flags.add_argument("--first", type=int, default=0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--here", action="store_true", help="in this process, with lines for each case")
    chosen = flags.parse_args()
    cases = chosen.fuzzer, chosen.first, chosen.count, chosen.seed
    if chosen.here:
        run_here(*cases)
        return 0
    tally = run_elsewhere(*cases)
    print(json.dumps(tally.make_line(chosen.fuzzer, chosen.seed)), flush=True)
    return 1 if tally.wrong or tally.warned else 0


if __name__ == "__main__":
    sys.exit(main())
