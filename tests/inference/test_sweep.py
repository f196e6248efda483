"""Sweeps: tiles in turn over ranks, from pictures, into arrays or files; within a bound, or refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpi4dl_nb.engines.comm import device
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Picture
from mpi4dl_nb.engines.inference.pyramid_sink import make_pyramid
from mpi4dl_nb.engines.inference.rank_predictor import make_padded_region, prepare_region
from mpi4dl_nb.engines.inference.tile_passes import choose_grid, fit_tiles
from mpi4dl_nb.engines.inference.tile_stitcher import ArraySink
from mpi4dl_nb.engines.inference.tiled_predictor import PredictionRequest, TiledPrediction, TiledPredictor
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from tests.inference.test_turns import Squeezed, fill_statistics
from tests.inference.turning import predict_alone, set_head_biases

RANDOM = np.random.default_rng(0)
PICTURE = open_image(RANDOM.integers(0, 256, (150, 190, 3), np.uint8))
ALL, PART = None, (3, 5, 97, 122)


def predict_region(
    model: nn.Module,
    ranks: int,
    box: Any = ALL,
    kind: str = "scores",
    side_px: int | None = 50,
    sink: Callable[..., Any] = ArraySink,
    picture: Picture = PICTURE,
    **bound: Any,
) -> TiledPrediction:
    recipe, region = prepare_region(model, make_padded_region(picture, box), "float64")
    ask = PredictionRequest(region, kind, side_px=side_px, **bound)
    return run_ranks(ranks, lambda world: TiledPredictor(world, recipe, ask, sink).run())[0]


def compute_expected(model: nn.Module, box: Any = ALL, multiple: int = 1) -> torch.Tensor:
    """(K,), or (H, W, K) of the region, which one process computes padded with white to that multiple."""
    region = make_padded_region(PICTURE, box)
    images = region.read_tile(Tile.whole(*region.pad_to_multiple(multiple).size_px), torch.float64)
    found = predict_alone(model, images)[0]
    height, width = region.picture_px
    return found if found.dim() == 1 else found[:, :height, :width].permute(1, 2, 0)


def make_unet() -> nn.Module:
    torch.manual_seed(0)
    images = make_padded_region(PICTURE).read_tile(Tile.whole(64, 80), torch.float64)
    return set_head_biases(fill_statistics(UNet(num_classes=3, width=4)), images)


def make_resnet() -> nn.Module:
    torch.manual_seed(0)
    return fill_statistics(resnet20_v1())


def make_monai_net(name: str, *arguments: Any, **keywords: Any) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    return fill_statistics(getattr(nets, name)(*arguments, **keywords))


# ---- the same as one process

CASES: dict[str, tuple[Callable[[], nn.Module], int, Any, int]] = {
    "U-Net, a size that it does not take": (make_unet, 3, PART, 4),
    "ResNet": (make_resnet, 2, PART, 1),
    "MONAI UNet": (lambda: make_monai_net("UNet", 2, 3, 3, (4, 8, 16), (2, 2), norm="batch"), 4, PART, 4),
    "MONAI UNet, instance norm": (lambda: make_monai_net("UNet", 2, 3, 3, (4, 8, 16), (2, 2)), 2, PART, 4),
    "MONAI DenseNet": (
        lambda: make_monai_net("DenseNet", 2, 3, 5, init_features=8, growth_rate=4, block_config=(2, 2)),
        4,
        PART,
        1,
    ),
    "squeezed": (Squeezed, 3, PART, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(name: str):
    make, ranks, box, multiple = CASES[name]
    model = make()
    found, expected = predict_region(model, ranks, box), compute_expected(model, box, multiple)
    assert found.tiles == 6
    assert found.per_pixel == (expected.dim() == 3)
    assert torch.allclose(torch.as_tensor(found.answer), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_gives_the_same_bits(ranks: int):
    model = make_unet()
    found = predict_region(model, ranks, (0, 0, 140, 180), side_px=64)
    assert found.tiles == 9
    assert np.array_equal(found.answer, predict_region(model, 3, (0, 0, 140, 180), side_px=64).answer)
    assert 2 < found.overhead < 3  # windows of 91 x 104 px for tiles of 47 x 60, less at the edges


@pytest.mark.nightly
def test_kinds_of_answers_for_each_pixel():
    model, expected = make_unet(), compute_expected(make_unet(), (0, 0, 64, 80))
    kinds = {kind: predict_region(model, 2, (0, 0, 64, 80), kind).answer for kind in ("classes", "probabilities")}
    assert {kind: (found.dtype.name, found.shape) for kind, found in kinds.items()} == {
        "classes": ("uint8", (64, 80)),
        "probabilities": ("uint8", (64, 80, 3)),
    }
    assert np.array_equal(kinds["classes"], expected.argmax(2).numpy())
    assert np.array_equal(kinds["probabilities"], expected.softmax(2).mul(255).round().numpy())


@pytest.mark.nightly
def test_kinds_of_answers_for_the_image():
    model, expected = make_resnet(), compute_expected(make_resnet(), PART)
    assert predict_region(model, 2, PART, "classes").answer == int(expected.argmax())
    assert torch.allclose(predict_region(model, 2, PART, "probabilities").answer, expected.softmax(0), rtol=1e-10)


@pytest.mark.nightly
def test_one_score_is_that_of_a_yes():
    model = nn.Conv2d(3, 1, 3, padding=1)
    expected = compute_expected(model)
    label = {"meaning": OutputMeaning.LABELS}
    assert np.array_equal(predict_region(model, 2, kind="classes", **label).answer, (expected > 0)[..., 0].numpy())
    yes = predict_region(model, 2, kind="probabilities", **label).answer
    assert np.array_equal(yes, expected.sigmoid().mul(255).round()[..., 0].numpy())


@pytest.mark.nightly
def test_an_answer_coarser_than_the_image(tmp_path: Path):
    model, path = nn.Conv2d(3, 2, 4, stride=4), tmp_path / "coarse.tif"
    found = predict_region(model, 2, (0, 0, 120, 160), "scores")
    assert found.answer.shape == (30, 40, 2)
    assert np.allclose(found.answer, compute_expected(model, (0, 0, 120, 160)).numpy(), rtol=1e-12, atol=1e-12)
    sink = partial(make_pyramid, path, make_padded_region(PICTURE), "classes", (30, 40), ())
    predict_region(model, 2, (0, 0, 120, 160), "classes", sink=sink)
    assert open_image(path).shape() == (30, 40)


class TwoOutputs(nn.Module):
    """The second output reads the first through windows; whoever predicts gets the first."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coarse, self.fine = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)
        self.both = both

    def forward(self, x):
        coarse = self.coarse(x)
        answers = coarse, self.fine(coarse.relu())
        return answers if self.both else answers[0]


