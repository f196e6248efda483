"""`mpiexec -n 8 python -m mpi4py run_plans.py PLANS.json`: each plan on as many of these ranks as it needs.

Rank 0 prints what failed, as JSON: the plan's number -> what was said.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.mpi import MpiWorld
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.verify import verify


def find_error(comm: MPI.Intracomm, model: nn.Module, recipe: Recipe, seed: int) -> str:
    """What is wrong with this plan, as this rank sees it."""
    world = MpiWorld(comm)
    try:
        told = verify(world, recipe, model, nn.CrossEntropyLoss(), seed)
    except Exception:
        world.revoke()
        return traceback.format_exc()
    return "" if told["ok"] else json.dumps(told)


def main() -> None:
    torch.set_num_threads(1)
    everyone = MpiWorld()
    plans = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    troubles = {}
    for number, flags in enumerate(plans):
        chosen = options.make_parser("").parse_args(flags)
        ranks = options.make_plan(chosen).ranks
        made = everyone.all_gather(options.make_recipe(chosen, ranks) if everyone.rank == 0 else None)[0]
        works = everyone.rank < ranks
        comm = MPI.COMM_WORLD.Split(0 if works else MPI.UNDEFINED, everyone.rank)
        said = everyone.all_gather(find_error(comm, *made, chosen.seed) if works else "")
        troubles[number] = next((text for text in said if text), "")
    if everyone.rank == 0:
        print(json.dumps({number: text for number, text in troubles.items() if text}))


if __name__ == "__main__":
    main()
