"""The fullest moment of a rank: all bytes of the account belong to a layer, and those of small models are by hand."""

from __future__ import annotations

import pytest
from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.rank_memory import predict_plan_memory, predict_rank_memory

PLANS = [
    Plan(split_size=2),
    Plan(split_size=1, spatial_size=0),
    Plan(split_size=3, spatial_size=0, parts=4, schedule="zero_bubble"),
    Plan(split_size=2, slice_method="1x2", bidirectional=True, checkpoint_activations=True),
    Plan(split_size=1, slice_method="2x2", halo_d2=True, fused_layers=2, data_parallel=2),
]


def trace_graph(model: nn.Module, plan: Plan, shape: tuple[int, ...]):
    return TraceCache(model, shape, nn.CrossEntropyLoss()).get_graph(plan)


@pytest.fixture(scope="module")
def traces() -> TraceCache:
    return TraceCache(resnet20_v1(), (4, 3, 64, 64), nn.CrossEntropyLoss())


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.summary)
def test_layers_and_the_rest_are_the_peak_by_kind(plan, traces):
    traced = traces.get_graph(plan)
    found = predict_plan_memory(traced, plan, optimiser_states=2)
    assert len(found.ranks) == plan.replica_ranks
    for program, memory in zip(found.programs, found.ranks, strict=True):
        assert memory == predict_rank_memory(program, traced, plan, optimiser_states=2)
        moment, together = found.find_peak(program.rank), dict.fromkeys(memory.at_peak, 0)
        for kinds in (*moment.layers.values(), moment.rest):
            for kind, count in kinds.items():
                together[kind] += count
        assert together == dict(memory.at_peak)
        assert moment.place.step == program.steps[memory.peak_step]
        assert set(moment.rest) <= {"inputs", "messages", "gradients"}
    assert found.peak_bytes == max(memory.peak_bytes for memory in found.ranks)


def test_a_models_modules_are_named_whose_weights_and_results_they_are():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)])
    plan = Plan(split_size=1, spatial_size=0)
    moment = predict_plan_memory(trace_graph(model, plan, (2, 3, 16, 16)), plan).find_peak(0)
    assert list(moment.layers) == ["0", "2", "6"]
    pixels = 4 * 2 * 16 * 16  # bytes of a channel of two images
    assert moment.layers["0"]["activations"] == 4 * pixels  # ReLU's result; that of the convolution is let go
    assert moment.layers["0"]["weights"] == moment.layers["0"]["optimiser"] == 4 * (3 * 9 + 1) * 4
    assert moment.layers["2"]["activations"] == 8 * pixels  # what the pool makes of it has been read
    assert moment.layers["2"]["weights"] == 4 * (4 * 9 + 1) * 8
    assert moment.rest == {"inputs": 3 * pixels + 2 * 8}
    assert moment.bytes == sum(
        predict_plan_memory(trace_graph(model, plan, (2, 3, 16, 16)), plan).ranks[0].at_peak.values()
    )


def test_the_moment_is_said_in_the_users_words():
    plan = Plan(split_size=1, slice_method="1x2")
    found = predict_plan_memory(trace_graph(UNet(num_classes=3), plan, (1, 3, 64, 64)), plan)
    moment = found.find_peak(1)
    words = f"instruction {moment.step + 1} of {len(found.programs[1].steps)}, {moment.place.text}"
    assert moment.words == words
    assert moment.place.where
    sizes = [sum(kinds.values()) for _, kinds in moment.get_largest_layers(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == max(sum(kinds.values()) for kinds in moment.layers.values())
