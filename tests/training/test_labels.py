"""`labels`, and batches, that are not what a training takes: an example is taken for its shape, all else is refused."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.training.batches import cast_numbers

PLAN = Plan(split_size=1, slice_method="1x2", precision="float64")
SHAPE = (4, 3, 8, 12)
MASKS = torch.ones(4, 1, 8, 12, dtype=torch.float64)
SGD = partial(torch.optim.SGD, lr=0.1)


def make_pixel_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 1, 3, padding=1).double()


def make_one_logit_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)).double()


@pytest.fixture(scope="module")
def two():
    with Cluster(2, backend="loopback") as cluster:
        yield cluster


@pytest.mark.parametrize("labels", [MASKS, 0 * MASKS, TensorSpec((4, 1, 8, 12), "double")])
def test_an_example_tensor_says_shape_and_type_of_labels(two, labels: object):
    loss, plain = nn.BCEWithLogitsLoss(), make_pixel_net()
    training = Training(copy.deepcopy(plain), PLAN, two, SHAPE, loss, SGD, labels=labels)
    assert training.recipe.graph.inputs["labels"] == TensorSpec((4, 1, 8, 12), "float64")
    torch.manual_seed(1)
    images, masks = torch.randn(SHAPE, dtype=torch.float64), torch.rand_like(MASKS).round()
    optimiser = SGD(plain.parameters())
    for _ in range(2):
        optimiser.zero_grad()
        theirs = loss(plain(images), masks)
        theirs.backward()
        optimiser.step()
        assert training.step(images, masks) == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(training.state_dict()["weight"].double(), plain.weight.data, rtol=1e-12, atol=0)
    training.close()


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], (4, 1, 8, 12), "float32", TensorSpec((4,), "number")])
def test_labels_that_are_no_tensor_are_refused(two, labels: object):
    with pytest.raises(ImageError, match=r"must be an example tensor of the labels of one batch"):
        Training(make_pixel_net(), PLAN, two, SHAPE, nn.BCEWithLogitsLoss(), labels=labels)


class OneHot(nn.Module):
    """Takes (N, 1, H, W) class numbers, as MONAI's DiceCELoss(to_onehot_y=True) does."""

    def forward(self, answer: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim != answer.ndim:
            raise AssertionError(f"labels should have {answer.ndim} axes, got {labels.ndim}.")
        return (answer - labels).square().mean()


@pytest.mark.parametrize(
    ("model", "loss", "shape", "error"),
    [
        (make_one_logit_net, nn.BCEWithLogitsLoss(), r"\(4,\)", "ValueError: Target size"),
        (make_pixel_net, nn.BCEWithLogitsLoss(), r"\(4, 8, 12\)", "ValueError: Target size"),
        (make_pixel_net, OneHot(), r"\(4, 8, 12\)", "AssertionError: labels should have 4 axes, got 3"),
        (make_pixel_net, lambda answer, labels: (answer @ labels).mean(), r"\(4, 8, 12\)", "RuntimeError: "),
    ],
    ids=["one logit", "masks", "one-hot", "a function"],
)
def test_for_a_loss_that_does_not_take_the_labels_the_error_names_both_mends(two, model, loss, shape, error):
    with pytest.raises(TraceError) as caught:
        Training(model(), PLAN, two, SHAPE, loss)
    said = str(caught.value)
    assert re.search(rf"the loss fails with labels of shape {shape}, torch\.int64 \({error}", said), said
    assert "labels=torch.zeros(4, 1, 32, 32)" in said
    assert "loss=lambda p, y: loss(p, y[:, None].to(p.dtype))" in said


def test_both_mends_that_are_named_train(two):
    loss, made = nn.BCEWithLogitsLoss(), make_pixel_net()
    images, masks = torch.randn(SHAPE, dtype=torch.float64), torch.arange(4 * 96).view(4, 8, 12) % 2
    first = Training(made, PLAN, two, SHAPE, loss, labels=MASKS)
    other = Training(made, PLAN, two, SHAPE, lambda p, y: loss(p, y[:, None].to(p.dtype)))
    right = loss(made(images), masks[:, None].double()).item()
    assert first.step(images, masks[:, None]) == pytest.approx(right, rel=1e-12)
    assert other.step(images, masks) == pytest.approx(right, rel=1e-12)
    first.close()
    other.close()


@pytest.mark.parametrize(
    ("example", "labels", "text"),
    [
        (torch.uint8, torch.full((4, 8, 12), -1), "the number -1 as torch.int64, which does not fit into uint8"),
        (torch.uint8, torch.full((4, 8, 12), 300), "the number 300 as torch.int64"),
        (torch.int8, torch.full((4, 8, 12), 200, dtype=torch.uint8), "the number 200 as torch.uint8"),
        (torch.bool, torch.full((4, 8, 12), 2), "the number 2 as torch.int64, which does not fit into bool"),
    ],
)
def test_whole_numbers_do_not_wrap_around(example, labels, text: str):
    spec = TensorSpec((4, 8, 12), str(example).removeprefix("torch."))
    with pytest.raises(ImageError, match=text):
        cast_numbers("labels", labels, spec)
    assert torch.equal(cast_numbers("labels", torch.ones_like(labels), spec), torch.ones_like(labels).to(example))


def generated():
    for _ in range(2):
        yield torch.zeros(SHAPE), torch.zeros(4, 8, 12, dtype=torch.int64)


def test_what_is_no_batches_is_refused_before_any_step(two):
    torch.manual_seed(0)
    training = Training(nn.Conv2d(3, 2, 3, padding=1).double(), PLAN, two, SHAPE)
    for go in (training.fit, training.verify):
        with pytest.raises(PlanError, match=r"data is 'generated', a function, .* call it, generated\(\)\."):
            go(generated)
        with pytest.raises(PlanError, match="data is 'int', a int, which cannot be gone through"):
            go(7)
    with pytest.raises(PlanError, match="held_out is a list, but must be images that ranks read"):
        training.fit(generated(), progress=False, held_out=[])
    assert training.steps == 0
    assert len(training.fit(generated(), progress=False).losses) == 2
    training.close()
