"""What a page is told of a plan: the blocks of the ranks, their loads in words, and the gauges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpi4dl_nb.draw.plan_picture import (
    BLOCK_COLUMNS,
    MOST_BLOCKS,
    MOST_COPIES,
    count_plan,
    describe_load_groups,
    get_side,
    measure_gauges,
    resize_shape,
)
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.predict.forecast import RankLoad, forecast
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.program.program import Traffic
from mpi4dl_nb.engines.train.recipe import prepare
from tests.unpacking import unpack_tables

LIMIT = 1000
MACHINE = replace(MACHINES["Summit"], name="tiny", memory_bytes=LIMIT)


def read_blocks(found) -> list[tuple[int, ...]]:
    *columns, _, sides = (unpack_tables(found.blocks)[name].tolist() for name in BLOCK_COLUMNS)
    return [(*row, *sides[4 * at : 4 * at + 4]) for at, row in enumerate(zip(*columns, strict=True))]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(split_size=3, spatial_size=2, slice_method=("2x3", "vertical")),
        Plan(split_size=2, bidirectional=True, data_parallel=2),
        Plan(split_size=3, local_dp=2),
        Plan(split_size=5, schedule="interleaved", stages_per_rank=2),
    ],
    ids=lambda plan: plan.summary,
)
def test_every_role_of_every_rank_is_a_block_on_its_tile(plan):
    layout, blocks = Layout.of(plan), read_blocks(count_plan(plan, (4, 3, 30, 50)))
    expected = {
        (copy, role.stage, role.tile, rank)
        for rank, roles in enumerate(layout.roles)
        for role in roles
        for copy in [role.replica * layout.directions + role.direction]
    }
    assert {block[:4] for block in blocks} == expected
    assert len(blocks) == len(expected)
    for _, number, _, _, top, left, bottom, right in blocks:
        if layout.stages[number].grid.tiles == 1:
            assert (top, left, bottom, right) == (0, 0, 30, 50)
    first = [block for block in blocks if block[:2] == (0, 0)]
    assert sum((bottom - top) * (right - left) for *_, top, left, bottom, right in first) == 30 * 50


@pytest.mark.parametrize(
    ("grid", "sizes", "size", "image", "tile"),
    [
        ("2x1x2", (16, 64, 96), (128, 96), "16 × 64 × 96 px", "8 × 64 × 48 px"),
        ("1x2x2", (16, 64, 96), (64, 96), "16 × 64 × 96 px", "16 × 32 × 48 px"),
        ("4", (800,), (100, 800), "800 px", "200 px"),
    ],
)
def test_the_planes_of_tiles_of_a_volume_stand_on_each_other(grid, sizes, size, image, tile):
    plan = Plan(split_size=2, slice_method=grid)
    found = count_plan(plan, (4, 1, *sizes))
    below = ", in 2 planes below each other" if grid[0] == "2" else ""
    assert (found.size, found.image, found.facts[1][1]) == (size, image, f"tiles of {tile}{below}")
    assert found.stages[0]["words"] == f"{' × '.join(grid.split('x'))} tiles of {tile}"
    blocks = [block for block in read_blocks(found) if block[1] == 0]
    assert len(blocks) == plan.grids[0].tiles
    # The blocks cover the picture, and no two of them cover the same part of it.
    areas = sum((bottom - top) * (right - left) for *_, top, left, bottom, right in blocks)
    corners = {(top, left) for *_, top, left, _, _ in blocks}
    assert (areas, len(corners)) == (size[0] * size[1], len(blocks))
    spans = unpack_tables(found.blocks)["spans"].reshape(-1, 2 * len(sizes)).tolist()
    assert [tuple(row) for row in spans[: len(blocks)]] == [part.sides for part in plan.grids[0].cut(*sizes)]
    assert spans[-1] == [*[0] * len(sizes), *sizes]  # the stage of whole images


def test_stages_with_other_numbers_of_planes_fill_the_same_picture():
    plan = Plan(split_size=2, spatial_size=2, slice_method=("3x1x1", "2x1x2"))
    found = count_plan(plan, (1, 1, 12, 10, 10))
    assert found.size == (30, 10)
    behind = [block[4:] for block in read_blocks(found) if block[1] == 1]
    assert behind == [(0, 0, 15, 5), (0, 5, 15, 10), (15, 0, 30, 5), (15, 5, 30, 10)]


def test_a_volume_is_resized_by_its_rows():
    assert resize_shape((2, 1, 16, 64, 96), 32, 1) == (1, 1, 8, 32, 48)
    assert (get_side((2, 1, 16, 64, 96)), get_side((2, 1, 800))) == (64, 800)
    assert resize_shape((2, 1, 800), 400, 2) == (2, 1, 400)


def test_very_many_ranks_are_counted_but_not_drawn():
    many = count_plan(Plan(split_size=1, data_parallel=1 << 20), (4, 3, 64, 64))
    assert many.facts[0] == (f"{4 << 20:,}", "ranks")
    assert len(read_blocks(many)) == 4 * MOST_COPIES
    assert "more copies" in many.left_out
    large = count_plan(Plan(split_size=1, slice_method="200x200"), (1, 3, 4000, 4000))
    assert large.facts[:2] == (("40,000", "ranks"), ("40,000", "tiles of 20 × 20 px"))
    assert (large.blocks, MOST_BLOCKS < 200 * 200, "too many" in large.left_out) == (b"", True, True)


def test_an_image_too_small_for_its_tiles_is_refused():
    with pytest.raises(PlanError, match="3 rows of pixels cannot be cut into 4 tiles"):
        count_plan(Plan(split_size=1, slice_method="4x1"), (1, 3, 3, 9))


def make_load(peak_bytes: int | None) -> RankLoad:
    return RankLoad(10, Traffic(2, 2048), peak_bytes and 300, peak_bytes, halo_bytes=peak_bytes and 100)


def test_equal_loads_are_said_once_and_each_rank_names_its_own():
    loads = [make_load(peak) for peak in (400, 1200, 400, 850)]
    groups, of_rank = describe_load_groups(loads, MACHINE)
    assert unpack_tables(of_rank).tolist() == [0, 1, 0, 2]
    assert [(group["level"], group["word"]) for group in groups] == [
        (0, "under half full"),
        (3, "does not fit"),
        (2, "nearly full"),
    ]
    assert [round(group["share"], 3) for group in groups] == [0.333, 1.0, 0.708]
    assert groups[1]["lines"] == [
        "weights 10 bytes", "activations 200 bytes", "halos 100 bytes",
        "memory 1.2 KB of 1000 bytes, does not fit", "sends 2 messages, 2.0 KB",
    ]  # fmt: skip


def test_what_is_not_counted_yet_is_said():
    groups, _ = describe_load_groups([make_load(None)], MACHINE)
    assert (groups[0]["level"], groups[0]["word"]) == (-1, "being counted")
    assert groups[0]["lines"] == ["weights 10 bytes", "sends 2 messages, 2.0 KB"]


def test_gauges_say_whether_the_fullest_rank_fits():
    memory, time, traffic = measure_gauges([make_load(400), make_load(1001)], MACHINE, None, "no time")
    assert (memory["verdict"], memory["value"], memory["limit"]) == ("does not fit", 1001, LIMIT)
    assert memory["reason"] == "1.0 times what a rank has"
    assert (time["value"], time["note"]) == (None, "no time")
    assert (traffic["value"], traffic["note"]) == (4096, "4 messages of all ranks")
    memory, *_ = measure_gauges([make_load(1000)], MACHINE, None, "")
    assert (memory["verdict"], memory["reason"]) == ("fits", "0 bytes to spare")
    memory, *_ = measure_gauges([make_load(1000)], None, None, "no machine")
    assert (memory["verdict"], memory["limit"], memory["note"]) == ("", None, "no machine")


def test_the_time_is_that_of_the_forecast():
    plan = Plan(split_size=2, spatial_size=0)
    found = forecast(prepare(resnet20_v1(), plan, (2, 3, 32, 32)).graph, plan, MACHINES["Summit"])
    _, time, _ = measure_gauges([make_load(1), make_load(2)], MACHINES["Summit"], found, "")
    assert time["value"] == found.seconds
    assert time["note"].endswith("images/s on Summit")
