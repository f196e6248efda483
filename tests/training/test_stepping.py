"""A step that is walked: the same values, loss and weights as one that runs, whatever is done in between.

Models are defined inside the tests, as in a cell: the ranks can't import this file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training, show_step
from mpi4dl_nb.engines.errors import ImageError, LossError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.training.step_debugger import StepDebugger
from tests.exact import Same, close, compute_weighted_sum, make_whole_numbers, with_whole_weights

TILES = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 1), precision="float64")
PIPED = replace(TILES, split_size=3, slice_method="1x2", balance=(1, 1, 1), parts=2, schedule="1f1b")
HALVES = replace(TILES, overlap_halos=True)
SHAPE = 2, 3, 9, 14


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    with Cluster(5, backend="loopback") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, backend="loopback") as cluster:
        yield cluster


def make_net() -> nn.Module:
    """Whole numbers stay whole: whatever the order of sums, the bits are the same. (Others vary with memory.)"""
    first = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.5)]
    layers = [*first, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return with_whole_weights(nn.Sequential(*layers, nn.AvgPool2d(2, divisor_override=1)))


def make_normed_net() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)]
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2)]
    return nn.Sequential(*first, *layers)


def make_batch(seed: int = 0, count: int = 2) -> tuple[Tensor, Tensor]:
    return make_whole_numbers(count, *SHAPE[1:], seed=seed), make_whole_numbers(count, 4, 4, 7, seed=seed + 1)


def make_loss() -> nn.Module:
    """Made here, so that ranks need not find it."""
    return type("Sum", (nn.Module,), {"forward": lambda _self, made, wanted: (made * wanted).sum()})()


def make_training(cluster: Cluster, plan: Plan = TILES, make: Callable[[], nn.Module] = make_net) -> Training:
    torch.manual_seed(7)  # what the model draws follows from it
    count = 2 * plan.parts
    labels, optimiser = TensorSpec((count, 4, 4, 7), "float64"), partial(torch.optim.SGD, lr=2**-20, momentum=0.5)
    return Training(
        make(), plan, cluster, (count, *SHAPE[1:]), loss=make_loss(), labels=labels, optimiser=optimiser
    )  # fmt: skip


def has_same_state(one: Training, other: Training, same: Same = torch.equal) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def walk_instructions(stepping: StepDebugger) -> None:
    for event in stepping:
        assert stepping.event is event


def walk_mixed(stepping: StepDebugger) -> None:
    stepping.instruction("next")
    stepping.layer(rank=0)
    stepping.view()
    stepping.until(kind="stage")
    stepping.micro_batch()
    stepping.phase()
    stepping.finish()


def walk_twice(stepping: StepDebugger) -> None:
    stepping.until(kind="stage", phase="backward")
    stepping.restart()
    stepping.until(phase="backward", kind="all-reduce", rank=0)
    stepping.restart()
    stepping.finish()


def walk_layers(stepping: StepDebugger) -> None:
    while not stepping.done:
        stepping.layer("next")


# ---- the same as a step at full speed


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, HALVES, PIPED], ids=["tiles", "halves", "piped"])
@pytest.mark.parametrize("walk", [walk_instructions, walk_mixed, walk_twice, walk_layers])
def test_a_walked_step_is_a_step(five, four, plan: Plan, walk: Callable[[StepDebugger], None]):
    """Loss, weights, momentum and random draws, over three steps."""
    cluster = four if plan is PIPED else five
    ran, walked = make_training(cluster, plan), make_training(cluster, plan)
    for seed in range(2):
        data = make_batch(seed, 2 * plan.parts)
        stepping = walked.stepping(*data)
        walk(stepping)
        assert stepping.loss == ran.step(*data)
        assert has_same_state(walked, ran)
    data = make_batch(2, 2 * plan.parts)
    assert walked.step(*data) == ran.step(*data)
    assert walked.steps == ran.steps == 3


@pytest.mark.nightly
def test_running_statistics_are_those_of_a_step(five):
    ran, walked = (make_training(five, TILES, make_normed_net) for _ in range(2))
    for seed in range(2):
        stepping = walked.stepping(*make_batch(seed))
        walk_twice(stepping)
        assert stepping.loss == pytest.approx(ran.step(*make_batch(seed)), rel=1e-12)
    assert has_same_state(walked, ran, close)


def test_a_walked_step_is_in_the_timeline(five):
    training = make_training(five)
    stepping = training.stepping(*make_batch())
    walk_mixed(stepping)
    names = [(event.rank, event.name, event.phase) for event in training.timeline().events]
    other = make_training(five)
    other.step(*make_batch())
    assert sorted(names) == sorted((event.rank, event.name, event.phase) for event in other.timeline().events)


def test_an_event_says_where_all_ranks_are(five):
    stepping = make_training(five).stepping(*make_batch())
    assert [rank.did for rank in stepping.event.ranks] == [None] * 5
    assert stepping.event.ranks[4].waits_for == (0, 1, 2, 3)
    event = stepping.until(layer="3", kind="halo")
    tile, last = event.ranks[0], event.ranks[4]
    assert (tile.did.kind, tile.did.layer, tile.did.phase_name, tile.moved) == ("halo", "3", "forward", True)
    assert tile.role == "stage 0, tile 0"
    assert (last.did, last.moved) == (None, False)
    assert tile.next.kind == "compute"
    assert tile.activation_bytes > 0 < tile.weight_bytes
    assert tile.process_bytes > 1 << 20
    assert event.loss is None
    assert {(t.source, t.target) for t in event.transfers} == {(a, b) for a in range(4) for b in range(4) if a != b}
    stepping.close()


def test_one_rank_goes_on_with_those_that_it_needs_only(five):
    stepping = make_training(five).stepping(*make_batch())
    event = stepping.instruction(rank=1)  # the first of all is the halo of the image
    assert event.places == (1, 1, 1, 1, 0)
    event = stepping.instruction(rank=1)
    assert event.places == (1, 2, 1, 1, 0)
    assert [rank.moved for rank in event.ranks] == [False, True, False, False, False]
    event = stepping.instruction(rank=4)
    assert event.places[4] == 1
    assert min(event.places[:4]) > 2
    stepping.close()


def test_a_breakpoint_that_no_instruction_meets_is_refused(five):
    stepping = make_training(five).stepping(*make_batch())
    with pytest.raises(PlanError, match="layer='blocks'"):
        stepping.until(layer="blocks")
    with pytest.raises(PlanError, match="rank='last'"):
        stepping.instruction(rank="last")
    with pytest.raises(PlanError, match="unit='epoch'"):
        stepping.go("epoch")
    assert stepping.until(rank=4, phase="backward").ranks[4].did.phase_name == "backward"
    stepping.finish()
    with pytest.raises(PlanError, match="restart"):
        stepping.instruction()


def test_a_batch_of_another_shape_is_refused(five):
    training = make_training(five)
    with pytest.raises(ImageError):
        training.stepping(torch.zeros(2, 3, 9, 9), make_batch()[1])


def test_a_long_way_is_gone_by_instructions_at_its_end_only(five):
    ran, walked = make_training(five), make_training(five)
    data = make_batch()
    stepping = walked.stepping(*data)
    target = stepping.find_unit_end("phase")
    events = list(stepping.walk_to(target, most=3))
    assert [event.number for event in events] == [1, 2, 3, 4]
    assert stepping.event.places == target
    assert all(max(b - a for a, b in zip(e.places, f.places, strict=True)) == 1 for e, f in pairwise(events))
    for _ in stepping.walk_to(stepping.order.ends):
        pass
    assert stepping.loss == ran.step(*data)
    assert has_same_state(ran, walked)


# ---- nothing is left behind


@pytest.mark.nightly
@pytest.mark.parametrize("leave", ["close", "another", "run", "predict", "new"])
def test_a_step_that_is_left_has_changed_nothing(five, leave: str):
    """Left where the last rank has not fetched what tiles have sent, and sums of gradients are under way."""
    training, other = make_training(five), make_training(five)
    for kind, phase in (("stage", "forward"), ("halo", "backward")):
        stepping = training.stepping(*make_batch(5))
        event = stepping.until(kind=kind, phase=phase, rank=0)
        if kind == "stage":
            assert event.places[4] == 0 or event.ranks[4].did.kind == "stage"
        {
            "close": stepping.close,
            "another": lambda: training.stepping(*make_batch(6)).phase(),
            "run": lambda: other.predict(make_batch(6)[0]),
            "predict": lambda: training.predict(make_batch(6)[0]),
            "new": lambda: make_training(five).step(*make_batch(6)),
        }[leave]()
        with pytest.raises(PlanError, match="restart"):
            stepping.instruction()
    assert training.step(*make_batch()) == other.step(*make_batch())
    assert has_same_state(training, other)


def test_a_step_that_was_given_up_is_closed_without_ending_the_next_one(five):
    training = make_training(five)
    first, second = training.stepping(*make_batch()), training.stepping(*make_batch())
    first.close()
    second.instruction()
    second.close()
    with pytest.raises(PlanError, match="given up"):
        second.instruction()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"channel": -1}, "channel=-1 must be a whole number of 0 or more"),
        ({"channel": "1"}, "channel='1' must be a whole number of 0 or more"),
        ({"image": -7}, "image=-7 must be a whole number of 0 or more"),
        ({"bound_px": 0}, "bound_px=0 must be a whole number of 1 or more"),
    ],
)
def test_a_view_that_cannot_be_shown_is_refused_and_the_step_goes_on(five, asked: dict, text: str):
    stepping = make_training(five).stepping(*make_batch())
    with pytest.raises(PlanError, match=text):
        stepping.view(**asked)
    with pytest.raises(PlanError, match="message=-9 must be a whole number of 0 or more"):
        show_step(stepping, message=-9)
    stepping.instruction()
    stepping.close()


def test_looking_at_weights_does_not_end_a_walk(five):
    training, other = make_training(five), make_training(five)
    stepping = training.stepping(*make_batch())
    stepping.until(kind="stage")
    assert has_same_state(training, other)
    assert stepping.finish() == other.step(*make_batch())


@pytest.mark.nightly
def test_a_sender_may_be_far_ahead_of_who_receives(four):
    """Two micro-batches have left the tiles before the next stage takes the first."""
    ran, walked = make_training(four, PIPED), make_training(four, PIPED)
    data = make_batch(0, 4)
    stepping = walked.stepping(*data)
    stepping.until(kind="stage", rank=0, micro_batch=1, phase="forward")
    ahead = stepping.order.compute_closure((0,) * 4, {0: stepping.event.places[0]})
    stepping.restart()
    assert stepping._advance(ahead).places[3] == 0
    assert stepping.finish() == ran.step(*data)
    assert has_same_state(ran, walked)


def test_a_loss_that_is_not_finite_ends_the_walk_and_changes_nothing(five):
    training, other = make_training(five), make_training(five)
    images, labels = make_batch()
    stepping = training.stepping(images * float("nan"), labels)
    with pytest.raises(LossError):
        stepping.finish()
    with pytest.raises(PlanError, match="restart"):
        stepping.instruction()
    assert training.step(images, labels) == other.step(images, labels)
    assert has_same_state(training, other)


def test_an_interrupt_gives_the_step_up(five, monkeypatch):
    training, other = make_training(five), make_training(five)
    stepping = training.stepping(*make_batch())
    stepping.until(kind="stage", rank=0)
    with monkeypatch.context() as patched:
        patched.setattr("mpi4dl_nb.cluster.remote_call.RemoteCall._collect", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            stepping.finish()
    with pytest.raises(PlanError, match="interrupted"):
        stepping.layer()
    stepping.restart()
    assert stepping.finish() == other.step(*make_batch())
    assert has_same_state(training, other)


def _raise_interrupt(*_: object, **__: object) -> None:
    """A person stops the cell while it waits for the ranks."""
    raise KeyboardInterrupt


# ---- what is seen is true


def make_whole_net() -> nn.Module:
    """Without statistics: whole numbers stay whole."""
    convolutions = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return with_whole_weights(nn.Sequential(*convolutions, nn.Conv2d(4, 2, 3, stride=2, padding=1)))


def walk_with_hooks(cluster: Cluster, plan: Plan) -> tuple[StepDebugger, dict[str, Tensor]]:
    """A walked step of a model in whole numbers, and what hooks saw in the plain model."""
    model = make_whole_net()
    images, labels = make_whole_numbers(*SHAPE), make_whole_numbers(2, 2, 5, 7, seed=1)
    plain, seen = copy.deepcopy(model), {}

    def keep(name: str, _module: object, _given: object, made: Tensor) -> None:
        made.retain_grad()
        seen[name] = made

    for name, module in plain.named_children():
        module.register_forward_hook(partial(keep, name))
    compute_weighted_sum(plain(images), labels).backward()
    training = Training(
        model, plan, cluster, SHAPE, loss=make_loss(), labels=TensorSpec(tuple(labels.shape), "float64")
    )
    return training.stepping(images, labels), seen


def check_values(stepping: StepDebugger, seen: dict[str, Tensor]) -> None:
    stepping.until(layer="4", kind="halo", phase="forward")
    assert torch.equal(stepping.tensor("1"), seen["1"])
    assert torch.equal(stepping.tensor("3"), seen["3"])
    view = stepping.view(channel=2, image=1)
    for panel in view.panels:
        if panel.seen is not None:
            inside = panel.extent.held & Tile.whole(*panel.extent.size_px)
            whole = seen["3"][1, 2][inside.to_slices(Tile.whole(0, 0))]
            assert torch.equal(panel.seen.pixels[inside.to_slices(panel.extent.held)], whole)
    check_lent(view, seen)
    stepping.until(layer="4", kind="halo", phase="backward")
    assert torch.equal(stepping.tensor("3", gradient=True), seen["3"].grad)
    check_returned(stepping.view(channel=1))
    stepping.until(layer="2", kind="halo", phase="backward")
    assert torch.equal(stepping.tensor("1", gradient=True), seen["1"].grad)
    with pytest.raises(PlanError, match="gone"):
        stepping.tensor("3", gradient=True)
    stepping.close()


def check_lent(view, seen: dict[str, Tensor]) -> None:
    """What has arrived are the neighbours' pixels; the window had no content there."""
    assert view.landed
    for transfer, landed in view.landed:
        whole = seen["3"][1, 2][transfer.move.tile.to_slices(Tile.whole(0, 0))]
        assert landed.before is None
        assert torch.equal(landed.arrived, whole)
        assert torch.equal(landed.after, whole)
        assert transfer.bytes == 2 * 4 * whole.numel() * 8


