"""`python -m tests.import_times [--rounds 9]`: seconds that imports take in new processes, one JSON line for each.

`beyond_torch_s` is what an import takes more than that of torch alone, in the same round. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

IMPORTS = {
    "torch": "import torch",
    "mpi4dl_nb": "import mpi4dl_nb",
    "a plan": "from mpi4dl_nb import Plan",
    "a model": "import torch; from mpi4dl_nb import resnet20_v1",
    "a training": "import torch; from mpi4dl_nb import Cluster, Plan, Training",
    "every public name": "import torch; from mpi4dl_nb import *",
    "a rank's functions": "import torch, mpi4dl_nb.engines.server.rank_functions",
}


def measure(code: str) -> float:
    program = f"import time; begin = time.perf_counter()\n{code}\nprint(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--rounds", type=int, default=9)
    rounds = [{name: measure(code) for name, code in IMPORTS.items()} for _ in range(flags.parse_args().rounds)]
    for name, code in IMPORTS.items():
        times = [seconds[name] for seconds in rounds]
        beyond = [seconds[name] - seconds["torch"] for seconds in rounds]
        row = {"import": code, "median_s": round(statistics.median(times), 3), "spread_s": [min(times), max(times)]}
        if "torch" in code and name != "torch":
            row["beyond_torch_s"] = round(statistics.median(beyond), 3)
        print(json.dumps(row | {"spread_s": [round(value, 3) for value in row["spread_s"]]}))


if __name__ == "__main__":
    main()
