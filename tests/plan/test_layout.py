"""Layouts: which rank holds which tile of which stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout, Role, check_fits

grids = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3)


def make_plan(spatial: list[tuple[int, int]], plain: int) -> Plan:
    methods = tuple(f"{rows}x{cols}" for rows, cols in spatial)
    return Plan(split_size=len(spatial) + plain, spatial_size=len(spatial), slice_method=methods)


@pytest.mark.parametrize(
    ("plan", "picture"),
    [
        (make_plan([(2, 2)], 1), ["0 1 2 3", "4"]),
        (make_plan([(2, 3), (1, 2)], 2), ["0 1 2 3 4 5", "6 7", "8", "9"]),
        (make_plan([], 3), ["0", "1", "2"]),
        (make_plan([(1, 2), (2, 1)], 1), ["0 1", "2 3", "4"]),
    ],
    ids=["4 tiles, then one rank", "two repartitions", "stages alone", "strips the other way"],
)
def test_ranks_in_stage_order(plan: Plan, picture: list[str]):
    assert [" ".join(map(str, stage.ranks)) for stage in Layout.of(plan).stages] == picture


@given(spatial=grids, plain=st.integers(1, 3))
def test_every_rank_has_one_role_and_every_role_one_rank(spatial: list[tuple[int, int]], plain: int):
    layout = Layout.of(make_plan(spatial, plain))
    sizes = [rows * cols for rows, cols in spatial] + [1] * plain
    assert list(layout.roles) == [(Role(stage, tile),) for stage, tiles in enumerate(sizes) for tile in range(tiles)]
    assert layout.size == len(layout.roles) == sum(sizes)


@given(spatial=grids, plain=st.integers(1, 3))
def test_the_ranks_of_a_stage_are_its_tiles_in_order(spatial: list[tuple[int, int]], plain: int):
    layout = Layout.of(make_plan(spatial, plain))
    assert [rank for stage in layout.stages for rank in stage.ranks] == list(range(layout.size))
    for index, stage in enumerate(layout.stages):
        assert len(stage.ranks) == stage.grid.tiles
        assert stage.grid == (Grid(*spatial[index]) if index < len(spatial) else Grid(1, 1))
        assert [layout.roles[rank] for rank in stage.ranks] == [(Role(index, t),) for t in range(len(stage.ranks))]


def test_a_cluster_of_another_size_is_refused_with_both_numbers():
    plan = make_plan([(2, 2), (1, 2)], 1)
    check_fits(plan, 7)
    for engines in (6, 8):
        with pytest.raises(PlanError) as caught:
            check_fits(plan, engines)
        assert str(caught.value) == (
            f"The plan needs 7 ranks (4 + 2 + 1 over 3 stages), but there are {engines}. "
            "Start 7 ranks, or change split_size, spatial_size or num_spatial_parts."
        )


@pytest.mark.parametrize(
    ("knobs", "picture"),
    [
        ({"split_size": 3, "spatial_size": 0, "bidirectional": True}, ["0 | 1 | 2", "2 | 1 | 0"]),
        ({"split_size": 2, "bidirectional": True}, ["0 1 2 3 | 4", "4 3 2 1 | 0"]),
        ({"split_size": 2, "num_spatial_parts": 1, "local_dp": 2}, ["0 | 1 2"]),
        ({"split_size": 2, "num_spatial_parts": 1, "data_parallel": 3}, ["0 | 1", "2 | 3", "4 | 5"]),
        (
            {"split_size": 5, "slice_method": "1x2", "schedule": "interleaved", "stages_per_rank": 2},
            ["0 1 | 2 | 3 | 2 | 3"],
        ),
    ],
    ids=["mirrored", "mirrored tiles", "shares", "replicas", "stages in turns"],
)
def test_copies_of_the_model(knobs: dict[str, object], picture: list[str]):
    pipes = Layout.of(Plan(**knobs)).pipes
    assert [" | ".join(" ".join(map(str, stage.ranks)) for stage in pipe.stages) for pipe in pipes] == picture


def test_a_rank_of_two_directions_has_a_role_in_each():
    layout = Layout.of(Plan(split_size=2, bidirectional=True))
    assert layout.roles[1] == (Role(0, 1), Role(0, 3, direction=1))
    assert layout.roles[4] == (Role(1, 0), Role(0, 0, direction=1))
