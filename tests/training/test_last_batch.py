"""The last step of an epoch, with fewer images than a step takes: trained as a plain loop trains it, or left out."""

from __future__ import annotations

import copy
import itertools
import json
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mpi4dl_nb import Cluster, Plan, Training, resnet20_v1
from mpi4dl_nb.engines.cli import train_images
from mpi4dl_nb.engines.cli.train_command import run_train
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.train.recipe import prepare

SIZE, N, CLASSES = (8, 10), 4, 3
SHAPE = (N, 3, *SIZE)
FLOAT64 = partial(Plan, precision="float64")
PLANS = {
    "tiles": FLOAT64(split_size=1, num_spatial_parts=2, slice_method="horizontal"),
    "a pipeline": FLOAT64(split_size=2, spatial_size=0, parts=2, schedule="1f1b"),
    "zero bubble": FLOAT64(split_size=2, spatial_size=0, parts=2, schedule="zero_bubble"),
    "replicas": FLOAT64(split_size=1, spatial_size=0, data_parallel=2),
    "both ways": FLOAT64(split_size=2, spatial_size=0, bidirectional=True),
    "shares": FLOAT64(split_size=2, slice_method="1x2", local_dp=2),
    "accumulated": FLOAT64(split_size=1, spatial_size=0, accumulate=2, parts=2),
}
FLAGS = ("--model", "resnet20_v1", "--image-size", "8x10", "--batch-size", "4", "--parts", "2")
STAGES = ("--split-size", "2", "--spatial-size", "0")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SLOWER = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Batch norms know how many images they saw, and count the micro-batches."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(drop))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def make_net(drop: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Net(drop).double()


def train_plainly(model: nn.Module, steps: Sequence[Batch], micro_batches: int = 1) -> list[float]:
    """A loop in PyTorch, as anyone would write it: the mean loss of each step, the model trained in place."""
    optimiser = SGD(model.parameters())
    scheduler = SLOWER(optimiser)
    losses = []
    for images, labels in steps:
        optimiser.zero_grad()
        size, step = len(images) // micro_batches, []
        for first in range(0, len(images), size):
            part = slice(first, first + size)
            loss = nn.functional.cross_entropy(model(images[part]), labels[part])
            (loss / micro_batches).backward()
            step.append(loss.item())
        optimiser.step()
        scheduler.step()
        losses.append(sum(step) / micro_batches)
    return losses


def list_batches(images: SyntheticImages, size: int, epochs: int, drop_last: bool = False) -> list[Batch]:
    """The steps of some epochs, in the order of seed 0."""
    whole, found = Tile.whole(*SIZE), []
    for epoch in range(epochs):
        order = shuffle_indices(len(images), 0, epoch)
        for numbers in _split_order(order, size):
            if len(numbers) == size or not drop_last:
                pixels = torch.stack([images.part(number, whole) for number in numbers]).double()
                found.append((pixels, torch.tensor([images.label(number) for number in numbers])))
    return found


def _split_order(order: Sequence[int], size: int) -> list[Sequence[int]]:
    return [order[first : first + size] for first in range(0, len(order), size)]


def make_training(plan: Plan, cluster: Cluster, model: nn.Module | None = None) -> Training:
    return Training(model or make_net(), plan, cluster, SHAPE, optimiser=SGD, scheduler=SLOWER)


def assert_same(found: Training, losses: Sequence[float], model: nn.Module, expected: Sequence[float]) -> None:
    assert losses == pytest.approx(expected, rel=1e-10, abs=0)
    state = found.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(1, backend="loopback") as cluster:
        yield cluster


ONE = FLOAT64(split_size=1, spatial_size=0)


# ---- images that ranks read


