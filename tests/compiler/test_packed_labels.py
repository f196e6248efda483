"""Labels of several tasks in one tensor: each plane is held against the classes of the loss that takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.compiler.labels import find_invalid_labels, find_label_specs
from mpi4dl_nb.engines.errors import ImageError, LossError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace

SHAPE = 2, 3, 8, 12
PIXEL_CLASSES, IMAGE_CLASSES = 3, 5
Loss = Callable[[tuple[Tensor, Tensor], Tensor], Tensor]


class TwoTasks(nn.Module):
    """A class of each pixel, and one of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.pixels, self.image = nn.Conv2d(4, PIXEL_CLASSES, 1), nn.Linear(4, IMAGE_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x).relu()
        return self.pixels(y), self.image(y.mean((2, 3)))


def add_losses(o: tuple[Tensor, Tensor], pixels: Tensor, image: Tensor) -> Tensor:
    return F.cross_entropy(o[0], pixels.long(), ignore_index=7) + F.cross_entropy(o[1], image[:, 0, 0].long())


WAYS: dict[str, Loss] = {
    "index": lambda o, y: add_losses(o, y[:, 0], y[:, 1]),
    "unbind": lambda o, y: add_losses(o, *y.unbind(1)),
    "chunk": lambda o, y: add_losses(o, *(each.squeeze(1) for each in y.chunk(2, 1))),
    "split": lambda o, y: add_losses(o, *(each.flatten(1, 2) for each in y.split([1, 1], 1))),
    "narrow": lambda o, y: add_losses(o, y.narrow(1, 0, 1).squeeze(1), y.movedim(1, 0)[1]),
    "index_select": lambda o, y: add_losses(o, *(y.index_select(1, torch.tensor([n])).squeeze(1) for n in (0, 1))),
}


def make_labels(pixel: int = 2, image: int = 4, count: int = 2) -> Tensor:
    """(count, 2, H, W): classes of pixels in plane 0, those of images in plane 1; the last image has the largest."""
    labels = torch.zeros(count, 2, *SHAPE[2:], dtype=torch.int64)
    labels[-1, 0, 3, 5], labels[-1, 1] = pixel, image
    return labels


@pytest.mark.parametrize("name", WAYS)
def test_each_plane_has_its_own_classes(name: str):
    labels = make_labels()
    graph = trace(TwoTasks(), WAYS[name], TensorSpec(SHAPE, "float32"), TensorSpec(tuple(labels.shape), "int64"))
    assert [(spec.classes, spec.ignored) for spec in find_label_specs(graph)] == [(3, 7), (5, -100)]

    def find_wrong(labels: Tensor) -> list[tuple[int, list[int]]]:
        return [(spec.classes, sorted({*wrong.tolist()})) for spec, wrong in find_invalid_labels(graph, labels)]

    assert find_wrong(labels) == []
    assert find_wrong(make_labels(pixel=7)) == []
    assert find_wrong(make_labels(pixel=3)) == [(3, [3])]
    assert find_wrong(make_labels(image=5)) == [(5, [5])]
    # A step has several micro-batches, and the trace is of one.
    assert find_wrong(make_labels(image=5, count=6)) == [(5, [5])]


def test_amounts_in_another_plane_are_no_classes():
    def compute_loss(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(o[0], y[:, 0].long()) + F.mse_loss(o[1], y[:, 1, 0, :IMAGE_CLASSES])

    labels = make_labels().double()
    labels[:, 1] = -40.5
    graph = trace(TwoTasks(), compute_loss, TensorSpec(SHAPE, "float64"), TensorSpec(tuple(labels.shape), "float64"))
    assert list(find_invalid_labels(graph, labels)) == []
    assert [spec.classes for spec, _ in find_invalid_labels(graph, make_labels(pixel=3).double())] == [3]


PLANS = {
    "tiles": Plan(split_size=1, slice_method="2x1", precision="float64"),
    "micro-batches": Plan(split_size=2, spatial_size=0, parts=2, precision="float64"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_takes_the_labels_of_both_tasks(name: str):
    plan, images = PLANS[name], torch.randn(SHAPE, dtype=torch.float64)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        model = TwoTasks().double()
        training = Training(model, plan, cluster, SHAPE, loss=WAYS["index"], labels=make_labels())
        assert training.verify()["ok"]
        expected = WAYS["index"](model(images), make_labels()).detach()
        assert training.step(images, make_labels()) == pytest.approx(float(expected), rel=1e-12)
        with pytest.raises(ImageError, match=r"A label is 3, but the loss takes numbers of 3 classes \(0 to 2\)"):
            training.step(images, make_labels(pixel=3))
        with pytest.raises(ImageError, match=r"A label is 5, but the loss takes numbers of 5 classes \(0 to 4\)"):
            training.fit([(images, make_labels(image=5))])


def test_a_plane_without_a_label_that_counts_is_reported():
    """The labels of the other task do not count for it."""
    plan = Plan(split_size=1, spatial_size=0)

    def compute_loss(o: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        ignored = F.cross_entropy(o[0], y[:, 0], ignore_index=2)
        return ignored + F.cross_entropy(o[1], y[:, 1, 0, 0])

    labels = make_labels()
    labels[:, 0] = 2
    with Cluster(1, backend="loopback") as cluster:
        training = Training(TwoTasks(), plan, cluster, SHAPE, loss=compute_loss, labels=labels)
        with pytest.raises(LossError, match="No label of the batch counts: all are 2, which the loss ignores"):
            training.step(torch.randn(SHAPE), labels)
