"""What programs say that they send is what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from engines.comm.loopback import LoopbackWorld, run_ranks
from engines.comm.world import Message, Pending
from engines.models.unet import UNet
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.traffic import traffic
from engines.training import RankTraining, prepare

PLANS = [
    Plan(split_size=1, num_spatial_parts=4),
    Plan(split_size=2, num_spatial_parts=3, slice_method="vertical"),
    Plan(split_size=2, num_spatial_parts=4, halo_d2=True, fused_layers=2),
]


class Counting:
    """A world that counts what passes through."""

    def __init__(self, world: LoopbackWorld) -> None:
        self.rank, self.size, self.world = world.rank, world.size, world
        self.sent: Counter[str] = Counter()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent.update(messages=len(sends), bytes=sum(message.tensor.nbytes for message in sends))
        return self.world.exchange(sends, receives)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.summary)
def test_every_message_and_byte_is_told_beforehand(plan: Plan):
    recipe = prepare(UNet(num_classes=3, width=4), plan, (2, 3, 36, 44), device="cpu")
    batch = {"images": torch.randn(2, 3, 36, 44), "labels": torch.zeros(2, 36, 44, dtype=torch.int64)}

    def sent(world: LoopbackWorld) -> Counter[str]:
        counting = Counting(world)
        training = RankTraining(counting, recipe)
        training.step(training.cut(batch))
        return counting.sent

    counted = run_ranks(plan.ranks, sent)
    for program, seen in zip(compile_plan(recipe.graph, plan), counted, strict=True):
        told = list(traffic(program).values())
        assert sum(part.messages for part in told) == seen["messages"]
        assert abs(sum(part.bytes for part in told) - seen["bytes"]) <= 0.001 * seen["bytes"]