@pytest.mark.nightly
@pytest.mark.parametrize("drop_last", [False, True], ids=["trained", "left out"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_images_that_are_left_over(plan: Plan, drop_last: bool):
    full, rest = N * plan.batches, plan.micro_batches * plan.local_dp
    images, model = SyntheticImages(full + rest, SIZE, CLASSES), make_net()
    expected = train_plainly(model, list_batches(images, full, 2, drop_last), plan.micro_batches)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        found = make_training(plan, cluster)
        history = found.fit(images, epochs=2, progress=False, drop_last=drop_last)
        assert_same(found, history.losses, model, expected)
    used = full if drop_last else full + rest
    assert [(epoch.steps, epoch.images) for epoch in history.epochs] == [(2 - drop_last, used)] * 2
    assert sum(history.epochs[0].counts.true) == used


def test_the_loss_of_an_epoch_is_the_mean_over_its_images(cluster):
    history = make_training(ONE, cluster).fit(SyntheticImages(N + 1, SIZE, CLASSES), progress=False)
    first, last = history.losses
    assert history.epochs[0].loss == pytest.approx((N * first + last) / (N + 1), rel=1e-14)
    assert history.epochs[0].loss != pytest.approx((first + last) / 2, rel=1e-6)


def test_fewer_steps_than_an_epoch_has_leave_nothing_over(cluster):
    history = make_training(ONE, cluster).fit(SyntheticImages(2 * N + 1, SIZE, CLASSES), progress=False, steps=2)
    assert [epoch.images for epoch in history.epochs] == [2 * N]


class Bad(SyntheticImages):
    """Some images cannot be read."""

    def __init__(self, count: int, bad: Sequence[int]) -> None:
        super().__init__(count, SIZE, CLASSES)
        self.bad = bad

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        if index in self.bad:
            raise ImageError(f"{index} is damaged")
        return super().part(index, tile, draw)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_make_the_last_step_smaller(workers: int):
    """Two of its four images are bad: of the two that are left both are trained, by 2 micro-batches."""
    plan, count = PLANS["a pipeline"], 2 * N
    order = shuffle_indices(count, 0, 0)
    bad = (order[5], order[7])
    images, model, whole = Bad(count, bad), make_net(), SyntheticImages(count, SIZE, CLASSES)
    first, second = list_batches(whole, N, 1)
    good = [0, 2]  # of the second step
    expected = train_plainly(model, [first, (second[0][good], second[1][good])], plan.micro_batches)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        found = make_training(plan, cluster)
        history = found.fit(images, progress=False, on_bad_image="skip", workers=workers)
        assert_same(found, history.losses, model, expected)
    assert len(history.left_out) == 2


@pytest.mark.nightly
def test_bad_images_may_leave_some_that_the_plan_cannot_divide():
    plan, count = PLANS["a pipeline"], 2 * N
    bad = shuffle_indices(count, 0, 0)[-1:]
    with Cluster(plan.ranks, backend="loopback") as cluster:
        history = make_training(plan, cluster).fit(Bad(count, bad), progress=False, on_bad_image="skip")
    assert (history.epochs[0].steps, history.epochs[0].images) == (2, N + 2)


# ---- batches


def make_loader(count: int, size: int = N, **more: object) -> DataLoader:
    random = torch.Generator().manual_seed(1)
    pixels = torch.randn((count, 3, *SIZE), generator=random, dtype=torch.float64)
    return DataLoader(TensorDataset(pixels, torch.randint(CLASSES, (count,), generator=random)), size, **more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["loader", "list", "generator", "endless"])
@pytest.mark.parametrize("drop_last", [False, True], ids=["trained", "left out"])
def test_a_smaller_batch(cluster, kind: str, drop_last: bool):
    data, model, more = list(make_loader(2 * N + 3)), make_net(), {}
    kept = data[:2] if drop_last else data
    if kind == "endless":
        more, kept = {"steps": 4}, list(itertools.islice(itertools.cycle(kept), 8))
    else:
        kept = kept * 2
    expected = train_plainly(model, kept)
    makes = {
        "loader": lambda: make_loader(2 * N + 3), "list": lambda: data,
        "generator": lambda: iter(data), "endless": lambda: itertools.cycle(data),
    }  # fmt: skip
    found = make_training(ONE, cluster)
    history = found.fit(makes[kind](), epochs=2, progress=False, drop_last=drop_last, **more)
    assert_same(found, history.losses, model, expected)
    assert sum(epoch.images for epoch in history.epochs) == sum(len(images) for images, _ in kept)


def test_batches_are_drawn_one_by_one_and_not_kept(cluster):
    alive, found, most = weakref.WeakSet[Tensor](), make_training(ONE, cluster), 0

    def draw_batches() -> Iterator[Batch]:
        nonlocal most
        for images, labels in itertools.cycle(make_loader(N)):
            own = images.clone()
            alive.add(own)
            assert found.steps >= count_drawn() - 1
            most = max(most, len(alive))
            yield own, labels

    numbers = itertools.count()

    def count_drawn() -> int:
        return next(numbers)

    history = found.fit(draw_batches(), epochs=3, progress=False, steps=4)
    assert [epoch.steps for epoch in history.epochs] == [4, 4, 4]
    assert most <= 3


def test_an_epoch_of_a_generator_goes_on_where_the_last_one_has_ended(cluster):
    data = list(make_loader(5 * N))
    model = make_net()
    expected = train_plainly(model, data)
    found = make_training(ONE, cluster)
    with pytest.warns(UserWarning, match="The batches have ended after 3 epochs"):
        history = found.fit(iter(data), epochs=4, progress=False, steps=2)
    assert_same(found, history.losses, model, expected)
    assert [epoch.steps for epoch in history.epochs] == [2, 2, 1]


def test_steps_end_an_epoch_of_batches_too(cluster):
    history = make_training(ONE, cluster).fit(list(make_loader(3 * N)), epochs=2, progress=False, steps=2)
    assert [epoch.steps for epoch in history.epochs] == [2, 2]


class Stream(IterableDataset):
    """Images whose number nobody knows before they have come."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(make_loader(3 * N).dataset)


def test_a_stream_behind_a_loader_has_as_many_steps_as_asked_for(cluster):
    data = DataLoader(Stream(), batch_size=N)
    assert len(make_training(ONE, cluster).fit(data, progress=False, steps=2).losses) == 2
    assert len(make_training(ONE, cluster).fit(data, progress=False).losses) == 3


# ---- after a break


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiles", "a pipeline"])
def test_it_goes_on_from_any_checkpoint_bit_by_bit(name: str, tmp_path: Path):
    """Before, between and after smaller steps; random draws, the optimiser's state and the rate among it."""
    plan = PLANS[name]
    images = SyntheticImages(2 * N + 2, SIZE, CLASSES)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        whole = make_training(plan, cluster, make_net(0.3))
        history = whole.fit(images, epochs=2, progress=False, save=tmp_path, save_every=1, keep=10)
        wanted = whole.state_dict()
        for done in range(1, 6):
            found = make_training(plan, cluster, make_net(0.3))
            path = next(path for path in tmp_path.iterdir() if path.name.endswith(f"-step-{done}"))
            assert found.load(path) == done
            rest = found.fit(images, epochs=1 + (done < 3), progress=False)
            assert rest.losses == history.losses[done:]
            for key, tensor in found.state_dict().items():
                assert torch.equal(tensor, wanted[key]), (done, key)


# ---- the command


@pytest.mark.nightly
@pytest.mark.parametrize("drop_last", [False, True], ids=["trained", "left out"])
def test_the_command(monkeypatch, capsys, drop_last: bool):
    monkeypatch.setitem(train_images._APPLICATIONS, "3", lambda *_: SyntheticImages(10, SIZE, 10))
    run_ranks(2, lambda world: run_train(world, [*FLAGS, *STAGES, *["--drop-last"] * drop_last]))
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["steps"], line["images_per_step"]) == (2 if drop_last else 3, 4)


@pytest.mark.nightly
def test_the_command_refuses_what_the_plan_cannot_divide(monkeypatch):
    monkeypatch.setitem(train_images._APPLICATIONS, "3", lambda *_: SyntheticImages(9, SIZE, 10))
    with pytest.raises(PlanError, match=r"The last step of an epoch has 1 images.*--drop-last"):
        run_ranks(2, lambda world: run_train(world, [*FLAGS, *STAGES]))


# ---- said before the first step


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["images", "list", "loader"])
def test_what_the_plan_cannot_divide_is_refused(kind: str):
    plan = PLANS["a pipeline"]
    data = {
        "images": SyntheticImages(N + 3, SIZE, CLASSES),
        "list": list(make_loader(N + 3)),
        "loader": make_loader(N + 3),
    }
    with Cluster(plan.ranks, backend="loopback") as cluster:
        found = make_training(plan, cluster)
        text = (
            r"The last step of an epoch has 3 images, for a step takes 4. This plan divides a step's images by 2 "
            r"\(parts=2\), which 3 is no multiple of. Leave them out .*drop_last=True.*, give 1 images less or 1 more"
        )
        with pytest.raises(PlanError, match=text):
            found.fit(data[kind], progress=False)
        assert found.steps == 0
        assert found.fit(data[kind], progress=False, drop_last=True).epochs[0].images == N


