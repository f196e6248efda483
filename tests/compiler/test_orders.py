"""What a rank holds while micro-batches are under way, and where sums of gradients begin."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler import compile as compiling
from mpi4dl_nb.engines.compiler.compile import compile_plan, make_buckets
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import Compute, SumGradients
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from tests.zoo import Chain


def prepare_recipe(**knobs: Any) -> Recipe:
    plan = Plan(**{"spatial_size": 0, "precision": "float64", **knobs})
    torch.manual_seed(0)
    return prepare(Chain(), plan, (plan.parts, 3, 8, 8))


def count_waiting_graphs(recipe: Recipe) -> list[list[Counter[int]]]:
    """Of each rank, before each step: how many micro-batches of each direction have local graphs that wait."""
    whole = {name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in recipe.step_specs.items()}

    def watch(world: LoopbackWorld) -> list[Counter[int]]:
        training, seen = RankTraining(world, recipe), []
        training.start(training.cut(whole))
        while not training.worker.done:
            seen.append(
                Counter(
                    training.program.directions[number]
                    for number, lane in training.worker.micro_batch_states.items()
                    if lane._graphs or lane._late
                )
            )
            training.worker.step()
        return seen

    return run_ranks(recipe.plan.ranks, watch)


@pytest.mark.parametrize("times", [1, 3])
def test_gems_holds_activations_of_one_batch(times: int):
    recipe = prepare_recipe(split_size=3, bidirectional=True, times=times, schedule="gems")
    for seen in count_waiting_graphs(recipe):
        assert max(sum(counts.values()) for counts in seen) == 1


def test_two_directions_hold_one_micro_batch_each():
    for seen in count_waiting_graphs(prepare_recipe(split_size=3, bidirectional=True, times=2)):
        assert max(max(counts.values(), default=0) for counts in seen) == 1


def test_1f1b_holds_no_more_than_there_are_stages_ahead():
    peaks = [
        max(counts[0] for counts in seen)
        for seen in count_waiting_graphs(prepare_recipe(split_size=3, parts=5, schedule="1f1b"))
    ]
    assert peaks == [3, 2, 1]


def test_fill_drain_holds_them_all():
    peaks = [max(counts[0] for counts in seen) for seen in count_waiting_graphs(prepare_recipe(split_size=3, parts=5))]
    assert peaks == [5, 5, 5]


def test_what_is_computed_again_is_not_held():
    for seen in count_waiting_graphs(prepare_recipe(split_size=2, parts=3, checkpoint_activations=True)):
        assert not any(seen)


def test_a_sum_begins_behind_the_last_gradient_in_it():
    recipe = prepare_recipe(split_size=2, parts=2, data_parallel=2)
    for program in compile_plan(recipe.graph, recipe.plan):
        back = [step for step in program.steps if step.phase is Phase.BACKWARD]
        for index, step in enumerate(back):
            if isinstance(step.instruction, SumGradients):
                later = [other.instruction for other in back[index:] if isinstance(other.instruction, Compute)]
                assert not _list_reads(later) & set(step.instruction.weights)
                assert _list_reads([back[index - 1].instruction]) & set(step.instruction.weights)


def _list_reads(segments: list[Any]) -> set[str]:
    return {ref.name for segment in segments for op in segment.ops for ref in op.arguments if hasattr(ref, "name")}


def test_more_sums_than_there_are_tags(monkeypatch: pytest.MonkeyPatch):
    graph = prepare_recipe(split_size=2, data_parallel=2).graph
    monkeypatch.setattr(compiling, "STAGE_TAGS", 4)
    with pytest.raises(PlanError, match="The gradients travel in 2 messages, and there are tags for 1"):
        compile_plan(graph, Plan(split_size=2, spatial_size=0, data_parallel=2, precision="float64"))


def test_sums_begin_before_backward_is_over():
    recipe = prepare_recipe(split_size=1, data_parallel=2)
    small = recipe.graph.weight_bytes // 3
    (program, _) = compile_plan(recipe.graph, recipe.plan)
    assert next(s.weights[0] for s in program.select_instructions(SumGradients)) == "model.17.bias", (
        "the last layer's come first"
    )
    found = make_buckets(recipe.graph, dict.fromkeys(recipe.graph.weights, (0, 1)), tag=8, bucket_bytes=small)
    assert len(found) >= 3
    assert sorted(name for each in found for name in each.weights) == sorted(recipe.graph.trainable)
    assert [each.tag for each in found] == [8 + 2 * index for index in range(len(found))]
    assert all(each.bytes >= small for each in found[:-1])
