"""`mpiexec -n 4 python -m mpi4py collective_ranks.py`: gradients added up without messages, with gloo in NCCL's place.

gloo sums what lies in the host's memory, and is asked in the same words. `die` as an argument: see
`check_a_death_is_noticed`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mpi4dl_nb.engines.comm import mpi
from mpi4dl_nb.engines.comm.mpi import MpiWorld
from mpi4dl_nb.engines.comm.nccl import PATIENCE, Collectives, NcclAllReduce, OrderedStarter
from mpi4dl_nb.engines.errors import RankError, ReleasedError
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, verify

sys.path.insert(0, str(Path(__file__).parent))
from run import main

PLANS = {
    "tiles": Plan(split_size=1, num_spatial_parts=4),
    "replicas": Plan(split_size=1, spatial_size=0, data_parallel=4),
    "replicas_of_stages": Plan(split_size=2, spatial_size=0, data_parallel=2, parts=2),
    "two_directions": Plan(split_size=4, spatial_size=0, parts=2, bidirectional=True),
}
HOST = torch.device("cpu")


def make_gloo_collectives(world: MpiWorld, device: torch.device, check: Callable[[], None]) -> Collectives:
    """As if each rank had a GPU of its own."""
    return Collectives(world, check, lambda *place: dist.ProcessGroupGloo(*place, PATIENCE))


def verify_plan(world: MpiWorld, plan: Plan) -> None:
    torch.manual_seed(0)
    model = resnet20_v1()
    recipe = prepare(model, replace(plan, precision="float64"), (4, 3, 32, 32), device="cpu")
    line = verify(world, recipe, model, nn.CrossEntropyLoss(), seed=1)
    assert line["ok"], line


def check_gradients_are_added_by_collectives(world: MpiWorld) -> None:
    """And by nothing else, from the first step on."""
    torch.manual_seed(0)
    training = RankTraining(world, prepare(resnet20_v1(), PLANS["replicas"], (4, 3, 32, 32), device="cpu"))
    (batch,) = make_batches(training.recipe, seed=1, steps=1)
    training.step(training.cut(batch))
    sums = training.worker._sums.values()
    assert sums
    assert all(isinstance(each.total, NcclAllReduce) for each in sums)
    assert sum(each.total.sent_bytes for each in sums) == 2 * 3 * sum(each.flat.nbytes for each in sums) // 4


def check_sums_are_begun_in_any_order(world: MpiWorld) -> None:
    """Two sums of one group, begun this way round by some ranks and that way by others."""
    found = world.collectives(HOST)
    group, order = found.connect_group(range(4), HOST), OrderedStarter(2)
    tensors = [torch.full((5,), float(world.rank + number)) for number in range(2)]
    sums = [NcclAllReduce(tensor, group, number, order, found.check) for number, tensor in enumerate(tensors)]
    for _ in range(3):
        for each in sums if world.rank % 2 else reversed(sums):
            each.begin()
        for each in sums:
            each.wait()
            assert each.is_completed()
        world.barrier()
    assert [t.tolist() for t in tensors] == [[16.0 * 6] * 5, [16.0 * 10] * 5]


def check_collectives_are_connected_again_after_a_failure(world: MpiWorld) -> None:
    torch.manual_seed(0)
    training = RankTraining(world, prepare(resnet20_v1(), PLANS["replicas"], (4, 3, 32, 32), device="cpu"))
    (batch,) = make_batches(training.recipe, seed=1, steps=1)
    training.step(training.cut(batch))
    before = training.worker._sums
    world.gather(None)  # rank 0 goes on when the others have ended this step
    if world.rank == 0:
        world.revoke()
    else:
        with pytest.raises(RankError, match="released"):
            training.step(training.cut(batch))
    world.recover()
    training.abort_step()
    world.barrier()
    training.step(training.cut(batch))
    assert training.worker._sums is not before
    assert all(isinstance(each.total, NcclAllReduce) for each in training.worker._sums.values())
    grads = torch.cat([weight.grad.flatten() for weight in training.weights.values()])
    assert len({grads.numpy().tobytes() for grads in world.all_gather(grads)}) == 1


def check_a_failed_connection_is_reported(world: MpiWorld) -> None:
    def refuse_connection(*place: object) -> None:
        world.barrier()  # rank 0's store is there until all have found it
        raise RuntimeError("no such network")

    with pytest.raises(RankError, match=r"ranks 0, 1, 2, 3: no such network.*MPI4DL_NB_NCCL=0"):
        Collectives(world, world.check, refuse_connection).connect_group(range(4), HOST)


class _NeverDone:
    """A sum of which a rank is missing, as NCCL shows it: nothing comes, and no error."""

    def is_completed(self) -> bool:
        return False


def check_a_death_is_noticed(world: MpiWorld) -> NoReturn:
    """A rank dies while the others wait for a sum and for nothing of MPI's: they notice."""
    found = world.collectives(HOST)
    waiting = NcclAllReduce(torch.zeros(1), found.connect_group(range(4), HOST), 0, OrderedStarter(1), found.check)
    waiting.work = _NeverDone()
    with pytest.raises(ReleasedError):
        _wait_but_for_rank_2(world, waiting)
    world.recover()
    if world.rank == 0:
        print("the others go on:", world.size, flush=True)
    world.barrier()
    os._exit(0)  # after a death MPI.Finalize may wait for ever


def _wait_but_for_rank_2(world: MpiWorld, waiting: NcclAllReduce) -> None:
    """Some may still be in the rest, where all are connected, when rank 2 dies."""
    world.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    waiting.wait()


CASES = {name: lambda world, plan=plan: verify_plan(world, plan) for name, plan in PLANS.items()}
OTHERS = (
    check_gradients_are_added_by_collectives,
    check_sums_are_begun_in_any_order,
    check_collectives_are_connected_again_after_a_failure,
    check_a_failed_connection_is_reported,
)
CASES |= {case.__name__: case for case in OTHERS}


if __name__ == "__main__":
    mpi.make_collectives = make_gloo_collectives
    if "die" in sys.argv:
        check_a_death_is_noticed(MpiWorld())
    else:
        main({name: case for name, case in CASES.items() if name in sys.argv})
