"""What programs say that they send is what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Message, Pending
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.program import count_traffic
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from tests.predict.measured import get_live_values

PLANS = [
    Plan(split_size=1, num_spatial_parts=4),
    Plan(split_size=2, num_spatial_parts=3, slice_method="vertical"),
    Plan(split_size=2, num_spatial_parts=4, halo_d2=True, fused_layers=2),
    Plan(split_size=1, num_spatial_parts=4, overlap_halos=True, checkpoint_activations=True),
    Plan(split_size=2, num_spatial_parts=4, overlap_halos=True, halo_d2=True, fused_layers=2),
    Plan(split_size=2, spatial_size=0, parts=2, bidirectional=True, data_parallel=2),
    Plan(split_size=1, num_spatial_parts=4, parts=2),
    Plan(split_size=2, num_spatial_parts=4, sync_batchnorm=False),
]


class Counting:
    """A world that counts what passes through."""

    shares_memory = False

    def __init__(self, world: LoopbackWorld) -> None:
        self.rank, self.size, self.world = world.rank, world.size, world
        self.sent: Counter[str] = Counter()
        self.can_access, self.collectives = world.can_access, world.collectives

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent.update(messages=len(sends), bytes=sum(message.tensor.nbytes for message in sends))
        return self.world.exchange(sends, receives)

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        return partial(self.exchange, sends, receives)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.summary)
def test_every_message_and_byte_is_counted_beforehand(plan: Plan):
    recipe = prepare(UNet(num_classes=3, width=4), plan, (2, 3, 36, 44), device="cpu")
    count = 2 * plan.batches
    batch = {"images": torch.randn(count, 3, 36, 44), "labels": torch.zeros(count, 36, 44, dtype=torch.int64)}

    def count_sent(world: LoopbackWorld) -> Counter[str]:
        counting = Counting(world)
        training = RankTraining(counting, recipe)
        training.step(training.cut(batch))
        counting.sent["timed"] = sum(event.bytes for event in training.worker.events)
        return counting.sent

    counted = run_ranks(plan.ranks, count_sent)
    for program, seen in zip(compile_plan(recipe.graph, plan), counted, strict=True):
        told = list(count_traffic(program).values())
        assert sum(part.messages for part in told) == seen["messages"]
        for found in (seen["bytes"], seen["timed"]):
            assert sum(part.bytes for part in told) == pytest.approx(found, rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("halos", [{}, {"halo_d2": True, "fused_layers": 2}], ids=["D1", "D2"])
def test_no_rank_of_a_spatial_stage_holds_a_whole_image(halos: dict[str, object]):
    """Of any value, at any time: its tile and the halo of the layers that share an exchange, no more."""
    plan = Plan(split_size=2, num_spatial_parts=4, balance=(11, 2), **halos)
    recipe = prepare(UNet(num_classes=3, width=4), plan, (1, 3, 64, 96), device="cpu")
    batch = {"images": torch.randn(1, 3, 64, 96), "labels": torch.zeros(1, 64, 96, dtype=torch.int64)}
    specs = recipe.graph.specs

    def compute_largest_share(world: LoopbackWorld) -> float:
        training, shares = RankTraining(world, recipe), [0.0]
        training.start(training.cut(batch))
        while not training.worker.done:
            training.worker.step()
            for name, tensor in get_live_values(training.worker).items():
                spec = specs.get(name.split(".")[0])
                if spec and len(spec.shape) == 4 and tensor.dim() == 4:
                    shares.append(tensor.shape[-2] * tensor.shape[-1] / (spec.shape[-2] * spec.shape[-1]))
        return max(shares)

    *spatial, joined = run_ranks(plan.ranks, compute_largest_share)
    assert 0.25 <= max(spatial) < 0.8
    assert joined == 1.0
