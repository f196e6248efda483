"""What is drawn of a cut is what runs: the figure is held against the ranks' programs and what they send."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from legible import find_unreadable, read
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar
from torch import nn

from mpi4dl_nb.draw import figure as drawings
from mpi4dl_nb.draw import slicing
from mpi4dl_nb.draw.halo_points import find_halo_points, find_point
from mpi4dl_nb.draw.slicing import show_slicing
from mpi4dl_nb.draw.tilemap import OTHER_HALO, TINT
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.geometry.tiles import Move, Tile
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.timeline import TimelineEvent
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining

TISSUE = immunohistochemistry()[:96, :120]
CASES = [(grid, layer) for grid in ("2x2", "2x3") for layer in ("stem", "pool", "deep")]
CASES += [("1x8", "stem"), ("6x6", "pool"), ("4x1", "deep")]
READS = {"stem": "images", "pool": "relu", "deep": "max_pool2d"}  # what each layer's window is cut from


class Net(nn.Module):
    """Three layers borrow: `stem` 1 px around, `pool` above and left only, `deep` 2 px of half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 5, padding=2), nn.ReLU())
        self.point = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.point(self.deep(self.pool(self.stem(x)))).mean((2, 3)))


def make_tile_plan(grid: str) -> Plan:
    return Plan(split_size=1, slice_method=grid)


RECIPE = prepare(Net(), make_tile_plan("2x2"), (1, 3, *TISSUE.shape[:2]))


def exchange_of(plan: Plan, layer: str, rank: int) -> Exchange:
    """The instruction that the rank runs before the layer."""
    program = Compiler(RECIPE.graph, plan).compile_rank(rank)
    halos = [item for item in program.forward if isinstance(item, Exchange) and item.purpose == "halo"]
    (found,) = [item for item in halos if item.source == READS[layer]]
    return found


def describe_move(exchange: Exchange, move: Move) -> str:
    """What should be said of a move, from a tensor such as the one that travels."""
    shape = list(exchange.shape)
    shape[exchange.axes[0]], shape[exchange.axes[1]] = move.tile.shape
    sent = torch.empty(shape, dtype=getattr(torch, exchange.dtype))
    return f"from rank {move.source}: {shape[-2]} × {shape[-1]} px, {format_bytes(sent.nbytes)}"


def find_tinted(axes: Axes) -> set[tuple[float, ...]]:
    """The rectangles with a tint, in the colour of an owner."""
    return collect_frames([patch for patch in axes.patches if patch.get_facecolor()[3] == TINT])


def collect_frames(patches: list[Rectangle]) -> set[tuple[float, ...]]:
    return {(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in patches}


def get_frame(tile: Tile) -> tuple[int, ...]:
    return tile.cols.start, tile.rows.start, len(tile.cols), len(tile.rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("grid", "layer"), CASES)
def test_what_is_said_is_what_the_program_moves(grid, layer):
    plan = make_tile_plan(grid)
    for tile in (0, plan.ranks // 2):
        exchange = exchange_of(plan, layer, tile)
        figure = show_slicing(TISSUE, plan, RECIPE, layer, tile)
        rows, cols = exchange.own.shape
        for told in (read(figure), figure.alt):
            assert f"Tile {tile} (rank {tile}) owns {rows} × {cols} px" in told
            assert all(describe_move(exchange, move) in told for move in exchange.receives)
            assert len(re.findall(r"from rank \d+: ", told)) == len(exchange.receives)


@pytest.mark.parametrize("layer", READS)
def test_what_is_tinted_is_what_the_program_borrows(layer):
    plan = make_tile_plan("2x3")
    exchange = exchange_of(plan, layer, 4)
    _, zoom = show_slicing(TISSUE, plan, RECIPE, layer, 4).axes
    assert find_tinted(zoom) == {get_frame(move.tile) for move in exchange.receives}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", READS)
def test_what_is_outlined_is_what_the_ranks_own(layer):
    plan = make_tile_plan("2x3")
    main, *_ = show_slicing(TISSUE, plan, RECIPE, layer).axes
    outlines = [patch for patch in main.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    for rank in range(plan.ranks):
        col, row, width, height = get_frame(exchange_of(plan, layer, rank).own)
        gap = 0.005 * max(exchange_of(plan, layer, rank).shape[-2:])
        expected = (col + gap, row + gap, width - 2 * gap, height - 2 * gap)
        drawn = [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in outlines]
        assert drawn.count(pytest.approx(expected)) == 2, "a white casing, and the colour on it"


def test_the_bytes_are_those_that_the_ranks_sent():
    plan = make_tile_plan("2x2")
    inputs = {"images": torch.rand(1, 3, *TISSUE.shape[:2]), "labels": torch.tensor([1])}

    def step(world: LoopbackWorld) -> tuple[TimelineEvent, ...]:
        training = RankTraining(world, RECIPE)
        return training.step(training.cut(inputs)).events

    per_rank = run_ranks(plan.ranks, step)
    points = find_halo_points(RECIPE.graph, plan)
    for rank, events in enumerate(per_rank):
        sent = [event.bytes for event in events if event.kind == "halo" and event.phase == "forward"]
        assert sent == [point.count_bytes(point.exchanges[rank].sends) for point in points]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("grid", "layer"), CASES)
def test_no_text_lies_on_another(grid, layer):
    assert find_unreadable(show_slicing(TISSUE, make_tile_plan(grid), RECIPE, layer)) == []
    assert find_unreadable(show_slicing(TISSUE, make_tile_plan(grid))) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(40, 120), (96, 24), (18, 18)], ids=str)
