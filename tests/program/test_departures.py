"""Messages leave when the device has put their pixels into them, and not before; the rank computes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from mpi4dl_nb.engines.bench.memory_limit import make_ranks_in_turn
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Pending
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.message_buffers import MessageBuffer, SendQueue
from mpi4dl_nb.engines.program.program import Step
from mpi4dl_nb.engines.program.update import GradientBucket
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.debug_step import RankStepper
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, verify

plan64 = partial(Plan, precision="float64")
CASES = {
    "tiles": (resnet20_v1, plan64(split_size=1, slice_method="2x2", overlap_halos=True)),
    "tiles to the loss": (UNet, plan64(split_size=1, slice_method="1x3", overlap_halos=True)),
    "pipeline behind tiles": (resnet20_v1, plan64(split_size=3, slice_method="1x2", parts=2, schedule="1f1b")),
    "replicas of tiles": (resnet20_v1, plan64(split_size=1, slice_method="1x2", data_parallel=2, overlap_halos=True)),
}


class Device:
    """One that works behind its rank: what it is told it does when somebody waits for it, in order."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []

    def query(self) -> bool:
        return not self.told

    def synchronize(self) -> None:
        while self.told:
            self.told.pop(0)()


class Started:
    """A message that is over when it has begun."""

    def __init__(self, seen: list[str], name: str) -> None:
        seen.append(name)

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def start_message(send_queue: SendQueue, device: Device, seen: list[str], name: str) -> Pending:
    device.told.append(lambda: seen.append(f"{name} packed"))
    return send_queue.start_after(device, lambda: Started(seen, f"{name} left"))


def test_messages_leave_when_the_device_has_packed_them():
    send_queue, device, seen = SendQueue(), Device(), []
    pending = start_message(send_queue, device, seen, "a")
    send_queue.poll()
    assert not seen
    assert not pending.is_completed()
    device.synchronize()
    send_queue.poll()
    assert seen == ["a packed", "a left"]
    assert pending.is_completed()


def test_messages_leave_in_the_order_in_which_they_were_handed_over():
    send_queue, seen = SendQueue(), []
    start_message(send_queue, Device(), seen, "a")
    start_message(send_queue, Device(), seen, "b").wait()
    assert seen == ["a packed", "a left", "b packed", "b left"]


def test_a_message_that_leaves_waits_for_the_device():
    send_queue, device, seen = SendQueue(), Device(), []
    send_queue.add(start_message(send_queue, device, seen, "a"))
    send_queue.wait()
    assert seen == ["a packed", "a left"]


def test_what_was_given_up_does_not_leave():
    send_queue, device, seen = SendQueue(), Device(), []
    pending = start_message(send_queue, device, seen, "a")
    send_queue.discard()
    with pytest.raises(RankError, match="given up"):
        pending.wait()
    assert not seen


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pixels and gradients reach their messages late; the names of what was computed before one had left."""
    computed: list[str] = []
    pack, do = GradientBucket.pack, Worker.step

    def fill(into: Tensor, content: Tensor) -> Callable[[], object]:
        into.fill_(torch.nan)
        return lambda: into.copy_(content)

    def fill_messages(self: ExchangeRunner, parcels: Sequence[MessageBuffer], contents: Sequence[Tensor]) -> Device:
        device = Device()  # which reads when it is waited for: whatever was written there meanwhile
        pairs = zip(parcels, contents, strict=True)
        device.told += [fill(parcel.pixels, pixels.detach()) for parcel, pixels in pairs if not _is(parcel, pixels)]
        return device

    def pack_gradients(self: GradientBucket) -> Device:
        pack(self)
        device = Device()
        device.told.append(fill(self.flat, self.flat.clone()))
        return device

    def record_step(self: Worker) -> Step:
        instruction = self.program.steps[self.position].instruction
        if isinstance(instruction, Compute) and self._send_queue._packed:
            computed.append(instruction.name)
        return do(self)

    monkeypatch.setattr(ExchangeRunner, "_fill", fill_messages)
    monkeypatch.setattr(GradientBucket, "pack", pack_gradients)
    monkeypatch.setattr(Worker, "step", record_step)
    return computed


def _is(parcel: MessageBuffer, pixels: Tensor) -> bool:
    """Whether a message is its pixels, which others read as well."""
    return parcel.pixels.untyped_storage().data_ptr() == pixels.untyped_storage().data_ptr()


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_device_that_works_behind_its_rank_changes_nothing(name: str, computed: list[str]):
    make, plan = CASES[name]
    model = make(num_classes=3)
    recipe = prepare(model, plan, (4, 3, 32, 32), device="cpu")

    def work(world: LoopbackWorld) -> dict[str, object]:
        return verify(world, recipe, model, torch.nn.CrossEntropyLoss(), 0)

    assert run_ranks(plan.ranks, work)[0]["ok"]
    assert computed, "no message waited for the device"


@pytest.mark.nightly
def test_who_stops_between_two_instructions_has_sent_what_others_wait_for(computed: list[str]):
    """A step that is walked: one rank is held up after a message's pixels were packed, the others go on."""
    make, plan = CASES["tiles"]
    recipe = prepare(make(num_classes=3), plan, (4, 3, 32, 32), device="cpu")
    batch = make_batches(recipe, 0, steps=1)[0]

    def work(world: LoopbackWorld) -> bool:
        training = RankTraining(world, recipe)
        walk = RankStepper(training, training.cut(batch), 4, "0")
        steps = training.worker.program.steps
        exchanges = [
            (index, step.instruction) for index, step in enumerate(steps) if isinstance(step.instruction, Exchange)
        ]
        halves = [index for index, exchange in exchanges if exchange.strips]
        walk.advance(1 + halves[0 if world.rank == 0 else 1])
        walk.advance(len(steps))
        return training.worker.done

    assert all(run_ranks(plan.ranks, work))


@pytest.mark.nightly
def test_tiles_in_turn_send_their_gradients_home(computed: list[str]):
    plan = Plan(split_size=2, spatial_size=1, slice_method="1x2", precision="float64")
    recipe = prepare(resnet20_v1(), plan, (2, 3, 32, 32), device="cpu")
    trainings, step = make_ranks_in_turn(recipe)
    step(make_batches(recipe, 0, steps=1)[0])
    for training in trainings:
        assert all(torch.isfinite(grad).all() for grad in training.copy_tensors()["gradients"].values())