@pytest.mark.nightly
@pytest.mark.parametrize("both", [True, False])
def test_another_output_does_not_shift_the_tiles_of_the_first(both: bool):
    model, box = TwoOutputs(both), (0, 0, 60, 80)
    found = predict_region(model, 2, box, side_px=40)
    assert found.tiles == 4
    assert np.allclose(found.answer, compute_expected(TwoOutputs(both=False), box).numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_a_first_output_that_overlaps_is_refused():
    class Counted(TwoOutputs):
        def __init__(self) -> None:
            super().__init__(both=False)

        def forward(self, x):
            coarse = self.coarse(x)
            F.dropout(self.fine(coarse), training=True)
            return coarse

    with pytest.raises(TraceError, match="is read by a later layer that draws random numbers"):
        predict_region(Counted(), 2, (0, 0, 60, 80), side_px=40)


# ---- bounds


@pytest.mark.nightly
def test_tiles_are_as_large_as_the_bound_allows():
    graph = prepare_region(make_unet(), make_padded_region(open_image(np.zeros((1200, 1500, 3), np.uint8))))[0].graph
    small, large = (fit_tiles(graph, 2, count * 10**6).grid.tiles for count in (20, 60))
    assert small > large > 2
    assert fit_tiles(graph, 5, 10**12).grid.tiles >= 5


@pytest.mark.nightly
def test_a_bound_that_no_tile_keeps():
    graph = prepare_region(make_unet(), make_padded_region(open_image(np.zeros((600, 600, 3), np.uint8))))[0].graph
    with pytest.raises(PlanError, match=r"A tile of 128 px takes \d+ MB .*only 1 MB of the bound are left"):
        fit_tiles(graph, 2, 10**6)
    with pytest.raises(PlanError, match=r"takes \d+ MB before it computes anything, and the bound is 5 MB"):
        predict_region(make_unet(), 2, side_px=None, memory_bytes=5 * 10**6)


def test_without_a_bound_no_memory_is_asked_for(monkeypatch, tmp_path: Path):
    """Linux alone tells it."""
    monkeypatch.setattr(device, "_STATUS", tmp_path / "absent")
    picture = open_image(np.zeros((64, 64, 3), np.uint8))
    graph = prepare_region(make_unet(), make_padded_region(picture))[0].graph
    assert run_ranks(2, lambda world: choose_grid(world, graph, 10**9, 32).tiles) == [4, 4]
    assert device.read_peak_bytes() > 0
    with pytest.raises(PlanError, match="Give the side of tiles"):
        run_ranks(2, lambda world: choose_grid(world, graph, 10**9, None))


@pytest.mark.nightly
def test_peak_memory_stays_below_the_bound(mpiexec, tmp_path: Path):
    """One process would need more than 500 MB beside what it takes to start, about 350."""
    from PIL import Image

    Image.fromarray(RANDOM.integers(0, 256, (1600, 1800, 3), np.uint8)).save(tmp_path / "in.png")
    flags = ["--activation", "softmax", "--memory-mb", "540"]
    flags += ["--model", "mpi4dl_nb:UNet", "--model-args", '{"width": 8}']
    done = mpiexec(
        2, "-m", "mpi4dl_nb.engines", "predict", *flags, "--image", tmp_path / "in.png", "--to", tmp_path / "out.tif"
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert max(line["peak_bytes"]) <= 540 * 10**6
    assert line["tiles"] > 2
    assert (line["height_px"], line["width_px"]) == open_image(tmp_path / "out.tif").shape() == (1600, 1800)


# ---- what goes wrong goes wrong on every rank, and leaves nothing behind


class Torn(ArrayPicture):
    """A picture whose lower right cannot be read."""

    def _fill(self, out: Any, y0: int, x0: int, level: int) -> None:
        if y0 + out.shape[0] > 120 and x0 + out.shape[1] > 150:
            raise ImageError("torn.svs is damaged at row 120.")
        super()._fill(out, y0, x0, level)


def test_a_region_may_be_of_numpys_integers():
    assert make_padded_region(PICTURE, np.array([3, 5, 97, 122])).picture_px == (97, 122)


def assert_every_rank_raises(message: str, ranks: int, work: Callable[[Any], object]) -> None:
    def check_error(world: Any) -> None:
        with pytest.raises(ImageError, match=message):
            work(world)

    run_ranks(ranks, check_error)


@pytest.mark.nightly
def test_a_picture_that_cannot_be_read_everywhere(tmp_path: Path):
    picture = Torn("torn.svs", RANDOM.integers(0, 256, (150, 190, 3), np.uint8))
    region = make_padded_region(picture, (0, 0, 148, 188))
    recipe, region = prepare_region(make_unet(), region)
    sink = partial(make_pyramid, tmp_path / "out.tif", region, "classes", region.size_px, ())
    ask = PredictionRequest(region, side_px=50)
    assert_every_rank_raises("torn.svs is damaged", 3, lambda world: TiledPredictor(world, recipe, ask, sink).run())
    assert list(tmp_path.iterdir()) == []


class Reshaped(nn.Module):
    """Answers once for the image, in some shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.conv, self.shape = nn.Conv2d(3, 6, 1), shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.conv(x).mean((2, 3))
        return scores.reshape(self.shape) if self.shape else scores.mean(1)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
def test_an_answer_of_no_classes_is_refused_before_anything_is_computed(shape: tuple[int, ...]):
    with pytest.raises(TraceError, match=r"answers once for the whole image, with \((6,|1, 2, 3)\)"):
        predict_region(Reshaped(*shape), 1, PART, "classes")


@pytest.mark.nightly
def test_one_score_of_one_image():
    assert predict_region(Reshaped(), 2, PART, "classes").answer in (0, 1)
    assert predict_region(Reshaped(1, 2, 3), 1, PART, "scores").answer.shape == (2, 3)


class Full(ArraySink):
    """A disk that fills up."""

    puts = 0

    def put(self, tile: Tile, pixels: Any) -> None:
        self.puts += 1
        if self.puts == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(tile, pixels)


@pytest.mark.nightly
@pytest.mark.sampled(1)
@pytest.mark.parametrize("side_px", [50, 95])
def test_a_disk_that_fills_up(side_px: int):
    """In a round that others follow, and in the last one."""
    recipe, region = prepare_region(make_unet(), make_padded_region(PICTURE, (0, 0, 148, 188)))
    ask = PredictionRequest(region, side_px=side_px)
    assert_every_rank_raises("No space left", 3, lambda world: TiledPredictor(world, recipe, ask, Full).run())


@pytest.mark.nightly
def test_no_room_is_noticed_before_anything_is_computed(tmp_path: Path, monkeypatch):
    def raise_no_space(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", raise_no_space)
    recipe, region = prepare_region(make_unet(), make_padded_region(PICTURE, (0, 0, 148, 188)))
    sink = partial(make_pyramid, tmp_path / "out.tif", region, "classes", region.size_px, ())
    assert_every_rank_raises(
        r"has no room for the 27.2 KB .*No space left",
        2,
        lambda world: TiledPredictor(world, recipe, PredictionRequest(region, side_px=50), sink),
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["nowhere/out.tif", "file/out.tif", "."])
def test_an_output_that_cannot_be_written(path: str, tmp_path: Path):
    (tmp_path / "file").touch()
    recipe, region = prepare_region(make_unet(), make_padded_region(PICTURE, (0, 0, 148, 188)))
    sink = partial(make_pyramid, tmp_path / path, region, "classes", region.size_px, ())
    assert_every_rank_raises(
        str(tmp_path), 2, lambda world: TiledPredictor(world, recipe, PredictionRequest(region, side_px=50), sink)
    )


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((0, 0, 0, 5), "has no pixels"),
        ((500, 0, 10, 10), "outside"),
        ((0, 0, 10), "four whole numbers"),
        ((0, 0, 10, 9.5), "four whole numbers"),
    ],
)
def test_regions_that_are_none(box: Any, message: str):
    with pytest.raises(ImageError, match=message):
        make_padded_region(PICTURE, box)


@pytest.mark.nightly
def test_an_answer_that_is_no_image():
    class Flat(nn.Module):
        def forward(self, x):
            return x[:, 0]

    with pytest.raises(TraceError, match=r"only \(N, K, H, W\)"):
        predict_region(Flat(), 2)
