"""Messages leave when the device has put their pixels into them, and not before; the rank computes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from engines.bench.verify import verify
from engines.comm.loopback import LoopbackWorld, run_ranks
from engines.comm.world import Pending
from engines.models import resnet20_v1
from engines.models.unet import UNet
from engines.plan import Plan
from engines.program.carry import Carrier
from engines.program.instructions import Compute
from engines.program.outbox import Outbox
from engines.program.parcels import Parcel
from engines.program.program import Step
from engines.program.update import GradientSum
from engines.program.worker import Worker
from engines.training import prepare

CASES = {
    "tiles": (resnet20_v1, Plan(split_size=1, slice_method="2x2", overlap_halos=True, precision="float64")),
    "tiles to the loss": (UNet, Plan(split_size=1, slice_method="1x3", overlap_halos=True, precision="float64")),
    "pipeline behind tiles": (
        resnet20_v1, Plan(split_size=3, slice_method="1x2", parts=2, schedule="1f1b", precision="float64"),
    ),
    "replicas of tiles": (
        resnet20_v1,
        Plan(split_size=1, slice_method="1x2", data_parallel=2, overlap_halos=True, precision="float64"),
    ),
}  # fmt: skip


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

    def done(self) -> bool:
        return True


def handed_over(outbox: Outbox, device: Device, seen: list[str], name: str) -> Pending:
    device.told.append(lambda: seen.append(f"{name} packed"))
    return outbox.depart(device, lambda: Started(seen, f"{name} left"))


def test_messages_leave_in_the_order_in_which_they_were_handed_over():
    outbox, device, seen = Outbox(), Device(), []
    pending = [handed_over(outbox, device, seen, name) for name in "ab"]
    outbox.look()
    assert not seen
    assert not pending[0].done()
    device.synchronize()
    pending[1].wait()
    assert seen == ["a packed", "b packed", "a left", "b left"]


def test_whoever_leaves_waits_for_the_device():
    outbox, device, seen = Outbox(), Device(), []
    outbox.add(handed_over(outbox, device, seen, "a"))
    outbox.wait()
    assert seen == ["a packed", "a left"]


def test_what_was_given_up_does_not_leave():
    outbox, device, seen = Outbox(), Device(), []
    pending = handed_over(outbox, device, seen, "a")
    outbox.forget()
    pending.wait()
    assert not seen


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pixels and gradients reach their messages late; the names of what was computed before one had left."""
    computed: list[str] = []
    pack, do = GradientSum.pack, Worker._do

    def fill(into: Tensor, content: Tensor) -> Callable[[], object]:
        into.fill_(torch.nan)
        return lambda: into.copy_(content)

    def pack_pixels(self: Carrier, parcels: Sequence[Parcel], whole: Tensor | None) -> Device:
        device = Device()
        staged = [parcel for parcel in parcels if not _is(parcel, whole)]
        device.told += [fill(parcel.pixels, whole[parcel.index].clone()) for parcel in staged]
        return device

    def pack_gradients(self: GradientSum) -> Device:
        pack(self)
        device = Device()
        device.told.append(fill(self.flat, self.flat.clone()))
        return device

    def watched(self: Worker, step: Step) -> int:
        if isinstance(step.instruction, Compute) and self._outbox._packed:
            computed.append(step.instruction.name)
        return do(self, step)

    monkeypatch.setattr(Carrier, "_pack", pack_pixels)
    monkeypatch.setattr(GradientSum, "pack", pack_gradients)
    monkeypatch.setattr(Worker, "_do", watched)
    return computed


def _is(parcel: Parcel, whole: Tensor) -> bool:
    """Whether a message is its pixels, which others read as well."""
    return parcel.pixels.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_a_device_that_works_behind_its_rank_changes_nothing(name: str, computed: list[str]):
    make, plan = CASES[name]
    model = make(num_classes=3)
    recipe = prepare(model, plan, (4, 3, 32, 32), device="cpu")

    def work(world: LoopbackWorld) -> dict[str, object]:
        return verify(world, recipe, model, torch.nn.CrossEntropyLoss(), 0)

    assert run_ranks(plan.ranks, work)[0]["ok"]
    assert computed, "no message waited for the device"
