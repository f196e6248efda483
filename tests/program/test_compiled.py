"""Segments that `torch.compile` makes one function of: what one process computes, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.bench.step import bench_compiled
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.rank_scheduler import RankScheduler
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, verify
from tests.zoo import Chain, Segmenter, Skips

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch by torch, when it compiles

SHAPE = (4, 3, 20, 20)
CASES = {
    "tiles, halos meanwhile": (Skips, Plan(split_size=1, slice_method="2x1", overlap_halos=True)),
    "tiles to the loss, fused halos": (
        Segmenter,
        Plan(split_size=1, slice_method="1x2", halo_d2=True, fused_layers=2),
    ),
    "1F1B behind tiles, again, in a file": (
        Chain,
        Plan(
            split_size=2,
            slice_method="1x2",
            parts=2,
            schedule="1f1b",
            checkpoint_activations=True,
            offload_activations=True,
        ),
    ),
    "both ways, replicas": (Chain, Plan(split_size=2, spatial_size=0, bidirectional=True, data_parallel=2)),
    "zero bubble, shared batch": (
        Skips,
        Plan(split_size=2, slice_method="1x2", local_dp=2, parts=2, schedule="zero_bubble"),
    ),
    "half precision": (Chain, Plan(split_size=1, slice_method="1x2", precision="bfloat16")),
}


def prepare_recipe(model: nn.Module, plan: Plan) -> Recipe:
    changed = {"compile_segments": True, "precision": "float64" if plan.precision == "float32" else plan.precision}
    return prepare(model, Plan(**plan.chosen | changed), SHAPE, device="cpu")


def run_ranks(size: int, work: Callable[[World], Any]) -> list[Any]:
    """In turn, in one thread: torch does not compile in several at once, which ranks are not in but here."""
    relay = RankScheduler(size)
    return relay.run([partial(work, world) for world in relay.worlds])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))  # whole segments, not parts of them
    make, plan = CASES[name]
    torch.manual_seed(0)
    model = make()
    recipe = prepare_recipe(model, plan)
    found = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), 0))[0]
    assert found["ok"], found


def list_functions(model: nn.Module, plan: Plan) -> list[object]:
    """Of each segment of rank 0 what is called, None where it is not compiled."""
    recipe = prepare_recipe(model, plan)
    worker = run_ranks(plan.ranks, lambda world: RankTraining(world, recipe).worker)[0]
    return [getattr(segment, "function", None) for segment in worker.runtime.segments.values()]


def test_what_draws_is_not_compiled():
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    assert list_functions(nn.Sequential(*layers), Plan(split_size=1, spatial_size=0)) == [None]


def test_what_does_the_same_is_compiled_once():
    found = list_functions(Chain(), Plan(split_size=1, slice_method="1x2"))
    assert 1 < len({id(function) for function in found if function is not None}) <= len(found) / 2


def test_a_missing_compiler_is_reported_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match=r"there is no no-such-compiler here.*compile_segments=False"):
        prepare_recipe(Chain(), Plan(split_size=1, spatial_size=0))


class Refused(torch.autograd.Function):
    """As if backward could not be compiled, which torch tries when it comes to it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        refuse()


def refuse(*values):
    raise torch._dynamo.exc.TorchDynamoException("not that one.\nbecause")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_cannot_be_compiled_is_named(backward: bool, monkeypatch: pytest.MonkeyPatch):
    def compile_graph(graph, dynamic):
        return (lambda *values: [Refused.apply(made) for made in graph(*values)]) if backward else refuse

    monkeypatch.setattr(torch, "compile", compile_graph)
    recipe = prepare_recipe(Chain(), Plan(split_size=1, spatial_size=0))

    def work(world):
        training = RankTraining(world, recipe)
        training.step(training.cut(make_batches(recipe, 0, steps=1)[0]))

    told = r"segment \S+ cannot be compiled: TorchDynamoException: not that one. Set compile_segments=False."
    with pytest.raises(RankError, match=told):
        run_ranks(1, work)


@pytest.mark.nightly
def test_a_process_that_compiles_has_no_others_for_it():
    asked = "import mpi4dl_nb.engines.train.training, torch._inductor.config as config; print(config.compile_threads)"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    told = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "1\n"


@pytest.mark.nightly
def test_whether_it_pays_is_measured():
    recipe = prepare(Chain(), Plan(split_size=1, spatial_size=0), SHAPE, device="cpu")
    line = run_ranks(1, lambda world: bench_compiled(world, recipe, 2, 0))[0]
    assert min(line["first_s"], line["compiled_step_s"]) > 0  # the first is short where a compiler's cache is warm
    assert line["ratio"] == pytest.approx(line["step_s"] / line["compiled_step_s"], rel=0.05)
