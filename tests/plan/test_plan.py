"""Plans: what each asks for, and every way in which one is refused, with its numbers and the mend."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout


@pytest.mark.parametrize(
    ("choices", "summary"),
    [
        ({}, "2 stages: 2x2 tiles -> 1 rank; 5 ranks"),
        ({"split_size": 1, "spatial_size": 0}, "1 stage: 1 rank; 1 rank"),
        ({"split_size": 1, "spatial_size": 1}, "1 stage: 2x2 tiles; 4 ranks"),
        ({"split_size": 3, "spatial_size": 0}, "3 stages: 1 rank -> 1 rank -> 1 rank; 3 ranks"),
        ({"num_spatial_parts": 9}, "2 stages: 3x3 tiles -> 1 rank; 10 ranks"),
        ({"num_spatial_parts": 1}, "2 stages: 1 rank -> 1 rank; 2 ranks"),
        ({"slice_method": "vertical"}, "2 stages: 1x4 tiles -> 1 rank; 5 ranks"),
        ({"slice_method": "horizontal", "num_spatial_parts": 3}, "2 stages: 3x1 tiles -> 1 rank; 4 ranks"),
        ({"slice_method": "2x3"}, "2 stages: 2x3 tiles -> 1 rank; 7 ranks"),
        ({"slice_method": "2x3", "num_spatial_parts": 6}, "2 stages: 2x3 tiles -> 1 rank; 7 ranks"),
        (
            {"split_size": 3, "spatial_size": 2, "num_spatial_parts": (4, 2), "slice_method": "vertical"},
            "3 stages: 1x4 tiles -> 1x2 tiles -> 1 rank; 7 ranks",
        ),
        (
            {"split_size": 4, "spatial_size": 3, "slice_method": ("2x3", "square", "horizontal"),
             "num_spatial_parts": (6, 4, 2)},
            "4 stages: 2x3 tiles -> 2x2 tiles -> 2x1 tiles -> 1 rank; 13 ranks",
        ),
    ],
)  # fmt: skip
def test_plans_and_their_ranks(choices: dict[str, Any], summary: str):
    plan = Plan(**choices)
    assert plan.summary == summary
    assert plan.ranks == Layout.of(plan).size == sum(grid.tiles for grid in plan.grids)
    assert len(plan.grids) == plan.split_size


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more spatial stages than stages": (
        {"spatial_size": 3},
        (
            "spatial_size=3 asks for more spatial stages than the split_size=2 stages there are. "
            "Use spatial_size <= 2, or a larger split_size."
        ),
    ),
    "a grid of another number of tiles": (
        {"slice_method": "2x3", "num_spatial_parts": 4},
        "slice_method='2x3' makes 6 tiles but num_spatial_parts=4. Set num_spatial_parts=6, or leave it out.",
    ),
    "an unknown slice method": (
        {"slice_method": "diagonal"},
        "slice_method='diagonal' is unknown. Choose square, vertical, horizontal, depth, or a grid as 2x3 or 2x2x2.",
    ),
    "a grid that is a number": (
        {"slice_method": 4},
        "slice_method=4 is unknown. Choose square, vertical, horizontal, depth, or a grid as 2x3 or 2x2x2.",
    ),
    "a grid without rows": (
        {"slice_method": "0x3"},
        "slice_method='0x3' is unknown. Choose square, vertical, horizontal, depth, or a grid as 2x3 or 2x2x2.",
    ),
    "too many entries": (
        {"num_spatial_parts": (4, 2)},
        "num_spatial_parts=(4, 2) has 2 entries but spatial_size=1. Give one value for all, or exactly 1.",
    ),
    "too few entries": (
        {"split_size": 4, "spatial_size": 3, "slice_method": ("square", "2x3")},
        "slice_method=('square', '2x3') has 2 entries but spatial_size=3. Give one value for all, or exactly 3.",
    ),
    "an unknown schedule": (
        {"schedule": "gpipe"},
        "schedule='gpipe' is unknown. Choose one of fill_drain, 1f1b, interleaved, zero_bubble, gems.",
    ),
    "an unknown precision": (
        {"precision": "double"},
        "precision='double' is unknown. Choose one of float32, float64, bfloat16, float16.",
    ),
    "a word for a balance": (
        {"balance": "even"},
        "balance='even' must be 'auto' or a tuple of layers per stage, such as (20, 19).",
    ),
    "an empty stage": (
        {"balance": (3, 0)},
        "balance=(3, 0) must be 'auto' or a tuple of layers per stage, such as (20, 19).",
    ),
    "a balance of other stages": (
        {"balance": (3, 3, 3)},
        "balance=(3, 3, 3) names 3 stages but split_size=2. Give 2 numbers, or set split_size=3.",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_with_its_numbers(kind: str):
    choices, message = REFUSED[kind]
    with pytest.raises(PlanError) as caught:
        Plan(**choices)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["more spatial stages than stages", "too many entries",
                                  "a grid of another number of tiles", "a balance of other stages"])  # fmt: skip
def test_the_mend_that_a_message_names_mends(kind: str):
    mends = {
        "more spatial stages than stages": {"spatial_size": 2},
        "too many entries": {"num_spatial_parts": (4,)},
        "a grid of another number of tiles": {"num_spatial_parts": 6},
        "a balance of other stages": {"split_size": 3},
    }
    Plan(**{**REFUSED[kind][0], **mends[kind]})


COUNTS = (
    "split_size", "spatial_size", "num_spatial_parts", "parts", "times", "local_dp", "data_parallel", "fused_layers",
    "accumulate", "stages_per_rank",
)  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
def test_counts_are_whole_numbers(name: str, value: object):
    low = 0 if name == "spatial_size" else 1
    with pytest.raises(PlanError) as caught:
        Plan(**{name: value})
    assert str(caught.value) == f"{name}={value!r} must be a whole number of at least {low}."


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "spatial_size"])
def test_counts_are_at_least_one(name: str):
    with pytest.raises(PlanError, match=f"^{name}=0 must be a whole number of at least 1"):
        Plan(**{name: 0})


def test_a_count_inside_a_tuple_is_checked_too():
    with pytest.raises(PlanError, match=r"^num_spatial_parts=\(4, 0\) must be a whole number of at least 1"):
        Plan(split_size=3, spatial_size=2, num_spatial_parts=(4, 0))


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pairs of one direction": ({"times": 2}, {"bidirectional": True}, "times=2 .* bidirectional is off"),
    "GEMS one way": ({"schedule": "gems"}, {"bidirectional": True}, "schedule='gems' is an order of two directions"),
    "interleaved, one stage per rank": (
        {"schedule": "interleaved", "split_size": 3}, {"stages_per_rank": 2}, "'interleaved' with stages_per_rank=1",
    ),
    "stages per rank, not interleaved": (
        {"stages_per_rank": 2, "split_size": 3}, {"schedule": "interleaved"}, "'fill_drain' with stages_per_rank=2",
    ),
    "an odd stage": (
        {"schedule": "interleaved", "stages_per_rank": 2}, {"split_size": 3}, "the 1 stages .* 2 at a time",
    ),
    "two tiles with one set of statistics": (
        {"bidirectional": True, "sync_batchnorm": False}, {"sync_batchnorm": True}, "it has another tile",
    ),
    "nothing to share": ({"local_dp": 2, "spatial_size": 2}, {"spatial_size": 1}, "all 2 are spatial"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_knobs_that_contradict_each_other_are_refused_and_the_mend_works(kind: str):
    knobs, mend, told = CONTRADICTIONS[kind]
    with pytest.raises(PlanError, match=told):
        Plan(**knobs)
    Plan(**(knobs | mend))


def test_a_step_is_all_batches_of_all_replicas_and_directions():
    plan = Plan(parts=4, bidirectional=True, times=2, accumulate=3, data_parallel=2)
    assert (plan.replica_batches, plan.batches, plan.micro_batches) == (12, 24, 96)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32", "float64"])
def test_weights_are_never_held_in_half_precision(precision: str):
    assert Plan(precision=precision).held_in == ("float64" if precision == "float64" else "float32")


def test_errors_of_plans_are_value_errors_of_ours():
    assert issubclass(PlanError, ValueError)
    assert issubclass(PlanError, Mpi4dlError)


def test_a_plan_is_a_value():
    plan = Plan()
    with pytest.raises(FrozenInstanceError):
        plan.split_size = 3  # type: ignore[misc]
    assert replace(plan, split_size=3) == Plan(split_size=3)
    assert hash(plan) == hash(Plan())
    with pytest.raises(TypeError, match="positional"):
        Plan(3)  # type: ignore[misc]


def test_these_are_all_options():
    """An option that no code reads would be a promise: add its name here together with what reads it."""
    assert {field.name for field in fields(Plan)} == {
        *COUNTS, "slice_method", "balance", "bidirectional", "halo_d2", "schedule", "precision",
        "checkpoint_activations", "offload_activations", "compile_segments", "sync_batchnorm", "overlap_halos",
        "attention_keys",
    }  # fmt: skip


@given(rows=st.integers(1, 40), cols=st.integers(1, 40))
def test_any_grid_can_be_written_down(rows: int, cols: int):
    (grid,) = Plan(split_size=1, spatial_size=1, slice_method=f"{rows}x{cols}").grids
    assert (grid.rows, grid.cols) == (rows, cols)


@given(count=st.integers(1, 200))
def test_any_number_of_tiles_has_a_grid_whose_sides_are_closest(count: int):
    plan = Plan(num_spatial_parts=count)
    assert plan.ranks == count + 1
    rows, cols = plan.grids[0]
    assert rows * cols == count
    assert not any(count % side == 0 for side in range(rows + 1, math.isqrt(count) + 1))
    if math.isqrt(count) ** 2 == count:  # a square stays one, whatever the image
        assert plan.fit((64, 4096)) == plan
        assert rows == cols