def test_a_model_that_cannot_take_so_few_is_refused(cluster):
    model = nn.Sequential(nn.Conv2d(3, 4, SIZE), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, CLASSES))
    found = make_training(ONE, cluster, model)
    with pytest.raises(TraceError, match=r"has 1 images.*drop_last=True.*Expected more than 1 value per channel"):
        found.fit(SyntheticImages(N + 1, SIZE, CLASSES), progress=False)
    assert found.steps == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "no batch"),
        (lambda: list(make_loader(N, 2)), r"images have shape \(2, 3, 8, 10\) but the training"),
        (lambda: make_loader(N, 2), r"images have shape \(2, 3, 8, 10\)"),
        (lambda: iter(make_loader(N, 2)), r"images have shape \(2, 3, 8, 10\)"),
        (lambda: [*make_loader(N), *make_loader(5, 5)], "Batch 1 has 5 images, but a step takes 4"),
        ([torch.zeros(SHAPE)], r"A batch must be a pair \(images, labels\)"),
        ([(torch.zeros(SHAPE), torch.zeros(N).long(), 1)], r"A batch must be a pair \(images, labels\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_another_size(cluster, data, text: str, drop_last: bool):
    """A plan of several batches is not to train on one of them, as if it were the last of an epoch."""
    found = make_training(ONE, cluster)
    with pytest.raises(ImageError, match=text):
        found.fit(data() if callable(data) else data, progress=False, drop_last=drop_last)
    assert found.steps == 0


def test_a_step_by_hand_takes_full_batches_only(cluster):
    with pytest.raises(ImageError, match=r"images have shape \(3, 3, 8, 10\)"):
        make_training(ONE, cluster).step(torch.zeros(3, 3, *SIZE), torch.zeros(3).long())


def test_an_iterator_cannot_go_back_to_a_checkpoint(cluster, tmp_path: Path):
    with pytest.raises(PlanError, match="an iterator gives each of them once"):
        make_training(ONE, cluster).fit(iter(make_loader(N)), steps=1, on_failure="heal", save=tmp_path)


def test_drop_last_is_true_or_false(cluster):
    with pytest.raises(PlanError, match="drop_last='no' must be True or False"):
        make_training(ONE, cluster).fit(make_loader(N), drop_last="no")


def test_ranks_hold_the_same_weights_in_a_smaller_step():
    """Where stages are balanced by cost, few images may cost otherwise; the ranks' weights are where they are."""
    from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
    from mpi4dl_nb.engines.train.train_loop import make_smaller_recipe

    plan = Plan(split_size=2, spatial_size=0)
    model = copy.deepcopy(make_net())
    made = prepare(model, plan, (64, 3, *SIZE))
    found = make_smaller_recipe(made, TraceCache(model, (64, 3, *SIZE), nn.CrossEntropyLoss()), 1)
    assert isinstance(found.plan.balance, tuple)
    assert found.step_specs["images"].shape[0] == 1


# ---- predictions of fewer images than a step has


@pytest.mark.nightly
def test_images_that_are_normed_by_their_neighbours_are_not_predicted_beside_copies(cluster):
    """A batch norm without running statistics; the last images of a step are followed by copies, which it would see."""
    model = nn.Sequential(
        nn.Conv2d(3, CLASSES, 3), nn.BatchNorm2d(CLASSES, track_running_stats=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).double()  # fmt: skip
    found, images = make_training(ONE, cluster, model), torch.randn(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(found.predict(images), model.eval()(images), rtol=1e-10, atol=1e-12)
    with pytest.raises(ImageError, match="a prediction of 3 images is exact only in one micro-batch, of 4 images"):
        found.predict(images[:3])
    with pytest.raises(ImageError, match="5 held-out images are no multiple of a step's 4"):
        found.fit(make_loader(N), progress=False, held_out=SyntheticImages(N + 1, SIZE, CLASSES))
    assert found.fit(make_loader(N), progress=False, held_out=SyntheticImages(N, SIZE, CLASSES)).epochs[0].held_out
    with pytest.raises(ImageError, match="3 held-out images are no multiple of a step's 4"):
        found.fit(make_loader(N), progress=False, held_out=Bad(N, [1]), on_bad_image="skip")
    cut = make_training(FLOAT64(split_size=1, spatial_size=0, parts=2), cluster, model)
    with pytest.raises(ImageError, match="A step is computed in 2 micro-batches"):
        cut.fit(make_loader(N), progress=False, held_out=SyntheticImages(N, SIZE, CLASSES))


@pytest.mark.nightly
def test_the_timeline_of_a_smaller_step_is_that_of_its_own_programs():
    """The cheapest fusion depends on the number of images, and the names of instructions on the fusion."""
    plan = Plan(split_size=1, slice_method="2x2", halo_d2=True, fused_layers="auto")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(resnet20_v1(), plan, cluster, (4, 3, 32, 32))
        training.fit([(torch.rand(n, 3, 32, 32), torch.zeros(n, dtype=torch.long)) for n in (4, 2)], progress=False)
        small = training.timeline()
        training.step(torch.rand(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))
        whole = training.timeline()
    assert {event.name for event in small.events} != {event.name for event in whole.events}
    for timeline in (small, whole):
        assert {event.name for event in timeline.events} <= timeline.layers.keys()
