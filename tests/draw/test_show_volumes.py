"""Volumes and signals in tiles: each section of the figure shows what the ranks' programs own and borrow there."""

from __future__ import annotations

import doctest
from itertools import combinations, product

import numpy as np
import pytest
import torch
from legible import find_unreadable, read
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import nn

from mpi4dl_nb.draw import sections
from mpi4dl_nb.draw.halo_points import find_halo_points, make_picture_point
from mpi4dl_nb.draw.memory import show_memory
from mpi4dl_nb.draw.rank_map import show_ranks
from mpi4dl_nb.draw.sections import Section, SectionPoint, list_sections
from mpi4dl_nb.draw.slicing import show_slicing
from mpi4dl_nb.draw.tilemap import TINT, get_tile_look
from mpi4dl_nb.draw.volume import Volume
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import StageRanks
from mpi4dl_nb.engines.train.recipe import Recipe, prepare

SIZES = (9, 14, 17)
NUMBERS = torch.arange(2 * 9 * 14 * 17, dtype=torch.float32).reshape(2, *SIZES)


def make_plan(grid: str) -> Plan:
    return Plan(split_size=1, slice_method=grid)


def make_recipe(grid: str) -> Recipe:
    layers = [nn.Conv3d(2, 3, 5, padding=2), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(3, 3, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 2))
    return prepare(net, make_plan(grid), (1, 2, *SIZES))


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make_recipe("2x2x2")


def find_tinted(axes: Axes) -> set[tuple[float, ...]]:
    """The rectangles with a tint: left, top, width, height."""
    tinted = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_facecolor()[3] == TINT]
    return {(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in tinted}


@pytest.mark.parametrize("at", [(4, 6, 7), (5, 6, 7), (4, 7, 8), (0, 0, 0), (8, 13, 16)], ids=str)
def test_a_section_has_the_owner_and_the_borrowers_of_each_of_its_pixels(recipe, at):
    """Against the boxes of the program, pixel by pixel."""
    point = find_halo_points(recipe.graph, make_plan("2x2x2"))[0]
    for section in list_sections(at):
        shown = SectionPoint.of(point, section)
        drawn = {rank: np.zeros(shown.size_px, int) for rank in point.ranks.ranks}
        for rank, tile in shown.tiles.items():
            drawn[rank][tile.to_slices(tile.whole(*shown.sizes))] += 1
        boxes = {rank: np.zeros(SIZES, int) for rank in point.ranks.ranks}
        for rank, tile in point.tiles.items():
            boxes[rank][tile.to_slices(tile.whole(*SIZES))] = 1
        assert all(np.array_equal(drawn[rank], section.select(boxes[rank])) for rank in drawn)
        for rank in point.ranks.ranks:
            lent, whole = np.full(shown.size_px, -1), np.full(SIZES, -1)
            for moves, owners in ((shown.get_receives(rank), lent), (point.get_receives(rank), whole)):
                for move in moves:
                    owners[tuple(slice(span.start, span.stop) for span in move.tile)] = move.source
            assert np.array_equal(lent, section.select(whole))


@pytest.mark.parametrize("parts", [(2, 2, 2), (3, 2, 4), (1, 3, 3), (4,), (2, 5)], ids=str)
def test_neighbours_differ_in_colour_in_every_section(parts):
    grid = Grid(*parts)
    ranks = StageRanks(grid, tuple(range(10, 10 + grid.tiles)))
    places = dict(zip(product(*map(range, parts)), ranks.ranks, strict=True))
    for (one, rank), (other, beside) in combinations(places.items(), 2):
        steps = [abs(a - b) for a, b in zip(one, other, strict=True)]
        if max(steps) == 1 and sum(steps) <= 2:
            assert get_tile_look(ranks, rank) != get_tile_look(ranks, beside)


def test_the_views_show_the_halo_of_the_program(recipe):
    figure = show_slicing(NUMBERS, make_plan("2x2x2"), recipe, 0, 0, at=(3, 5, 6))
    point = find_halo_points(recipe.graph, make_plan("2x2x2"))[0]
    for axes, section in zip(figure.axes, list_sections((3, 5, 6)), strict=True):
        moves = SectionPoint.of(point, section).get_receives(0)
        assert len(moves) == 3
        assert find_tinted(axes) == {
            (move.tile.cols.start, move.tile.rows.start, len(move.tile.cols), len(move.tile.rows)) for move in moves
        }
        here = ("plane 3", "row 5", "column 6")[section.across[0]]
        assert axes.get_xlabel().endswith(f"at {here}")
    for text in (figure.alt, read(figure)):
        assert "Tile 0 (rank 0) owns 4 × 7 × 8 px" in text
        assert "from rank 4: 2 × 7 × 8 px, 896 bytes" in text
        assert "from rank 7: 2 × 2 × 2 px, 64 bytes" in text


@pytest.mark.parametrize(("along", "names"), [(None, "row column"), ("rows", "plane column"), ("columns", "plane row")])
def test_the_large_view_is_seen_along_an_axis(recipe, along, names):
    main, *_ = show_slicing(NUMBERS, make_plan("2x2x2"), recipe, along=along).axes
    assert [main.get_ylabel().split(",")[0], main.get_xlabel().split(",")[0]] == names.split()


def test_single_pixels_have_the_numbers_of_the_tensor(recipe):
    figure = show_slicing(NUMBERS, make_plan("2x2x2"), recipe, 0, 0, zoom=4, at=(3, 6, 7), channel=1)
    shown = NUMBERS[1, 3, 4:8, 5:9]
    texts = [line for text in figure.axes[0].texts for line in text.get_text().split("\n")]
    assert [float(text.replace(",", "")) for text in texts if text[0].isdigit() and "px" not in text] == [
        pytest.approx(value, rel=1e-2) for value in shown.flatten().tolist()
    ]
    assert "Grey shows the numbers of channel 1 of 2 from 2,142" in figure.alt


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "choices",
    [{}, {"layer": 1}, {"zoom": 8}, {"zoom": 20, "tile": 3}, {"reading": "picture"}, {"receptive": (4, 6, 8)}],
    ids=str,
)
def test_no_text_lies_on_another(recipe, choices):
    volume = torch.randn(2, *SIZES)
    assert find_unreadable(show_slicing(volume, make_plan("2x2x2"), recipe, **choices)) == []
    assert find_unreadable(show_slicing(volume, make_plan("3x1x2"))) == []