def test_pictures_of_any_shape_stay_legible(shape):
    part = TISSUE[: shape[0], : shape[1]]
    assert find_unreadable(show_slicing(part, make_tile_plan("2x2"), Net(), "deep")) == []


@pytest.mark.parametrize(("grid", "most_lenders"), [("2x2", 0), ("1x3", 1), ("2x3", 1), ("3x3", 4)])
def test_the_tile_with_most_lenders_is_shown(grid, most_lenders):
    figure = show_slicing(TISSUE, make_tile_plan(grid), RECIPE)
    assert f"Tile {most_lenders} (rank {most_lenders}) owns" in figure.alt


@pytest.mark.parametrize(
    ("layer", "name"),
    [(None, "stem.0"), ("deep", "deep.0"), ("deep.0", "deep.0"), (1, "pool"), ("conv2d_1", "deep.0")],
)
def test_a_layer_is_found_by_module_number_or_operator(layer, name):
    assert find_point(find_halo_points(RECIPE.graph, make_tile_plan("2x2")), layer).name == name


def test_deep_layers_are_in_their_own_pixels():
    main, zoom = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, "deep").axes
    assert (main.get_xlim(), main.get_ylim()) == ((0, 60), (48, 0))
    assert main.get_xlabel() == "column, px of this layer"
    assert "2 px" in [text.get_text() for text in zoom.texts]


@pytest.mark.nightly
@pytest.mark.parametrize("split", [1, 2])
def test_a_mirrored_copy_of_the_model_changes_no_halo(split):
    """Its tiles are on other ranks, and its exchanges are the same ones the other way round."""
    plan = Plan(split_size=split, spatial_size=1, slice_method="2x2")
    both = replace(plan, bidirectional=True)
    recipe = prepare(Net(), both, (1, 3, *TISSUE.shape[:2]), device="cpu")
    points, mirrored = find_halo_points(RECIPE.graph, plan), find_halo_points(recipe.graph, both)
    assert [each.name for each in mirrored] == [each.name for each in points]
    for one, other in zip(points, mirrored, strict=True):
        assert all(one.get_window(rank) == other.get_window(rank) for rank in range(4))
        assert all(one.get_receives(rank) == other.get_receives(rank) for rank in range(4))
    assert show_slicing(TISSUE, both, recipe, 1).alt


def test_all_windows_back_to_the_picture_are_a_figure_too():
    """The last output row of the tile, 23, reads rows up to 25 of the pool, 51 of the stem and 52 of the picture."""
    figure = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, "deep", 0, reading="picture")
    assert "cumulative halo of layer deep.0 (conv2d), in the picture" in read(figure)
    assert "0 above, 5 below, 0 left, 5 right" in figure.alt
    assert "of rank 3: 5 × 5 px" in figure.alt
    assert figure.axes[0].get_xlabel() == "column, px of the picture"
    assert find_unreadable(figure) == []
    with pytest.raises(PlanError, match="Did you mean 'picture'"):
        show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, reading="pictur")


def test_what_lies_beyond_the_edge_is_described_as_it_is_filled():
    """MPI4DL pads max-pools with 0, which is wrong for negative activations; the figure shows what we do."""
    plan = make_tile_plan("3x3")
    assert "reads 0, which is padding" in show_slicing(TISSUE, plan, RECIPE, "stem", 0).alt
    assert "which is padding" not in show_slicing(TISSUE, plan, RECIPE, "stem", 4).alt
    assert "reads -inf, which is padding" in show_slicing(TISSUE, plan, RECIPE, "pool", 1).alt


