"""Fused halos: what a group of layers fetches, once, so that its ranks need nothing more until it ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.geometry.tiles import Grid, Span, Tile
from mpi4dl_nb.engines.geometry.windows import (
    HaloCost,
    Shift,
    SlidingWindow,
    ValueCost,
    WindowRead,
    extend_tiles,
    group_cheapest,
)
from mpi4dl_nb.engines.models import resnet_v2
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.train.recipe import prepare
from tests.exact import assert_exact, make_tiled_plan, make_whole_numbers

SAME = SlidingWindow(kernel=3, padding=1)


def cut_strips(*_: str) -> tuple[Tile, Mapping[int, Tile]]:
    """16 rows of one pixel, cut in two: rank 0 owns rows 0 to 7, rank 1 the rest."""
    return Tile.whole(16, 1), dict(enumerate(Grid(2, 1).cut(16, 1)))


def list_rows(tiles: Mapping[int, Tile]) -> list[tuple[int, int]]:
    return [(tile.rows.start, tile.rows.stop) for tile in tiles.values()]


def make_chain(*names: str) -> list[WindowRead]:
    """Each reads the one before it by a window of three rows."""
    return [WindowRead(node, value, (SAME, Shift(0)), 0.0) for value, node in itertools.pairwise(names)]


def test_each_layer_of_a_group_computes_a_row_more_than_the_next():
    wide = extend_tiles(make_chain("x", "a", "b", "c"), {"a": 1, "b": 1, "c": 1}, cut_strips)
    assert list_rows(wide.held["b"]) == [(0, 9), (7, 16)]
    assert list_rows(wide.held["a"]) == [(0, 10), (6, 16)]
    assert "c" not in wide.held
    assert wide.get_fetched("a", "x") is None  # one reader asks for just what it wants


def test_groups_end_with_own_tiles():
    wide = extend_tiles(make_chain("x", "a", "b", "c"), {"a": 1, "b": 1, "c": 2}, cut_strips)
    assert list_rows(wide.held["a"]) == [(0, 9), (7, 16)]
    assert wide.held.keys() == {"a"}


def test_a_branch_and_its_shortcut_fetch_once():
    """The shortcut adds x itself to the branch's end, which is wanted wider than a tile."""
    reads = [
        *make_chain("x", "a", "b"),
        WindowRead("sum", "b", (Shift(0), Shift(0)), 0.0),
        WindowRead("sum", "x", (Shift(0), Shift(0)), 0.0),
    ]
    wide = extend_tiles([*reads, *make_chain("sum", "end")], dict.fromkeys(("a", "b", "sum", "end"), 1), cut_strips)
    assert list_rows(wide.held["sum"]) == list_rows(wide.held["b"]) == [(0, 9), (7, 16)]
    assert list_rows(wide.get_fetched("a", "x")) == list_rows(wide.get_fetched("sum", "x")) == [(0, 11), (5, 16)]


def test_readers_that_fill_the_outside_differently_share_what_lies_inside():
    reads = [WindowRead("a", "x", (SAME, Shift(0)), 0.0), WindowRead("b", "x", (SAME, Shift(0)), float("-inf"))]
    wide = extend_tiles(reads, {"a": 1, "b": 1}, cut_strips)
    assert wide.get_fetched("a", "x") == {0: Tile(Span(0, 9), Span(0, 1)), 1: Tile(Span(7, 16), Span(0, 1))}


def compile_programs(model: nn.Module, **halos: object) -> list[Program]:
    plan = Plan(split_size=1, num_spatial_parts=4, **halos)
    return list(compile_plan(prepare(model, plan, (1, 3, 64, 80)).graph, plan))


@pytest.mark.nightly
@pytest.mark.parametrize(("fused", "expected"), [(1, 10), (2, 5), (3, 4), (4, 3), (10, 1)])
def test_one_exchange_for_each_group_of_blocks(fused: int, expected: int):
    """ResNet-29 v2 is a stem and nine blocks of one 3 x 3 convolution each."""
    apart = compile_programs(resnet_v2(29))
    together = compile_programs(resnet_v2(29), halo_d2=True, fused_layers=fused)
    for one, other in zip(apart, together, strict=True):
        assert sum(isinstance(step, Exchange) for step in one.forward) == 10
        assert sum(isinstance(step, Exchange) for step in other.forward) == expected


def make_layers(count: int) -> tuple[list[list[str]], list[WindowRead], dict[str, ValueCost]]:
    """Layers of one operator each, which read each other by three rows."""
    names = [f"v{number}" for number in range(count + 1)]
    return (
        [[name] for name in names[1:]],
        make_chain(*names),
        {name: ValueCost(flops=160, pixel_bytes=4) for name in names},
    )


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (HaloCost(exchange_s=1.0, bytes_per_s=1e9, flops_per_s=1e9), (6,)),
        (HaloCost(exchange_s=0.0, bytes_per_s=1e9, flops_per_s=1.0), (1, 1, 1, 1, 1, 1)),
        # One row of one more layer costs 3 * 10 s, an exchange 2 * 20 s: two layers share one, not three.
        (HaloCost(exchange_s=20.0, bytes_per_s=1e9, flops_per_s=1.0), (2, 2, 2)),
    ],
    ids=["dear exchanges", "dear work", "in between"],
)
def test_groups_are_as_long_as_is_cheapest(cost: HaloCost, expected: tuple[int, ...]):
    layers, reads, work = make_layers(6)
    assert group_cheapest(layers, reads, cut_strips, work, cost) == expected


@pytest.mark.parametrize("exchange_s", [0.0, 1.0, 5.0, 20.0, 80.0])
def test_no_other_grouping_is_cheaper(exchange_s: float):
    """Against all 32 ways to group six layers."""
    layers, reads, work = make_layers(6)
    cost = HaloCost(exchange_s, 10.0, 1.0)

    def estimate_price(sizes: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(sizes))
        parts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return sum(
            cost.estimate_seconds(
                extend_tiles([reads[n] for n in part], {f"v{n + 1}": 0 for n in part}, cut_strips), cut_strips, work
            )
            for part in parts
        )

    cuts = itertools.product((False, True), repeat=5)
    ways = [
        tuple(len(list(run)) for _, run in itertools.groupby(itertools.accumulate((0, *map(int, cut))))) for cut in cuts
    ]
    assert len(set(ways)) == 32
    assert estimate_price(group_cheapest(layers, reads, cut_strips, work, cost)) == min(map(estimate_price, ways))


@pytest.mark.nightly
def test_auto_is_a_plan_like_any_other():
    """Small images make exchanges dear: then layers share them."""
    programs = compile_programs(resnet_v2(29), halo_d2=True, fused_layers="auto")
    counts = {sum(isinstance(step, Exchange) for step in program.forward) for program in programs}
    assert max(counts) < 10


class PooledTwice(nn.Module):
    """Of a pool with indices, the next convolution reads more values than pixels whose indices are read."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        for weight in self.double().parameters():
            weight.data = make_whole_numbers(*weight.shape, seed=3)

    def forward(self, x: Tensor) -> Tensor:
        values, places = functional.max_pool2d(self.before(x), 2, return_indices=True)
        return self.after(values) + places


@pytest.mark.parametrize("fused", [2, 8])
def test_several_outputs_of_an_operator_are_held_as_far_as_any_of_them_is_read(fused: int):
    assert_exact(PooledTwice(), make_whole_numbers(1, 1, 16, 16, seed=1), make_tiled_plan("2x2", fused))
