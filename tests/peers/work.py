"""One system does its jobs: `python -m tests.peers.work SYSTEM RANKS FOLDER JOB ...`.

A line of JSON says its version, and one for each job where its results are, and why some are not there.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SYSTEMS = {
    "mpi4dl_nb": "tests.peers.own",
    "torch DTensor": "tests.peers.dtensor",
    "JAX NamedSharding": "tests.peers.jax_sharding",
    "PhysicsNeMo ShardTensor": "tests.peers.shard_tensor",
}
"""The systems by name, and the module that runs each."""

NEEDS = {"JAX NamedSharding": "jax", "PhysicsNeMo ShardTensor": "nvidia-physicsnemo"}
"""The packages of those that do not come with this project."""


def main(arguments: Sequence[str]) -> None:
    """Do the jobs."""
    system, ranks, folder, *jobs = arguments
    module = importlib.import_module(SYSTEMS[system])
    tell({"version": module.get_version()})
    for number, outcome in enumerate(module.run_jobs(jobs, int(ranks))):
        path = Path(folder) / f"{number}.npz"
        np.savez(path, **outcome.results)
        tell({"job": outcome.job, "results": str(path), "refusal": outcome.refusal})


def tell(line: dict[str, object]) -> None:
    """Print a line of JSON at once."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
