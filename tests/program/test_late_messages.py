"""Messages that are read late: whatever leaves must stay as it was until it has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Message, Pending
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

LATE_S = 0.003


@dataclass
class Letter:
    """A tensor of the sender's, which is read when somebody fetches it."""

    tensor: Tensor
    read: threading.Event = field(default_factory=threading.Event)


@dataclass
class Travel:
    """As of MPI: it is over when all that was expected is here, and what was sent has been read."""

    world: LateWorld
    places: Sequence[tuple[object, Tensor]]
    sent: Sequence[Letter]

    def wait(self) -> None:
        for place, into in self.places:
            letter = self.world._mail.fetch(place)
            time.sleep(0 if self.sent else LATE_S)  # the sender of what goes one way is at work again
            into.copy_(letter.tensor)
            letter.read.set()
        self.places = ()
        assert all(letter.read.wait(timeout=20) for letter in self.sent)

    def is_completed(self) -> bool:
        ready = all(self.world._mail.has(place) for place, _ in self.places)
        if ready and all(letter.read.is_set() for letter in self.sent):
            self.wait()
            return True
        return False


class LateWorld(LoopbackWorld):
    """Nothing is copied when it is sent."""

    def __init__(self, world: LoopbackWorld) -> None:
        super().__init__(world.rank, world.size, world._mail)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        letters = [Letter(message.tensor) for message in sends]
        for message, letter in zip(sends, letters, strict=True):
            self._mail.post((self.rank, message.peer, message.tag), letter)
        places = [(self._mail.reserve((m.peer, self.rank, m.tag)), m.tensor) for m in receives]
        return Travel(self, places, letters)


class Tail(nn.Module):
    """Input and parameter reach a sum through views: autograd leaves both with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 4, 16, 16))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) + self.places.flatten(2).transpose(1, 2)
        return self.last(tokens).mean(1)


def make_embedding_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), Tail())


plan64 = partial(Plan, precision="float64")
CASES = {
    "shared gradient": (make_embedding_model, plan64(split_size=2, spatial_size=0, parts=4), 16),
    "shared gradient, weights later": (
        make_embedding_model,
        plan64(split_size=2, spatial_size=0, parts=4, schedule="zero_bubble"),
        16,
    ),
    "1f1b": (resnet20_v1, plan64(split_size=3, spatial_size=0, parts=4, schedule="1f1b"), 32),
    "tiles": (resnet20_v1, plan64(split_size=2, slice_method="2x2", parts=2), 32),
    "skips": (UNet, plan64(split_size=3, spatial_size=0, parts=2), 32),
    "away": (
        resnet20_v1,
        plan64(split_size=3, spatial_size=1, slice_method="1x2", parts=2, offload_activations=True),
        32,
    ),
}


def train_ranks(recipe: Recipe, late: bool) -> list[dict[str, dict[str, Tensor]]]:
    whole = make_batches(recipe, 0, steps=2)

    def work(world: LoopbackWorld) -> dict[str, dict[str, Tensor]]:
        training = RankTraining(LateWorld(world) if late else world, recipe)
        for batch in whole:
            training.step(training.cut(batch))
        return training.copy_tensors()

    return run_ranks(recipe.plan.ranks, work)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_what_leaves_stays_as_it_was_until_it_is_read(name: str):
    make, plan, side_px = CASES[name]
    torch.manual_seed(0)
    recipe = prepare(make(), plan, (plan.parts, 3, side_px, side_px))
    for ours, theirs in zip(train_ranks(recipe, late=True), train_ranks(recipe, late=False), strict=True):
        for group, tensors in theirs.items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(ours[group][key], tensor, rtol=1e-12, atol=1e-14)
