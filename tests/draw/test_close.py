"""Close views: whose pixels they are, their values, what fused halos compute twice, and what a click means."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from legible import find_unreadable, read
from torch import nn

from mpi4dl_nb.draw import figure, halo_points, navigation
from mpi4dl_nb.draw.halo_points import HaloLayers, with_fused_halos
from mpi4dl_nb.draw.navigation import RasterCache
from mpi4dl_nb.draw.slicing import LayerView, draw_slicing, show_slicing
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.receptive import ReceptiveFields
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining

TISSUE = immunohistochemistry()[:96, :120]
SHAPE = (1, 3, *TISSUE.shape[:2])


class Net(nn.Module):
    """All its layers share one exchange if halos are fused far enough."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2), nn.ReLU())
        self.deep = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.deep(self.stem(x))).mean((2, 3)))


def make_tile_plan(grid: str) -> Plan:
    return Plan(split_size=1, slice_method=grid)


RECIPE = prepare(Net(), make_tile_plan("2x2"), SHAPE)
LAST = "conv2d_3"


@pytest.mark.parametrize("grid", ["2x2", "1x3", "3x2"])
def test_fused_layers_read_the_receptive_fields_of_the_last_ones_tile(grid):
    """Two ways that know nothing of each other: windows of fused groups, and the spans of each row and column."""
    points = HaloLayers(RECIPE.graph, make_tile_plan(grid)).find_points(0, 8)
    fields, sources = ReceptiveFields(RECIPE.graph), {node.name: node.reads[0] for node in RECIPE.graph.nodes}
    assert [bool(point.computed) for point in points] == [False, *[True] * 4]
    for rank, last in zip(points[0].ranks.ranks, points[0].ranks.grid.cut(*fields.get_size_px(LAST)), strict=True):
        for point in points:
            value = sources[point.readers[0].name]
            window = point.get_window(rank) & Tile.whole(*point.size_px)
            assert window == fields.compute_region(LAST, last, value)


def test_what_is_said_to_travel_with_fused_halos_is_what_travels():
    plan = with_fused_halos(make_tile_plan("2x2"), 2)
    recipe = prepare(Net(), plan, SHAPE)
    inputs = {"images": torch.rand(SHAPE), "labels": torch.tensor([1])}

    def count_sent_bytes(world: LoopbackWorld) -> int:
        training = RankTraining(world, recipe)
        events = training.step(training.cut(inputs)).events
        return sum(event.bytes for event in events if event.kind == "halo" and event.phase == "forward")

    points = HaloLayers(recipe.graph, plan).find_points(0, 2)
    exchanged = [point for point in points if point.exchanges]
    assert all(isinstance(item, Exchange) for point in exchanged for item in point.exchanges.values())
    for rank, count in enumerate(run_ranks(4, count_sent_bytes)):
        assert count == sum(point.count_bytes(point.exchanges[rank].sends) for point in exchanged)


@pytest.mark.parametrize("at", [(48, 60), (0, 0), (95, 119), (47, 10)], ids=str)
def test_the_values_are_those_of_the_picture(at):
    told = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, zoom=8, at=at).alt
    rows = re.findall(r"row (\d+): ([\d ,]+)", told.split("Pixel values")[1])
    first = int(re.search(r"from column (\d+) on", told)[1])
    assert at[0] in [int(row) for row, _ in rows]
    assert at[1] in range(first, first + 8)
    for row, values in rows:
        pixels = [[int(value) for value in pixel.split()] for pixel in values.split(",")]
        assert np.array_equal(pixels, TISSUE[int(row), first : first + 8])


def test_each_pixel_is_counted_once():
    """Rows 44 to 51 and columns 56 to 63 of tile 0: 4 x 4 are its own, of the two halos 4 each, and the corner."""
    told = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, tile=0, zoom=8, at=(48, 60)).alt
    assert "16 px are its own, 9 borrowed, 39 not needed" in told
    told = show_slicing(
        TISSUE, with_fused_halos(make_tile_plan("2x2"), 2), RECIPE, "stem.2", tile=0, zoom=8, at=(48, 60)
    ).alt
    assert "16 px are its own, 20 computed twice, 28 not needed" in told
    assert "this layer's own values are on the ranks only" in told


