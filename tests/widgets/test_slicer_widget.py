"""The slicer without a browser: its controls, keys and clicks show what the plain function draws."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from engines.errors import ImageError
from engines.images.picture_reader import Level, Picture
from engines.images.sample_data import immunohistochemistry
from engines.plan import Plan
from engines.program.receptive import ReceptiveFields
from engines.train.training import prepare
from mpi4dl_nb import Slicer, open_image, show_slicing
from mpi4dl_nb.draw.halo_points import with_fused_halos
from tests.images.made_slides import shared

TISSUE = immunohistochemistry()[:96, :120]
SHAPE = (1, 3, *TISSUE.shape[:2])
PLAN = Plan(split_size=1, slice_method="2x2")


class Net(nn.Module):
    """Convolutions of two sizes around a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)
        self.pool, self.deep = nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.wide(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.deep(self.pool(x))).mean((2, 3)))


RECIPE = prepare(Net(), PLAN, SHAPE)


@pytest.fixture
def slicer() -> Slicer:
    return Slicer(TISSUE, PLAN, RECIPE)


def press(slicer: Slicer, *keys: str) -> None:
    for key in keys:
        assert key in slicer.view.accepts
        slicer.view._handle_event(None, {"key": key}, [])


def click(slicer: Slicer, panel: str, row: float, col: float) -> None:
    """Where the panel shows the middle of this pixel."""
    (axes,) = [axes for axes in slicer.figure.axes if axes.get_label() == panel]
    place = slicer.figure.transSubfigure.inverted().transform(axes.transData.transform((col + 0.5, row + 0.5)))
    slicer.view._handle_event(None, {"point": [place[0], 1 - place[1]]}, [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", range(3))
def test_the_layer_slider_shows_what_the_function_draws(slicer, layer):
    slicer.layer.value = layer
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, layer, tile=0).alt
    assert slicer.layer.most == 2


@pytest.mark.nightly
def test_windows_grow_and_shrink_when_halos_are_fused(slicer):
    slicer.together.value = 3
    seen = {}
    for slicer.fused_halos.value in (False, True):
        for slicer.layer.value in range(3):
            seen[slicer.fused_halos.value, slicer.layer.value] = re.search(r"halo in px: (.*?)\.", slicer.figure.alt)[1]
    halos = {place: max(int(width) for width in re.findall(r"\d+", told)) for place, told in seen.items()}
    assert [halos[False, layer] for layer in range(3)] == [1, 2, 1]
    assert [halos[True, layer] for layer in range(3)] == [5, 4, 1]
    assert slicer.plan == with_fused_halos(PLAN, 3)


def test_fused_halos_are_compared_with_others(slicer):
    slicer.together.value = 3
    slicer.layer.value = 1
    slicer.fused_halos.value = True
    told = slicer.figure.alt
    assert "It computes 448 px more, which 3 ranks own: nothing travels here" in told
    borrows = {
        "D1": [(48 + 60 + 1) * 12, (2 * 48 + 2 * 60 + 4) * 16, (24 + 30 + 1) * 16],
        "D2": [(5 * 48 + 5 * 60 + 25) * 12],
    }
    for name, count in borrows.items():
        assert f"{len(count)} halos, {sum(count) / 1024:.1f} KB ({name})" in told


def test_a_tile_is_chosen_by_number_click_and_keys(slicer):
    slicer.tile.value = 3
    assert "Tile 3 (rank 3) owns" in slicer.figure.alt
    click(slicer, "main", 10, 100)
    assert slicer.tile.value == 1
    press(slicer, "ArrowDown", "ArrowDown", "ArrowLeft")
    assert slicer.tile.value == 2
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, tile=2).alt


@pytest.mark.nightly
def test_keys_zoom_until_the_values_are_written(slicer):
    press(slicer, "+", "=", "+")
    told = slicer.figure.alt
    assert "In each pixel: the picture's red, green, blue" in told
    rows = dict(re.findall(r"row (\d+): ([\d ,]+)", told.split("Pixel values")[1]))
    first = int(re.search(r"from column (\d+) on", told)[1])
    assert len(rows) == 8
    for row, values in rows.items():
        written = [[int(value) for value in pixel.split()] for pixel in values.split(",")]
        assert np.array_equal(written, TISSUE[int(row), first : first + 8])
    press(slicer, "-")
    assert "Pixel values" not in slicer.figure.alt
    press(slicer, "0")
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, tile=0).alt


@pytest.mark.nightly
def test_arrows_pan_along_the_seam_when_close(slicer):
    press(slicer, "+", "+")
    slicer.zoom_in()
    shown = re.search(r"rows (\d+) to \d+, columns (\d+)", slicer.figure.alt)
    press(slicer, "ArrowUp", "ArrowUp", "ArrowRight")
    moved = re.search(r"rows (\d+) to \d+, columns (\d+)", slicer.figure.alt)
    assert [int(after) - int(before) for before, after in zip(shown.groups(), moved.groups(), strict=True)] == [-4, 2]
    assert slicer.tile.value == 0


def test_a_click_on_the_framed_place_looks_closer(slicer):
    click(slicer, "side", 47, 59)
    assert "Shown: rows 31 to 62, columns 43 to 74" in slicer.figure.alt
    click(slicer, "main", 50, 60)
    assert "Shown: rows 34 to 65, columns 44 to 75" in slicer.figure.alt
    click(slicer, "side", 90, 110)
    assert slicer.tile.value == 3


@pytest.mark.nightly
def test_zooming_goes_to_the_seam_nearest_to_the_click(slicer):
    click(slicer, "main", 20, 50)
    press(slicer, "+", "+", "+")
    assert "rows 16 to 23, columns 56 to 63" in slicer.figure.alt


