"""What stock models answer with: tensors, tuples, mappings and dataclasses, and losses that take them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.compiler.stages import find_layers
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.outputs import collect_tensors, get_prediction
from mpi4dl_nb.engines.graph.trace import infer_output_spec, trace
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.exact import assert_exact, make_whole_numbers, with_whole_weights


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


Pair = namedtuple("Pair", ["logits", "features"])


class Answers(nn.Module):
    """Two convolutions, both of which `wrap` puts into the answer."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.wrap(y, self.second(F.relu(y)))


LOGITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, z: z,
    "dataclass": lambda y, z: Output(z, (y,)),
    "dict": lambda y, z: {"hidden": y, "logits": z},
    "ordered dict": lambda y, z: OrderedDict(hidden=y, logits=z),
    "named tuple": lambda y, z: Pair(features=y, logits=z),
    "the only one of a list": lambda y, z: [z],
    "the only one of a dataclass of another name": lambda y, z: {"out": (None, z), "scale": 1.0},
}


@pytest.mark.parametrize("name", LOGITS)
def test_the_logits_are_the_prediction(name: str):
    y, z = torch.ones(1), torch.zeros(1)
    assert get_prediction(LOGITS[name](y, z)) is z


@pytest.mark.parametrize("name", LOGITS)
def test_stock_losses_take_it(name: str):
    model, images = Answers(LOGITS[name]), TensorSpec((1, 3, 8, 8), "float32")
    assert infer_output_spec(model, images).shape == (1, 4, 8, 8)
    graph = prepare(model, Plan(split_size=1), images.shape).graph
    assert graph.specs[graph.prediction].shape == (1, 4, 8, 8)
    assert graph.nodes[-1].operator == "aten.cross_entropy_loss.default"


def test_places_of_tensors():
    found = collect_tensors({"out": [torch.ones(1), None], "more": Output(torch.zeros(1)), "name": "x"})
    assert list(found) == ["out.0", "more.logits"]


def compute_deep_supervision(prediction: Any, labels: Tensor) -> Tensor:
    """Of everything that the model answers, the first counting most."""
    return torch.stack([(each - labels).square().sum() / 2**index for index, each in enumerate(prediction)]).sum()


SEVERAL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the last layer's first": lambda y, z: [z, y],
    "the first layer's first": lambda y, z: (y, z),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("split", [1, 2])
def test_several_answers_go_to_a_loss_that_takes_them(name: str, split: int):
    """Deep supervision: the loss begins behind the last of them, whichever was made first."""
    model, images, labels = (
        Answers(SEVERAL[name]),
        make_whole_numbers(1, 3, 8, 10),
        make_whole_numbers(1, 4, 8, 10, seed=1),
    )
    graph = trace(
        model, compute_deep_supervision, TensorSpec(images.shape, "float64"), TensorSpec(labels.shape, "float64")
    )
    assert [layer.name for layer in find_layers(graph)] == ["first", "second"]
    assert len(graph.answers) == 2
    plan = Plan(split_size=split, spatial_size=split, num_spatial_parts=4, precision="float64")
    assert_exact(with_whole_weights(model), images, plan, labels, compute_deep_supervision)


def test_several_answers_and_a_loss_of_one_tensor():
    told = (
        r"answers with a tuple of 2 tensors \(0, 1\), none of them called logits, and the loss does not take it .*Give"
    )
    with pytest.raises(TraceError, match=told):
        prepare(Answers(lambda y, z: (y, z)), Plan(split_size=1), (1, 3, 8, 8))


class Hidden:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (lambda y, z: Hidden(z), r"answers with a Hidden, in which no tensor can be found\. Let it return a tensor,"),
        (lambda y, z: (z, {"more": Hidden(y)}), "answers with a Hidden, in which no tensor"),
        (lambda y, z: None, "answers with no tensor: there is nothing to train"),
        (lambda y, z: {"features": []}, "answers with no tensor: there is nothing to train"),
    ],
)
def test_answers_without_tensors_are_refused(wrap: Callable[[Tensor, Tensor], Any], told: str):
    with pytest.raises(TraceError, match=told):
        prepare(Answers(wrap), Plan(split_size=1), (1, 3, 8, 8))
