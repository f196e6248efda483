"""`python -m tests.first_call [--processes 100]`: how often the first root of a process is not the second.

Each process takes the same roots twice on four threads: one with plain PyTorch, one with the engines imported. Six
processes run at once, or the threads would hardly ever meet. What is printed as JSON: the processes in which the roots
differed, of each kind, and how many there were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

KINDS = {"plain": "torch", "engines": "mpi4dl_nb.engines.comm.device"}
PROGRAM = """
import torch, {module}
torch.set_num_threads(1)
x = torch.rand(1_024_000)
torch.set_num_threads(4)
print(int(not torch.equal(x.sqrt(), x.sqrt())))
"""


def compare_roots(kind: str) -> int:
    """1 where the two differed in a process of that kind."""
    program = [sys.executable, "-c", PROGRAM.format(module=KINDS[kind])]
    return int(subprocess.run(program, capture_output=True, text=True, check=True, timeout=300).stdout)


def main(arguments: Sequence[str]) -> int:
    """0 if the roots are always the same with the engines."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--processes", type=int, default=100, help="of each kind")
    count = flags.parse_args(arguments).processes
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(compare_roots, list(KINDS) * count))
    told = {kind: sum(found[index :: len(KINDS)]) for index, kind in enumerate(KINDS)}
    print(json.dumps({"processes": count, "differing": told}))
    return int(told["engines"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