@pytest.mark.nightly
def test_wide_halos_are_tinted_in_the_picture_too():
    """Those of the other tiles are only dotted: tinted alike, nobody could tell whose halo is whose."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    plan, wide = make_tile_plan("1x2"), nn.Sequential(nn.Conv2d(3, 2, 31, padding=15), *head)
    figure = show_slicing(TISSUE, plan, wide)
    assert find_tinted(figure.axes[0]) == {(60, 0, 15, 96)}
    dotted = [patch for patch in figure.axes[0].patches if patch.get_hatch() == OTHER_HALO["hatch"]]
    assert collect_frames(dotted) == {(45, 0, 15, 96)}
    assert "halos of the other tiles" in read(figure)
    assert find_unreadable(figure) == []


def test_the_tiles_of_a_later_stage_have_that_stages_ranks():
    plan = Plan(split_size=2, spatial_size=2, slice_method=("2x2", "1x3"), balance=(1, 3))
    figure = show_slicing(TISSUE, plan, RECIPE, "deep")
    assert "in 1x3 tiles on ranks 4 to 6" in read(figure)
    assert "Tile 1 (rank 5) owns 48 × 20 px" in read(figure)


def test_without_a_model_there_are_only_tiles():
    figure = show_slicing(TISSUE, Plan(slice_method="2x3"))
    assert [f"tile {tile}, rank {tile}" in read(figure) for tile in range(6)] == [True] * 6
    assert "picture, 96 × 120 px (rows × columns), in 2x3 tiles on ranks 0 to 5: tile 0, rank 0: 48 × 40" in figure.alt
    assert "in 1x1 tile on rank 0" in read(show_slicing(TISSUE, Plan(spatial_size=0)))


def test_a_notebook_shows_the_figure_once_and_says_what_it_shows():
    """A bare matplotlib Figure would show as its name only."""
    figure = show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE)
    shown, _ = DisplayFormatter().format(figure)
    assert set(shown) == {"text/plain", "text/html"}
    assert shown["text/html"].count("<img") == 1
    assert f'alt="{figure.alt}"' in unescape(shown["text/html"])
    assert "from rank 1: 48 × 1 px, 576 bytes" in figure.alt


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (
            {"layer": "point"},
            "'point' borrows no halo.*Choose one of stem.0, pool, deep.0",
        ),
        ({"layer": "ste"}, "'ste' borrows no halo.*Did you mean 'stem'"),
        ({"layer": 3}, "layer=3, but 3 layers borrow halos: use 0 to 2"),
        ({"tile": 4}, "tile=4, but stage 0 has tiles 0 to 3"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(choices, reason):
    with pytest.raises(PlanError, match=reason):
        show_slicing(TISSUE, make_tile_plan("2x2"), RECIPE, **choices)


def test_a_plan_without_tiles_has_no_halos():
    with pytest.raises(PlanError, match="No layer borrows a halo"):
        show_slicing(TISSUE, Plan(split_size=1, spatial_size=0), RECIPE)


def test_a_model_traced_at_another_size_is_refused():
    with pytest.raises(ImageError, match=r"images of 96 x 120 px, but picture has 96 x 96"):
        show_slicing(TISSUE[:, :96], make_tile_plan("2x2"), RECIPE)


@pytest.mark.nightly
def test_the_examples_run():
    assert doctest.testmod(drawings).failed == 0
    assert doctest.testmod(slicing).failed == 0


@pytest.mark.parametrize(("reads", "bar_px"), [("stem", 20), ("deep", 10)])
def test_a_picture_that_knows_its_scale_has_a_bar_of_its_length(reads, bar_px):
    picture = ArrayPicture("slide", TISSUE)
    assert not find_bars(show_slicing(picture, make_tile_plan("2x2"), RECIPE))
    picture.microns_per_px = 0.5  # the bar: 10 µm, of 60 µm across; the deep layer has half as many pixels
    for zoom, at in ((None, None), (bar_px * 6, (0, 0))):
        (bar,) = find_bars(show_slicing(picture, make_tile_plan("2x2"), RECIPE, layer=reads, zoom=zoom, at=at))
        assert bar.txt_label.get_text() == "10 µm"
        (length,) = bar.size_bar.get_children()
        assert length.get_width() == pytest.approx(bar_px)
    (bar,) = find_bars(show_slicing(picture, make_tile_plan("2x2")))
    assert bar.txt_label.get_text() == "10 µm"
    figure = show_slicing(picture, make_tile_plan("2x2"), RECIPE, layer=reads)
    assert {"stem": "1 px\n0.5 µm", "deep": "2 px\n2 µm"}[reads] in {text.get_text() for text in figure.axes[1].texts}
    picture.microns_per_px = 0.4994
    assert find_unreadable(show_slicing(picture, make_tile_plan("2x2"), RECIPE, layer=reads)) == []


def test_a_scale_bar_of_any_rounding():
    picture = ArrayPicture("slide", np.zeros((81, 81, 3), np.uint8))
    picture.microns_per_px = 0.1
    (bar,) = find_bars(show_slicing(picture, make_tile_plan("1x1"), zoom=4))
    assert bar.txt_label.get_text() == "0.1 µm"


def test_micrometres_where_strides_differ_by_axis():
    picture = ArrayPicture("slide", np.zeros((64, 128, 3), np.uint8))
    picture.microns_per_px = 0.5
    net = nn.Sequential(nn.Conv2d(3, 4, 3, (2, 1), 1), nn.Conv2d(4, 4, 3, padding=1))
    assert "1 right (up to 0.5 µm of the picture)" in show_slicing(picture, make_tile_plan("1x2"), net, layer=1).alt
    assert "1 below, 0 left, 0 right (up to 1 µm" in show_slicing(picture, make_tile_plan("2x1"), net, layer=1).alt


def find_bars(figure) -> list[AnchoredSizeBar]:
    return [each for axes in figure.axes for each in axes.artists if isinstance(each, AnchoredSizeBar)]
