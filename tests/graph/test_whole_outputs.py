"""A loss is given what a loop of one's own gives it: the whole output of the model, and its logits only if it must."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph import trace as traces
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.outputs import call_loss, get_prediction, merge_outputs
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from tests.exact import assert_exact, make_whole_numbers, with_whole_weights

SHAPE = 2, 3, 8, 10


@dataclass
class Heads:
    aux: Tensor
    logits: Tensor


class Record(dict[str, Any]):
    """A mapping whose entries are attributes too, as the outputs of transformers are."""

    __getattr__ = dict.__getitem__


class Box:
    def __init__(self, aux: Tensor, logits: Tensor) -> None:
        self.aux, self.logits = aux, logits


KINDS: dict[str, Callable[..., Any]] = {
    "dataclass": Heads,
    "named tuple": namedtuple("Pair", ["aux", "logits"]),
    "mapping": Record,
    "object": Box,
    "namespace": SimpleNamespace,
}


class TwoHeads(nn.Module):
    def __init__(self, kind: str, classes: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.aux, self.logits = nn.Conv2d(4, classes, 3, padding=1), nn.Conv2d(4, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.stem(x))
        return KINDS[self.kind](aux=self.aux(y), logits=self.logits(y))


def compute_weighted_sum(o: Any, y: Tensor) -> Tensor:
    return ((2 * o.logits + o.aux) * y).sum()


def unpack_and_sum(o: Any, y: Tensor) -> Tensor:
    aux, logits = o
    return ((2 * logits + aux) * y).sum()


def compute_both_losses(o: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(o.logits + 0.4 * o.aux, y) + 0.4 * F.cross_entropy(o.aux, y)


PLANS = {
    "tiles": Plan(split_size=1, slice_method="2x2", precision="float64"),
    "stages": Plan(split_size=2, spatial_size=0, precision="float64"),
    "micro-batches": Plan(split_size=2, spatial_size=1, slice_method="1x2", parts=2, precision="float64"),
    "replicas": Plan(split_size=1, spatial_size=0, data_parallel=2, precision="float64"),
    "two directions": Plan(split_size=2, spatial_size=0, bidirectional=True, precision="float64"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_all_heads_trains_all_heads(kind: str):
    images, labels = make_whole_numbers(*SHAPE), make_whole_numbers(2, 4, 8, 10, seed=1)
    model = with_whole_weights(TwoHeads(kind))
    graph = trace(model, compute_weighted_sum, TensorSpec(SHAPE, "float64"), TensorSpec(labels.shape, "float64"))
    assert {"model.aux.weight", "model.logits.weight"} < graph.trainable
    assert len(graph.answers) == 2
    assert graph.left_out == ()
    assert_exact(model, images, PLANS["tiles"], labels, compute_weighted_sum)


def test_an_output_is_unpacked_in_the_loss():
    images, labels = make_whole_numbers(*SHAPE), make_whole_numbers(2, 4, 8, 10, seed=1)
    assert_exact(with_whole_weights(TwoHeads("named tuple")), images, PLANS["stages"], labels, unpack_and_sum)


def test_the_prediction_is_still_the_logits():
    """The accuracy of a step is that of the logits, wherever they stand in the output."""
    labels = TensorSpec((2, 8, 10), "int64")
    graph = trace(TwoHeads("dataclass"), compute_both_losses, TensorSpec(SHAPE, "float32"), labels)
    (made,) = (node for node in graph.nodes if node.name == graph.prediction)
    assert made.module == "logits"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_the_reference_gives_the_loss_the_whole_too(name: str):
    plan = PLANS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Cluster(plan.ranks, backend="loopback") as cluster:
            training = Training(TwoHeads("dataclass"), plan, cluster, (4, 3, 8, 10), loss=compute_both_losses)
            assert training.verify()["ok"]


def test_a_head_without_a_gradient_is_found_by_verify(monkeypatch: pytest.MonkeyPatch):
    """If a trace gave the logits to a loss that takes all, the reference would not do the same."""

    def give_logits(loss: Callable[..., Any], answer: Any, labels: Any) -> tuple[Any, Any]:
        return loss(get_prediction(answer), labels), get_prediction(answer)

    def compute_sum(o: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(o if isinstance(o, Tensor) else o.logits + 0.4 * o.aux, y)

    monkeypatch.setattr(traces, "call_loss", give_logits)
    with Cluster(1, backend="loopback") as cluster:
        plan = Plan(split_size=1, spatial_size=0, precision="float64")
        with pytest.warns(UserWarning, match="it is given the logits"):
            training = Training(TwoHeads("dataclass"), plan, cluster, SHAPE, loss=compute_sum)
        assert not training.verify()["ok"]


def test_the_logits_alone_are_given_with_one_sentence():
    with Cluster(1, backend="loopback") as cluster:
        with pytest.warns(UserWarning, match="The loss takes a tensor") as caught:
            training = Training(TwoHeads("dataclass"), Plan(split_size=1, spatial_size=0), cluster, SHAPE)
        (said,) = [str(each.message) for each in caught]
        assert said.startswith("The loss takes a tensor, and not all that the model returns: it is given the logits.")
        assert "The other tensor (aux) counts nothing in the training." in said
        assert training.verify()["ok"]
        training.step(torch.randn(SHAPE), torch.zeros(2, 8, 10, dtype=torch.int64))


def test_the_reference_of_a_loss_of_the_whole_batch_gives_it_the_logits_too():
    """A mean over the pixels that are not ignored is no mean of micro-batches' means."""

    def compute_foreground_loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, ignore_index=0)

    plan = Plan(split_size=1, slice_method="1x2", parts=2)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        with pytest.warns(UserWarning, match="it is given the logits"):
            training = Training(TwoHeads("dataclass"), plan, cluster, (4, 3, 8, 10), loss=compute_foreground_loss)
        assert training.verify()["ok"]


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "another name": (lambda o, y: F.cross_entropy(o.logit, y), "'Heads' object has no attribute 'logit'"),
    "no attribute of a tensor": (
        lambda o, y: F.cross_entropy(o.logits.scores if isinstance(o, Heads) else o, y),
        "Tensor' object has no attribute 'scores'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_loss_of_all_is_reported_as_its_own(name: str):
    loss, told = FAULTS[name]
    specs = TensorSpec(SHAPE, "float32"), TensorSpec((2, 8, 10), "int64")
    with pytest.raises(TraceError, match=told):
        trace(TwoHeads("dataclass"), loss, *specs)


def test_a_missing_name_of_a_mapping_is_no_reason_to_pick_the_logits():
    def take(o: Mapping[str, Tensor], y: Tensor) -> Tensor:
        return o["scores"] if isinstance(o, dict) else o.sum()

    with pytest.raises(KeyError, match="scores"):
        call_loss(take, {"logits": torch.ones(1)}, None)
    value, given = call_loss(lambda o, y: o[:, 0].sum(), {"logits": torch.ones(2, 3)}, None)
    assert float(value) == 2
    assert isinstance(given, Tensor)


def test_objects_of_micro_batches_are_merged():
    merged = merge_outputs([Box(torch.zeros(1, 2), torch.ones(1, 3)), Box(torch.ones(1, 2), torch.zeros(1, 3))])
    assert merged.aux.tolist() == [[0, 0], [1, 1]]
    assert merged.logits.shape == (2, 3)


def test_held_out_images_need_a_loss_of_the_prediction_alone():
    def take_either(o: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(o if isinstance(o, Tensor) else o.logits + o.aux, y)

    batches = [(torch.randn(SHAPE), torch.zeros(2, 8, 10, dtype=torch.int64))]

    images = SyntheticImages(2, (8, 10), 4)
    with Cluster(1, backend="loopback") as cluster:
        training = Training(TwoHeads("dataclass"), Plan(split_size=1, spatial_size=0), cluster, SHAPE, loss=take_either)
        with pytest.raises(TraceError, match="takes the whole Heads that the model answers with, but held-out images"):
            training.fit(batches, held_out=images)