def check_returned(view) -> None:
    """Borrowed gradients go home and are added there."""
    assert any(bool(landed.arrived.any()) for _, landed in view.landed)
    assert all(transfer.back for transfer, _ in view.landed)
    for _, landed in view.landed:
        assert torch.equal(landed.before + landed.arrived, landed.after)


@pytest.mark.parametrize("fused", [{}, {"halo_d2": True, "fused_layers": 1}], ids=["D1", "D2"])
def test_values_are_those_of_one_process(four, fused):
    plan = Plan(split_size=1, spatial_size=1, slice_method="2x2", precision="float64", **fused)
    check_values(*walk_with_hooks(four, plan))


@pytest.mark.nightly
def test_values_over_mpi_are_those_of_one_process_and_messages_are_not_lost():
    """The same with processes; messages too large to leave by themselves wait while their sender has nothing to do."""
    plan = Plan(split_size=2, spatial_size=1, slice_method="1x2", balance=(2, 1), precision="float64")
    with Cluster(3) as cluster:
        stepping, seen = walk_with_hooks(cluster, plan)
        stepping.until(layer="2", kind="halo", phase="forward")
        assert torch.equal(stepping.tensor("1"), seen["1"])
        assert all(torch.equal(landed.arrived, landed.after) for _, landed in stepping.view(channel=3).landed)
        stepping.until(layer="2", kind="halo", phase="backward")
        assert torch.equal(stepping.tensor("1", gradient=True), seen["1"].grad)
        check_returned(stepping.view())
        shape = (1, 3, 256, 192)
        large = Plan(split_size=2, spatial_size=1, slice_method="1x2", balance=(1, 2))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3), nn.Conv2d(4, 4, 3))
        labels = torch.zeros(1, 252, 188, dtype=torch.long)
        ran, walked = (Training(model, large, cluster, shape) for _ in range(2))
        images = torch.randn(shape)
        stepping = walked.stepping(images, labels)
        ahead = stepping.order.compute_closure((0, 0, 0), {0: 3, 1: 3})
        assert stepping._advance(ahead).places[2] == 0  # 1.5 MB each on their way
        stepping.restart()
        stepping._advance(ahead)
        for _ in stepping:
            pass
        assert stepping.loss == ran.step(images, labels)
        assert has_same_state(ran, walked)
