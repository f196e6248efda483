"""A predicted map over its slide: where it lies, what is read of a file, and a figure that can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from mpi4dl_nb import Cluster, Training, show_prediction
from mpi4dl_nb.draw.prediction_map import read_prediction
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.images.dataset import to_network_input
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Level
from mpi4dl_nb.engines.inference.class_map import make_colours
from mpi4dl_nb.engines.plan import Plan

RANDOM = np.random.default_rng(0)
SLIDE = RANDOM.integers(0, 256, (96, 132, 3), np.uint8)


class Threshold(nn.Module):
    """Two classes: dark, and light. `stride` cells of pixels are averaged."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.pool, self.to_scores = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False), nn.Conv2d(3, 2, 1)
        with torch.no_grad():
            self.to_scores.weight.copy_(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1))
            self.to_scores.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_scores(self.pool(x))


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, backend="loopback") as started:
        yield started


def predict(cluster: Cluster, model: nn.Module, source: object, **asked: object) -> object:
    plan = Plan(split_size=1, spatial_size=1, num_spatial_parts=2, slice_method="1x2", precision="float64")
    training = Training(model, plan, cluster, (1, 3, 16, 16))
    try:
        return training.predict(source, memory_mb=10**5, progress=False, **asked)
    finally:
        training.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["tif", "png"])
def test_a_file_says_what_it_is_of(ending: str, cluster: Cluster, tmp_path: Path):
    """A part of the slide, at a stride of 4 that does not divide it: 50 x 61 px are 13 x 16 cells."""
    names = ["dark", "light"]
    path = predict(
        cluster, Threshold(4), SLIDE, to=tmp_path / f"out.{ending}", region=(10, 20, 50, 61), class_names=names
    )
    layer = read_prediction(open_image(SLIDE), path)
    assert layer.names == ("dark", "light")
    assert layer.numbers.shape == (13, 16)
    assert layer.edges == (10, 20, 10 + 13 * 4, 20 + 16 * 4)
    assert layer.shares[1] == pytest.approx(layer.numbers.mean())


def test_an_array_is_placed_by_its_size_or_by_what_is_said():
    picture, whole = open_image(SLIDE), np.zeros((24, 33), np.uint8)
    assert read_prediction(picture, whole).edges == (0, 0, 96, 132)
    assert read_prediction(picture, np.zeros((32, 44), bool)).edges == (0, 0, 96, 132)
    assert read_prediction(picture, np.zeros((28, 38), np.uint8), region=(1, 2, 28, 38)).edges == (1, 2, 29, 40)
    assert read_prediction(picture, np.zeros((7, 10), np.uint8), region=(0, 0, 28, 38)).edges == (0, 0, 28, 40)
    with pytest.raises(PlanError, match=r"Where a map of 70 × 90 px lies .*is not known: .*region=\(y0, x0"):
        read_prediction(picture, np.zeros((70, 90), np.uint8))


class Slide(ArrayPicture):
    """A picture with a second level, a third as large, each pixel of which is the middle one of 3 x 3."""

    def __init__(self) -> None:
        super().__init__("slide", SLIDE)
        self.levels = [Level(96, 132), Level(32, 44, 3.0)]

    def _fill(self, out: np.ndarray, y0: int, x0: int, level: int) -> None:
        pixels = self.pixels if level == 0 else self.pixels[1::3, 1::3]
        out[:] = pixels[y0 : y0 + out.shape[0], x0 : x0 + out.shape[1]]


@pytest.mark.nightly
def test_a_coarser_level_is_not_shifted(cluster: Cluster, tmp_path: Path):
    """Pixel i of a level that is a third as large covers pixels 3 i to 3 i + 2, so that its middle is 3 i + 1."""
    path = predict(cluster, Threshold(), Slide(), to=tmp_path / "out.tif", level=1)
    layer = read_prediction(Slide(), path)
    assert layer.edges == (0, 0, 96, 132)
    fine = predict(cluster, Threshold(), SLIDE)
    rows, cols = (((np.arange(count) + 0.5) * side / count).astype(int) for count, side in ((32, 96), (44, 132)))
    expected = fine[np.ix_(rows, cols)]
    assert np.array_equal(layer.numbers, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("factor", [1 / 3, 3, 0.5, 1.5])
def test_a_model_that_scales_the_picture_keeps_half_pixel_centres(factor: float, cluster: Cluster):
    """Against NumPy: the value at a pixel's middle, by linear interpolation, whatever tile it is computed in."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(x, scale_factor=factor, mode="bilinear") * self.weight

    found = predict(cluster, Scale(), SLIDE, kind="scores")
    pixels = to_network_input(SLIDE).double().numpy()
    rows, cols = ((np.arange(made) + 0.5) / factor - 0.5 for made in found.shape[:2])
    for channel in range(3):
        lines = np.stack([np.interp(cols, np.arange(132), line) for line in pixels[channel]])
        expected = np.stack([np.interp(rows, np.arange(96), column) for column in lines.T], axis=1)
        assert np.allclose(found[..., channel], expected, rtol=0, atol=1e-7)


def test_the_figure_shows_slide_and_map_at_the_same_place():
    classes = np.zeros((24, 33), np.uint8)
    classes[6:12, 11:22] = 2
    figure = show_prediction(SLIDE, classes, ["glass", "stroma", "tumour"])
    assert figure.alt == "picture, 96 × 132 px, with its predicted classes: 0 glass 92%, 2 tumour 8%."
    below, above = figure.axes[0].images
    assert below.get_extent() == above.get_extent() == [0, 132, 96, 0]
    assert np.array_equal(above.get_array()[7, 12], [*make_colours(3)[2], 128])
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"0 glass 92%", "2 tumour 8%"}
    (place,) = [text.get_position() for text in figure.axes[0].texts if text.get_text() == "2"]
    assert 11 * 4 < place[0] < 22 * 4
    assert 6 * 4 < place[1] < 12 * 4


def test_a_slide_that_knows_its_scale_gets_a_bar():
    picture = open_image(SLIDE)
    assert len(show_prediction(picture, np.zeros((96, 132), np.uint8)).axes[0].artists) == 0
    picture.microns_per_px = 0.5
    assert len(show_prediction(picture, np.zeros((96, 132), np.uint8)).axes[0].artists) == 1


@pytest.mark.parametrize(
    ("predicted", "asked", "error", "said"),
    [
        (np.zeros((96, 132, 2), np.uint8), {}, PlanError, r"has shape \(96, 132, 2\)\. Of several labels, choose one"),
        (np.zeros((96, 132)), {}, PlanError, "but this one has float64 from 0 to 0"),
        (np.full((96, 132), -1), {}, PlanError, "from -1 to -1"),
        (np.full((96, 132), 3), {"class_names": ["a"]}, PlanError, "has class 3, but 1 class names"),
        (np.zeros((96, 132), np.uint8), {"opacity": 2}, PlanError, "opacity=2 must be"),
        ("nowhere.tif", {}, ImageError, "nowhere.tif"),
    ],
)
def test_what_is_no_map_is_refused(predicted, asked, error, said: str):
    with pytest.raises(error, match=said):
        show_prediction(SLIDE, predicted, **asked)


def test_labels_in_a_file_are_no_map(tmp_path: Path):
    tifffile.imwrite(tmp_path / "labels.tif", np.zeros((96, 132, 3), np.uint8), photometric="minisblack")
    with pytest.raises(PlanError, match="Of several labels, choose one"):
        show_prediction(SLIDE, tmp_path / "labels.tif")