def test_numbers_are_written_in_their_cells():
    """Columns 60 and beyond are lent by tile 1, and are on paper; the others are the tile's own."""
    axes = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, tile=0, zoom=4, at=(20, 60)).axes[0]
    written = {text.get_position(): text for text in axes.texts if "px" not in text.get_text()}
    for row, col in np.ndindex(4, 4):
        text = written[58.5 + col, 18.5 + row]
        note = ["from r1"] if col == 2 else []  # one column is lent
        assert text.get_text().split("\n") == [*note, *map(str, TISSUE[18 + row, 58 + col])]
        assert (text.get_bbox_patch() is not None) == bool(note)
    assert len(written) == 16


def test_cells_are_pixels():
    axes = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, tile=0, zoom=4, at=(20, 58)).axes[0]
    assert np.array_equal(axes.images[0].get_array(), TISSUE[18:22, 56:60])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zoom", [8, 12, 32, 64])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_close_views_stay_legible(zoom, layer):
    for plan in (make_tile_plan("2x2"), with_fused_halos(make_tile_plan("2x3"), 2)):
        figure = show_slicing(TISSUE, plan, RECIPE, layer, 1, zoom=zoom, receptive=(20, 22))
        assert find_unreadable(figure) == []
        assert "Output pixel (20, 22)" in read(figure)


@pytest.mark.nightly
def test_many_words_stay_on_the_page():
    plan = with_fused_halos(make_tile_plan("3x3"), 2)
    graph = prepare(Net(), plan, SHAPE).graph
    points = HaloLayers(graph, plan)
    remarks = (points.describe_fusion(0, 4, 2),)
    view = LayerView(8, (48, 60), points.compute_field(points.select_points(2)[1], 48, 60), remarks)
    for zoomed in (view, replace(view, zoom=None), replace(view, zoom=40)):
        figure = draw_slicing(RasterCache(open_image(TISSUE)), points.select_points(2)[0], 4, zoomed)
        assert find_unreadable(figure) == []


def test_the_framed_field_is_where_it_is():
    figure = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, LAST, receptive=(23, 29))
    field = ReceptiveFields(RECIPE.graph).compute_field(LAST, 23, 29).image
    (box, _) = [patch for patch in figure.axes[0].patches if patch.get_zorder() == 8]
    assert (box.get_x(), box.get_y()) == (field.cols.start / 2, field.rows.start / 2)
    assert (box.get_width(), box.get_height()) == (field.shape[1] / 2, field.shape[0] / 2)


def test_a_picture_is_shrunk_once():
    picture = open_image(TISSUE)
    rasters, point = RasterCache(picture), HaloLayers(RECIPE.graph, make_tile_plan("2x2")).select_points()[0]
    draw_slicing(rasters, point)
    seen = picture.bytes_read
    draw_slicing(rasters, point)
    assert picture.bytes_read == seen


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"stage": 1}, "stage=1 is not cut into tiles: use one of 0"),
        ({"zoom": 0}, "zoom=0 is how many pixels"),
        ({"zoom": "8"}, "zoom='8' is how many pixels"),
        ({"receptive": (96, 0)}, "not one of the 96 x 120 of conv2d"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(choices, reason):
    with pytest.raises(PlanError, match=reason):
        show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, **choices)


def test_layers_and_fields_are_those_of_a_model():
    for choices in ({"layer": "stem"}, {"receptive": (0, 0)}):
        with pytest.raises(PlanError, match="Give the model too"):
            show_slicing(TISSUE, make_tile_plan("2x2"), **choices)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", [navigation, halo_points, figure], ids=lambda module: module.__name__)
def test_the_examples_run(module):
    assert doctest.testmod(module).failed == 0
