"""Batches that an iterator gives in one buffer, again and again: each is trained as it was given."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import ImageError, PlanError, RankError
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.training import training as training_module
from mpi4dl_nb.training.batches import CachedBatches, copy_batch

PLAN = Plan(split_size=2, spatial_size=0, precision="float64")
SHAPE, COUNT = (2, 3, 6, 6), 4
IMAGES = torch.randn(COUNT, *SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([[0, 1], [2, 0], [1, 1], [2, 1]])
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, backend="loopback") as found:
        yield found


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def fill_tensors() -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = torch.empty_like(IMAGES[0]), torch.empty_like(LABELS[0])
    for number in range(COUNT):
        yield images.copy_(IMAGES[number]), labels.copy_(LABELS[number])


def fill_arrays() -> Iterator[list[np.ndarray]]:
    both = [np.empty(SHAPE), np.empty(2, dtype=np.int64)]
    for number in range(COUNT):
        both[0][:], both[1][:] = IMAGES[number].numpy(), LABELS[number].numpy()
        yield both


def fill_ring() -> Iterator[tuple[Tensor, np.ndarray]]:
    """Two buffers in turn, as of a loader that prefetches, and labels that are views of one array."""
    ring, labels = [torch.empty_like(IMAGES[0]) for _ in range(2)], np.empty((1, 2), dtype=np.int64)
    for number in range(COUNT):
        labels[0] = LABELS[number].numpy()
        yield ring[number % 2].copy_(IMAGES[number]), labels[0]


FILLS: list[Callable[[], Iterator[Any]]] = [fill_tensors, fill_arrays, fill_ring]


class Restarting:
    """An iterator that starts anew after its end, in another order, as DALI's do."""

    def __init__(self) -> None:
        self.images, self.order, self.done = torch.empty_like(IMAGES[0]), list(range(COUNT)), 0

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.done == COUNT:
            self.order, self.done = self.order[1:] + self.order[:1], 0
            raise StopIteration
        number = self.order[self.done]
        self.done += 1
        return self.images.copy_(IMAGES[number]), LABELS[number]


def train_in_one_process(epochs: int, data: Iterable[tuple[Tensor, Tensor]] | None = None) -> dict[str, Tensor]:
    model = make_model()
    optimiser = SGD(model.parameters())
    for _ in range(epochs):
        for images, labels in data or zip(IMAGES, LABELS, strict=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimiser.step()
    return model.state_dict()


def assert_trained(training: Training, epochs: int, data: Iterable[tuple[Tensor, Tensor]] | None = None) -> None:
    for name, wanted in train_in_one_process(epochs, data).items():
        torch.testing.assert_close(training.state_dict()[name], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_batch_is_trained_as_it_was_given(cluster, fill, epochs):
    training = Training(make_model(), PLAN, cluster, SHAPE, optimiser=SGD)
    training.fit(fill(), epochs=epochs, progress=False)
    assert_trained(training, epochs)


def test_an_iterator_that_starts_anew_gives_other_batches_in_each_epoch(cluster):
    training = Training(make_model(), PLAN, cluster, SHAPE, optimiser=SGD)
    history = training.fit(Restarting(), epochs=3, progress=False)
    assert len(history.losses) == 3 * COUNT
    assert_trained(training, epochs=3, data=Restarting())


def test_what_an_iterator_has_left_behind_is_not_made_up():
    cached = CachedBatches(Restarting())
    for epoch in (0, 1):
        assert sum(1 for _ in cached.iterate_epoch(epoch)) == COUNT
    assert sum(1 for _ in cached.iterate_epoch(1)) == COUNT
    with pytest.raises(PlanError, match=r"epoch 0 are needed again, .* has begun epoch 1"):
        list(cached.iterate_epoch(0))


def test_batches_to_go_back_to_are_those_that_were_given(cluster, tmp_path, monkeypatch):
    """A rank fails in the third step and loses its weights: the steps after the checkpoint are done again."""
    training = Training(make_model(), PLAN, cluster, SHAPE, optimiser=SGD)
    take, failed = training.take, []

    def fail_once(*batch: Any) -> Any:
        if training.steps == 2 and not failed:
            failed.append(True)
            cluster.call(_drop_training, training.name)
            raise RankError("lost", rank=0)
        return take(*batch)

    monkeypatch.setattr(training, "take", fail_once)
    training.fit(fill_tensors(), epochs=1, progress=False, save=tmp_path, save_every=100, on_failure="heal")
    assert failed
    assert_trained(training, epochs=1)


def _drop_training(host: Any, name: str) -> None:
    host.get_kept(RankTraining).pop(name)


def test_verify_takes_different_batches(cluster, monkeypatch):
    compared: list[Tensor] = []
    compare = training_module.compare_records

    def record_images(recipe: Any, model: Any, loss: Any, whole: Any, records: Any) -> Any:
        compared.extend(batch["images"] for batch in whole)
        return compare(recipe, model, loss, whole, records)

    monkeypatch.setattr(training_module, "compare_records", record_images)
    assert Training(make_model(), PLAN, cluster, SHAPE).verify(fill_tensors())["ok"]
    assert [torch.equal(found, wanted) for found, wanted in zip(compared, IMAGES, strict=False)] == [True] * 3


def test_a_debugged_step_keeps_its_batch(cluster):
    training = Training(make_model(), Plan(split_size=2, spatial_size=0, precision="float64"), cluster, SHAPE)
    wanted = nn.functional.cross_entropy(make_model()(IMAGES[0]), LABELS[0])
    images, labels = IMAGES[0].clone(), LABELS[0].clone()
    walk = training.stepping(images, labels)
    walk.phase()
    images.zero_(), labels.zero_()
    walk.restart()
    assert walk.finish() == pytest.approx(wanted.item(), rel=1e-12)


def test_a_copy_shares_nothing_with_the_batch():
    pair = namedtuple("pair", "images labels")
    array, tensor = np.ones((2, 3))[:, ::-1], torch.ones(2, 3, requires_grad=True)
    copied = copy_batch(pair(tensor, {"mask": array, "more": [(array, 3), "name", None]}))
    with torch.no_grad():
        tensor.zero_()
    array[:] = 0
    assert type(copied).__name__ == "pair"
    assert [copied.images.sum(), copied.labels["mask"].sum(), copied.labels["more"][0][0].sum()] == [6, 6, 6]
    assert copied.labels["more"][1:] == ["name", None]
    with pytest.raises(ImageError, match=r"a generator, which cannot be copied.*Give tensors"):
        copy_batch((tensor, (number for number in range(2))))
