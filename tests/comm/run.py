"""`mpiexec -n 4 python -m mpi4py run.py [NAMES]`: every case, or these, on every rank; prints what failed, as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping

import torch

from mpi4dl_nb.engines.comm.mpi import MpiWorld
from mpi4dl_nb.engines.errors import RankError


def run_case(world: MpiWorld, case: Callable[[MpiWorld], None]) -> str:
    """What went wrong on this rank, which then releases the others."""
    try:
        case(world)
    except Exception:
        world.revoke()
        return traceback.format_exc()
    return ""


def gather_troubles(world: MpiWorld, trouble: str) -> list[str]:
    """All ranks' troubles, also where one of them has made the others stop."""
    try:
        return world.all_gather(trouble)
    except RankError:
        world.revoke()
        world.recover()
        return world.all_gather(trouble)


def main(cases: Mapping[str, Callable[[MpiWorld], None]]) -> None:
    torch.set_num_threads(1)
    world = MpiWorld()
    troubles = {name: gather_troubles(world, run_case(world, case)) for name, case in cases.items()}
    if world.rank == 0:
        print(json.dumps({name: [text for text in texts if text] for name, texts in troubles.items()}))


if __name__ == "__main__":
    from cases import CASES

    main({name: case for name, case in CASES.items() if name in (sys.argv[1:] or CASES)})
