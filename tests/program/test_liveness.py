"""Runtime and forecast free values by one rule: what is wrong in it is wrong, and seen, in both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory
from mpi4dl_nb.engines.program.program import DirectionProgram, LiveValues
from mpi4dl_nb.engines.train.recipe import prepare
from tests.predict.measured import measure_live_bytes

PLAN = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical")


def measure_peaks(plan: Plan = PLAN) -> list[tuple[int, int]]:
    """Of each rank, the bytes that live at the peak of a step, measured and forecast.

    Only the head is trained, so that nothing but the readers in the forward pass keeps an activation.
    """
    model = resnet20_v1().requires_grad_(False)
    model.head.requires_grad_(True)
    recipe = prepare(model, plan, (2, 3, 64, 64))
    return [
        (each.peak_bytes, predict_rank_memory(each.program, recipe.graph, plan).peak_bytes)
        for each in measure_live_bytes(recipe)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(DirectionProgram, "last_reads", {}), (LiveValues, "release_read", lambda self, instruction: None)],
)
def test_a_value_that_is_never_freed_is_held_by_ranks_and_in_the_forecast(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: object
):
    right = measure_peaks()
    monkeypatch.setattr(owner, name, fault)
    wrong = measure_peaks()
    for (measured, forecast), (more_measured, more_forecast) in zip(right, wrong, strict=True):
        assert more_measured > measured
        assert more_forecast > forecast


def test_a_value_that_is_freed_too_early_is_missed(monkeypatch: pytest.MonkeyPatch):
    first = property(lambda self: {readers[0]: (name,) for name, readers in self.reads.items()})
    monkeypatch.setattr(DirectionProgram, "last_reads", first)
    with pytest.raises(KeyError):
        measure_peaks()


@pytest.mark.nightly
def test_recomputation_keeps_nothing_of_what_is_not_computed_again():
    kept, recomputed = measure_peaks(), measure_peaks(replace(PLAN, checkpoint_activations=True))
    for (measured, forecast), (measured_again, forecast_again) in zip(kept, recomputed, strict=True):
        assert measured_again <= 1.01 * measured
        assert forecast_again <= 1.01 * forecast