def test_the_receptive_field_of_a_pixel_is_told(slicer):
    slicer.layer.value = 2
    slicer.receptive.value = True
    slicer.row.value, slicer.column.value = 23, 29
    image = ReceptiveFields(RECIPE.graph).compute_field("conv2d_2", 23, 29).image
    assert image.shape == (12, 12)
    assert (
        "Output pixel (23, 29) of this layer sees 12 × 12 px of the picture (dotted): rows 41 to 52"
        in slicer.figure.alt
    )
    inside = {tile: ((48 - 41) if tile < 2 else 5) * ((60 - 53) if tile % 2 == 0 else 5) / 144 for tile in range(4)}
    assert ", ".join(f"tile {tile} {share:.0%}" for tile, share in inside.items()) in slicer.figure.alt
    press(slicer, "r")
    assert "Output pixel" not in slicer.figure.alt


@pytest.mark.nightly
def test_the_output_pixel_follows_where_one_looks(slicer):
    slicer.layer.value = 2
    press(slicer, "r")
    click(slicer, "main", 10, 12)
    assert (slicer.row.value, slicer.column.value) == (10, 12)
    slicer.layer.value = 0
    assert (slicer.row.value, slicer.column.value) == (21, 25)


def test_several_spatial_stages():
    plan = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"))
    slicer = Slicer(TISSUE, plan, prepare(Net(), plan, SHAPE))
    assert [value for _, value in slicer.stage.options] == [0, 1]
    slicer.tile.value = 3
    slicer.stage.value = 1
    assert slicer.tile.value == 1
    assert "in 1x2 tiles on ranks 4 to 5" in slicer.figure.alt
    bare = Slicer(TISSUE, plan)
    bare.stage.value = 1
    assert "in 1x2 tiles on ranks 4 to 5" in bare.figure.alt
    assert bare.figure.alt == show_slicing(TISSUE, plan, tile=0, stage=1).alt


def test_without_a_model_there_are_tiles_and_pixels():
    slicer = Slicer(TISSUE, PLAN)
    assert "tile 3, rank 3: 48 × 60 px" in slicer.figure.alt
    press(slicer, "ArrowRight", "+", "+", "+", "d", "r", "]")
    assert slicer.tile.value == 1
    assert "Pixel values" in slicer.figure.alt


@pytest.mark.nightly
def test_keys_choose_layers(slicer):
    press(slicer, "]", "]", "]", "[")
    assert slicer.layer.value == 1
    press(slicer, "d")
    assert slicer.fused_halos.value


def test_every_control_has_a_label(slicer):
    controls = [slicer.stage, *slicer.layer.children[:1], slicer.tile, slicer.fused_halos, slicer.together]
    controls += [slicer.receptive, slicer.row, slicer.column]
    assert all(control.description for control in controls)


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ImageError, match="96 x 120 px, but picture has 90 x 120"):
        Slicer(TISSUE[:90], PLAN, RECIPE)


class Plasma(Picture):
    """A slide of any size, in five levels, whose pixels are computed from where they are: red and green tell it."""

    def __init__(self, side: int) -> None:
        factors = [4**power for power in range(5)]
        super().__init__("plasma", [Level(side // factor, side // factor, factor) for factor in factors])

    def _fill(self, out: np.ndarray, y0: int, x0: int, level: int) -> None:
        factor = int(self.levels[level].downsample)
        rows, cols = (
            np.arange(start, start + count) * factor for start, count in zip((y0, x0), out.shape, strict=False)
        )
        out[..., 0], out[..., 1], out[..., 2] = rows[:, None] % 251, cols[None] % 241, 90


@pytest.mark.nightly
def test_a_slide_of_100000_px_is_read_from_the_level_that_fits():
    picture = Plasma(100_000)
    slicer = Slicer(picture, PLAN, Net())
    assert "Tile 0 (rank 0) owns 50000 × 50000 px" in slicer.figure.alt
    whole = picture.bytes_read
    assert whole < 10e6
    slicer.layer.value = 2
    slicer.fused_halos.value = True
    slicer.tile.value = 3
    assert picture.bytes_read - whole < 1e6, "the whole is read once; other layers need only another seam"
    press(slicer, "0", "+", "+", "+", "+", "+", "+", "+")
    slicer.layer.value = 0
    assert picture.bytes_read < 60e6
    told = slicer.figure.alt
    values = re.search(r"from column (\d+) on: row (\d+): (\d+) (\d+) 90", told)
    column, row, red, green = (int(number) for number in values.groups())
    assert (red, green) == (row % 251, column % 241)
    assert abs(row - 50_000) < 16
    assert abs(column - 50_000) < 16


@pytest.mark.nightly
def test_a_real_slide_is_sliced():
    path = shared("CMU-1-Small-Region.svs")
    pytest.importorskip("openslide")
    slicer = Slicer(path, PLAN, Net())
    rows, cols = slicer.rasters.picture.shape()
    assert f"CMU-1-Small-Region.svs, {rows} × {cols} px (rows × columns), in 2x2 tiles" in slicer.figure.alt
    press(slicer, "+", "+", "+", "+", "+")
    row, column = (int(number) for number in re.search(r"rows (\d+) to \d+, columns (\d+)", slicer.figure.alt).groups())
    there = open_image(path).read(row, column, 8, 8)
    assert f"row {row}: {' '.join(map(str, there[0, 0]))}" in slicer.figure.alt


@pytest.mark.nightly
def test_what_was_read_is_kept(slicer):
    picture = slicer.rasters.picture
    press(slicer, "]", "[", "d", "d")
    seen = picture.bytes_read
    press(slicer, "]", "[", "d", "d", "ArrowRight", "ArrowLeft")
    assert picture.bytes_read - seen < 10_000, "no more than the seam of a tile not looked at before"
