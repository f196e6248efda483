"""The slicer without a browser: its controls, its figure, and what it gives to the page."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mpi4dl_nb import Slicer, open_image, show_slicing
from mpi4dl_nb.draw.halo_points import with_fused_halos
from mpi4dl_nb.engines.compiler.receptive import ReceptiveFields
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.images.picture_reader import Level, Picture
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.widgets import slicer_view as module
from tests.compiler.test_tokens import GlobalContext
from tests.images.made_slides import find_shared
from tests.unpacking import unpack_tables

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", range(3))
def test_the_figure_is_what_the_function_draws(slicer, layer):
    slicer.layer.value = layer
    assert slicer.view.layer == layer
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, layer, tile=0).alt
    assert slicer.layer.max == 2


def test_the_page_has_the_words_of_the_figure(slicer):
    for layer in range(3):
        for tile in range(4):
            slicer.layer.value, slicer.tile.value = layer, tile
            words = slicer.view.facts["layers"][layer]["words"][tile]
            assert all(
                line.rstrip(".") in slicer.figure.alt for line in words if not line.startswith(("Through", "Norms"))
            )


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
        assert f"{len(count)} halos, {sum(count) / 1024:.1f} KB ({name})" in slicer.view.facts["remarks"]["0"][0][0]


def test_the_page_is_sent_the_sides_of_a_rectangle_in_one_order(slicer):
    tables = unpack_tables(slicer.view.numbers)[0]
    assert tables["owned"][4:8].tolist() == [0, 60, 48, 120]  # top, left, bottom, right
    assert tables["windows"][4:8].tolist() == [0, 59, 49, 120]


def test_a_tile_is_chosen_by_number_and_by_its_pixels(slicer):
    slicer.tile.value = 3
    assert "Tile 3 (rank 3) owns" in slicer.figure.alt
    slicer.pick(10, 100)
    assert slicer.tile.value == slicer.view.tile == 1
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, tile=1).alt


def test_the_figure_follows_the_view(slicer):
    slicer.view.place = [48, 60, 8]
    told = slicer.figure.alt
    assert "In each pixel: the picture's red, green, blue" in told
    assert told == show_slicing(TISSUE, PLAN, RECIPE, tile=0, zoom=8, at=(48, 60)).alt
    slicer.layer.value = 2  # at half the resolution
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, 2, tile=0, zoom=4, at=(24, 30)).alt
    slicer.view.place = []
    assert slicer.figure.alt == show_slicing(TISSUE, PLAN, RECIPE, 2, tile=0).alt


def test_the_receptive_field_of_a_pixel_is_said(slicer):
    slicer.layer.value = 2
    slicer.view.fields = True
    slicer.pick(23, 29)
    image = ReceptiveFields(RECIPE.graph).compute_field("conv2d_2", 23, 29).image
    assert image.shape == (12, 12)
    assert (
        "Output pixel (23, 29) of this layer depends on 12 × 12 px of the picture (dashed): rows 41 to 52"
        in slicer.figure.alt
    )
    inside = {tile: ((48 - 41) if tile < 2 else 5) * ((60 - 53) if tile % 2 == 0 else 5) / 144 for tile in range(4)}
    assert ", ".join(f"tile {tile} {share:.0%}" for tile, share in inside.items()) in slicer.figure.alt
    slicer.layer.value = 1
    assert "Output pixel" not in slicer.figure.alt  # a pixel of another layer's output is none of this one's
    slicer.layer.value = 2
    slicer.pick(23, 29)
    slicer.view.fields = False
    assert "Output pixel" not in slicer.figure.alt


def test_layers_of_several_spatial_stages_follow_each_other():
    plan = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"))
    slicer = Slicer(TISSUE, plan, prepare(Net(), plan, SHAPE))
    stages = [layer["stage"] for layer in slicer.view.facts["layers"]]
    assert stages == sorted(stages)
    assert set(stages) == {0, 1}
    slicer.tile.value = 3
    slicer.layer.value = stages.index(1)
    assert slicer.tile.value == 1
    assert "in 1x2 tiles on ranks 4 to 5" in slicer.figure.alt
    bare = Slicer(TISSUE, plan)
    bare.layer.value = 1
    assert "in 1x2 tiles on ranks 4 to 5" in bare.figure.alt
    assert bare.figure.alt == show_slicing(TISSUE, plan, tile=0, stage=1).alt


def test_each_spatial_stage_has_its_own_remarks():
    plan = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"))
    slicer = Slicer(TISSUE, plan, prepare(Net(), plan, SHAPE))
    slicer.fused_halos.value = True
    said = slicer.view.facts["remarks"]
    assert {stage: len(tiles) for stage, tiles in said.items()} == {"0": 4, "1": 2}
    assert said["0"][0] != said["1"][0]
    layers = slicer.view.facts["layers"]
    for slicer.layer.value, layer in enumerate(layers):
        assert said[str(layer["stage"])][slicer.tile.value][0] in slicer.figure.alt


def test_without_a_model_there_are_tiles():
    slicer = Slicer(TISSUE, PLAN)
    assert "tile 3, rank 3: 48 × 60 px" in slicer.figure.alt
    slicer.tile.value = 1
    assert "Chosen: tile 1, rank 1" in slicer.figure.alt
    assert slicer.view.facts["net"] == []


def test_the_net_has_all_layers_and_where_they_borrow(slicer):
    net = slicer.view.facts["net"]
    assert [layer["channels"] for layer in net] == [4, 4, 6, 2]
    assert [layer["tiles"] for layer in net] == [4, 4, 4, 1]
    assert [layer["sizes"][0] for layer in net] == [96, 48, 48, 1]
    assert [point for layer in net for point in layer["points"]] == [0, 1, 2]


def test_every_control_has_a_label(slicer):
    controls = [slicer.layer, slicer.tile, slicer.fused_halos, slicer.together]
    assert all(control.description for control in controls)


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ImageError, match="96 x 120 px, but picture has 90 x 120"):
        Slicer(TISSUE[:90], PLAN, RECIPE)


def ask(slicer: Slicer, *tiles: tuple[int, int, int]) -> list[np.ndarray]:
    """The pixels of tiles, as the page asks for them."""
    sent: list[bytes] = []
    slicer.view.send = lambda content, buffers: sent.extend(buffers)
    slicer.view._handle_custom_msg({"tiles": [list(tile) for tile in tiles]}, [])
    return [np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in sent]


def test_the_page_gets_the_pixels_of_the_picture():
    tissue = immunohistochemistry()[:300, :500]
    slicer = Slicer(tissue, PLAN)
    assert slicer.view.facts["picture"]["levels"] == 2
    first, last, half = ask(slicer, (0, 0, 0), (0, 1, 1), (1, 0, 0))
    assert np.array_equal(first, tissue[:256, :256])
    assert np.array_equal(last, tissue[256:, 256:])
    assert half.shape == (150, 250, 3)
    means = tissue.reshape(150, 2, 250, 2, 3).mean((1, 3))
    assert np.abs(half - means).mean() < 4  # JPEG


def test_each_tile_is_answered_also_those_that_cannot_be_read(monkeypatch):
    slicer, sent, encode = Slicer(immunohistochemistry()[:300, :500], PLAN), [], module.encode_tile

    def encode_some(picture, *place):
        if place == (0, 0, 0):
            raise OSError("the disk is gone")
        return encode(picture, *place)

    monkeypatch.setattr(module, "encode_tile", encode_some)
    slicer.view.send = lambda content, buffers: sent.append((content, *map(bool, buffers)))
    slicer.view._handle_custom_msg({"tiles": [[0, 0, 0], [1, 0, 0]]}, [])
    assert sent == [
        ({"tiles": [[0, 0, 0]], "trouble": "the disk is gone"}, False),
        ({"tiles": [[1, 0, 0]], "trouble": ""}, True),
    ]


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
    levels = slicer.view.facts["picture"]["levels"]
    assert [tile.shape[:2] for tile in ask(slicer, (levels - 1, 0, 0), (4, 3, 3))] == [(195, 195), (256, 256)]
    (exact,) = ask(slicer, (0, 195, 195))
    assert tuple(exact[8, 9]) == ((195 * 256 + 8) % 251, (195 * 256 + 9) % 241, 90)
    assert picture.bytes_read - whole < 10e6


@pytest.mark.nightly
def test_a_real_slide_is_sliced():
    path = find_shared("CMU-1-Small-Region.svs")
    pytest.importorskip("openslide")
    slicer = Slicer(path, PLAN, Net())
    rows, cols = slicer.image.shape()
    assert f"CMU-1-Small-Region.svs, {rows} × {cols} px (rows × columns), in 2x2 tiles" in slicer.figure.alt
    assert slicer.view.facts["picture"]["microns"] == pytest.approx(0.499)
    assert "µm)" in slicer.view.facts["layers"][0]["words"][0][-2]
    microns = slicer.image.microns_per_px
    assert f"1 right (up to {microns:.3g} µm of the picture)" in slicer.figure.alt
    (tile,) = ask(slicer, (0, 5, 4))
    assert np.array_equal(tile, open_image(path).read(5 * 256, 4 * 256, 256, 256))


def test_a_softmax_over_all_pixels_is_called_after_its_operator():
    """Its segments are two, before and after its sum; what the first one reads is no picture."""
    slicer = Slicer(TISSUE, PLAN, prepare(GlobalContext(), PLAN, SHAPE))
    assert [point.name for point in slicer.points] == ["stem", "softmax", "head"]
    slicer.layer.value = 1
    assert "layer softmax" in slicer.figure.alt


class Largest(nn.Module):
    """The two largest of all numbers of an image: they are gathered."""

    def forward(self, x):
        return x.topk(2, 1)[0]


class Flattening(nn.Sequential):
    """A pool to fewer rows than tiles or not, and an operator on all pixels that remain."""

    def __init__(self, rows: int) -> None:
        head = nn.AdaptiveMaxPool2d((rows, 6)), nn.Flatten(), Largest()
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), *head)


@pytest.mark.parametrize(
    ("rows", "layer", "why"), [(6, "3", "no rows and columns"), (1, "1", "only 1 × 6 px for 2x2 tiles")]
)
def test_layers_without_tiles_of_their_outputs_are_shown_without_what_these_read(rows, layer, why):
    recipe = prepare(Flattening(rows), PLAN, SHAPE)
    slicer = Slicer(TISSUE, PLAN, recipe)
    (number,) = (n for n, point in enumerate(slicer.points) if point.name == layer)
    assert not any(facts["reach"] for facts in slicer.view.facts["layers"][number:])
    assert slicer.view.facts["layers"][0]["reach"]
    assert all(why in words[-1] for words in slicer.view.facts["layers"][number]["words"])
    slicer.layer.value, slicer.view.fields, slicer.view.picked = number, True, [0, 0, 0, 0]
    shown = slicer.figure.alt
    slicer.view.reading = "picture"
    assert slicer.figure.alt == shown
    with pytest.raises(PlanError, match=f"{why}.*reading='layer'"):
        show_slicing(TISSUE, PLAN, recipe, layer, reading="picture")