def test_a_receptive_field_is_a_box(recipe):
    """Through a window of 3, a pool of 2, and a window of 5: 3 * 2 + 4 pixels along each axis."""
    figure = show_slicing(NUMBERS, make_plan("2x2x2"), recipe, 2, receptive=(2, 3, 4))
    assert "depends on 9 × 10 × 10 px of the picture (dashed): planes 0 to 8, rows 2 to 11" in figure.alt


def test_a_signal_is_one_strip():
    net = nn.Sequential(nn.Conv1d(2, 8, 7, padding=3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2))
    signal = torch.linspace(0, 1, 100).repeat(2, 1)
    figure = show_slicing(signal, make_plan("3"), net)
    (axes,) = figure.axes
    assert find_tinted(axes) == {(30, 0, 3, 1), (66, 0, 3, 1)}
    assert "Tile 1 (rank 1) owns 33 px of this layer's input" in figure.alt
    assert find_unreadable(figure) == []
    assert find_unreadable(show_slicing(signal, make_plan("3"), net, zoom=12)) == []


def test_one_scale_of_grey_holds_for_all_sections():
    volume = Volume(torch.tensor([[[[0.0, 1.0], [2.0, float("nan")]], [[4.0, 3.0], [float("inf"), 2.0]]]]))
    seen = [volume.get_rasters(Section((1, 2), (plane, 0, 0))).whole[..., 0].tolist() for plane in (0, 1)]
    assert seen == [[[0, 64], [128, 0]], [[255, 191], [255, 128]]]
    assert "from 0 (black) to 4.00 (white)" in volume.scale_words


PICTURE = ArrayPicture("picture", np.zeros((8, 8, 3), np.uint8))
REFUSED = {
    "axes of a picture": (NUMBERS, "2x2", {}, r"along 2 axes \(2x2 tiles\), but this has 3, .*slice_method='1x2x2'"),
    "axes of a volume": (PICTURE, "2x2x2", {}, r"cuts along 3 axes .* but this has 2"),
    "channel": (NUMBERS, "2x2x2", {"channel": 2}, "channel=2 is none of the 2 channels: use 0 to 1"),
    "position": (NUMBERS, "2x2x2", {"at": (1, 2)}, r"at=\(1, 2\) has 2 numbers, but the volume has 3 axes"),
    "along": (NUMBERS, "2x2x2", {"along": "depth"}, "along='depth' is none of the axes.*planes, rows, columns"),
    "zoom": (NUMBERS, "2x2x2", {"zoom": 0}, "zoom=0 is how many"),
    "planes": (NUMBERS, "10x1x1", {}, "9 planes of pixels cannot be cut into 10 tiles"),
    "batch": (NUMBERS[None], "2x2x2", {}, r"a volume is \(C, D, H, W\)"),
    "channel of a picture": (PICTURE, "2x2", {"channel": 1}, "channel=1 is of volumes"),
    "along a picture": (PICTURE, "2x2", {"along": "rows"}, "along='rows' is none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_refused(case):
    image, grid, choices, reason = REFUSED[case]
    with pytest.raises((ImageError, PlanError), match=reason):
        show_slicing(image, make_plan(grid), **choices)


def test_the_examples_run():
    assert doctest.testmod(sections).failed == 0


def test_a_picture_is_its_only_section():
    point = make_picture_point(ArrayPicture("p", np.zeros((8, 10, 3), np.uint8)), make_plan("2x2"), 0)
    (section,) = list_sections((3, 4))
    assert SectionPoint.of(point, section).tiles == point.tiles


def test_a_number_of_tiles_alone_is_drawn_in_the_grid_that_runs():
    plan, model = Plan(split_size=1, num_spatial_parts=6), nn.Conv3d(2, 3, 3, padding=1)
    grid = prepare(model, plan, (1, 2, *SIZES), nn.MSELoss()).plan.slice_method
    assert f"in {grid} tiles" in show_slicing(NUMBERS, plan).alt
    assert f"in {grid} tiles" in show_slicing(NUMBERS, plan, model).alt
    assert "in 1x6 tiles" in show_slicing(np.zeros((8, 96, 3), np.uint8), plan).alt
    model, shape = nn.Sequential(model, nn.AdaptiveAvgPool3d(1), nn.Flatten()), (1, 2, *SIZES)
    assert f"{grid} tiles" in show_ranks(plan, model, shape).alt
    assert f"{grid} tiles" in show_memory(plan, model, shape)._suptitle.get_text()
