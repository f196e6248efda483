"""Prediction as a notebook uses it: with the weights that a training has by now, wherever its ranks hold them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.inference.rank_predictor import RankPrediction, make_padded_region
from mpi4dl_nb.engines.models import UNet, UNet3d
from mpi4dl_nb.engines.server import rank_functions

N = 5
PLAN = Plan(split_size=2, num_spatial_parts=4, precision="float64")
SEGMENTS = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 1), slice_method="square", precision="float64")
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 110, 3), np.uint8)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(N, backend="loopback") as cluster:
        yield cluster


def make_classifier() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 6, 3)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def make_segmenter() -> nn.Module:
    torch.manual_seed(0)
    return UNet(num_classes=3, width=4, depth=1)


def train_one_step(model: nn.Module, plan: Plan, cluster: Cluster, per_pixel: bool) -> Training:
    training = Training(model, plan, cluster, image_shape=(2, 3, 12, 20))
    labels = (2, 12, 20) if per_pixel else (2,)
    random = torch.Generator().manual_seed(1)
    training.step(torch.randn(2, 3, 12, 20, generator=random), torch.randint(3, labels, generator=random))
    return training


def predict_plainly(training: Training, images: torch.Tensor) -> torch.Tensor:
    """One process, with the weights that the ranks have now."""
    model = make_classifier() if isinstance(training.model, nn.Sequential) else make_segmenter()
    model.double().load_state_dict(training.state_dict())
    with torch.no_grad():
        return model.eval()(images.double())


def close(mine: object, theirs: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(mine), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_batches_of_any_number(count: int, cluster: Cluster):
    training = train_one_step(make_classifier(), PLAN, cluster, per_pixel=False)
    images = torch.randn(count, 3, 12, 20)
    assert close(training.predict(images), predict_plainly(training, images))


@pytest.mark.parametrize(
    ("model", "axes", "grid", "size"),
    [
        (UNet3d(channels=2, num_classes=3, width=4, depth=1), 3, "2x1x2", (10, 8, 12)),
        (nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.ReLU(), nn.Conv1d(4, 3, 1)), 1, "4", (44,)),
    ],
    ids=["volumes", "signals"],
)
def test_batches_of_volumes_and_signals(model: nn.Module, axes: int, grid: str, size: tuple, cluster: Cluster):
    plan = Plan(split_size=2, slice_method=grid, precision="float64")
    shape = (2, 2, *(8,) * axes)
    training = Training(model, plan, cluster, image_shape=shape, labels=torch.zeros(2, *shape[2:], dtype=torch.int64))
    images = torch.randn(3, 2, *size)
    with torch.no_grad():
        assert close(training.predict(images), model.double().eval()(images.double()))
    with pytest.raises(ImageError, match=r"trained on 2 channels. Give \(N, 2, "):
        training.predict(images[:, :1])
    with pytest.raises(PlanError, match="kind= has no effect for a batch"):
        training.predict(images, kind="classes")
    with pytest.raises(ImageError, match=f"a model of {'volumes' if axes == 3 else 'signals'}"):
        training.predict("slide.tif")


def test_predictions_of_two_threads_do_not_mix_and_are_freed(cluster: Cluster):
    training = train_one_step(make_classifier(), PLAN, cluster, per_pixel=False)
    asked = [torch.randn(count, 3, 12, 20) for count in (5, 3, 4, 5)]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(training.predict, asked))
    assert all(close(mine, predict_plainly(training, images)) for mine, images in zip(found, asked, strict=True))
    assert cluster.call(lambda host: len(host.get_kept(RankPrediction))) == [0] * N
    with pytest.raises(PlanError, match="do not hold this prediction any more"):
        cluster.call(rank_functions.call_prediction, training.name, "step")


@pytest.mark.nightly
def test_batches_of_another_size_and_after_more_steps(cluster: Cluster):
    training = train_one_step(make_segmenter(), SEGMENTS, cluster, per_pixel=True)
    images = torch.randn(2, 3, 16, 28)
    first = training.predict(images)
    assert close(first, predict_plainly(training, images))
    training.step(torch.randn(2, 3, 12, 20), torch.randint(3, (2, 12, 20)))
    again = training.predict(images)
    assert close(again, predict_plainly(training, images))
    assert not torch.equal(first, again)


@pytest.mark.nightly
def test_a_prediction_changes_nothing(cluster: Cluster):
    one, other = (train_one_step(make_classifier(), PLAN, cluster, per_pixel=False) for _ in range(2))
    one.predict(torch.randn(2, 3, 12, 20))
    one.predict(PIXELS, memory_mb=100_000, progress=False)
    batch = torch.randn(2, 3, 12, 20), torch.tensor([0, 2])
    assert one.step(*batch) == pytest.approx(other.step(*batch), rel=1e-14)
    assert all(close(one.state_dict()[name], value) for name, value in other.state_dict().items())


@pytest.mark.nightly
def test_a_picture_tile_after_tile(cluster: Cluster, tmp_path: Path):
    training = train_one_step(make_segmenter(), SEGMENTS, cluster, per_pixel=True)
    box, whole = (5, 7, 60, 80), Tile.whole(60, 80)
    expected = predict_plainly(training, make_padded_region(open_image(PIXELS), box).read_tile(whole, torch.float64))[0]
    scores = training.predict(PIXELS, region=box, kind="scores", memory_mb=100_000, progress=False)
    assert close(scores, expected.permute(1, 2, 0))
    path = training.predict(PIXELS, to=tmp_path / "out.tif", region=box, memory_mb=100_000, progress=False)
    assert np.array_equal(tifffile.imread(path), expected.argmax(0).numpy())
    assert (training.predicted.tiles, training.predicted.overhead) == (1, 1.0)  # it is that small
    assert len(training.predicted.peak_bytes) == N


def test_the_class_of_a_picture(cluster: Cluster):
    training = train_one_step(make_classifier(), PLAN, cluster, per_pixel=False)
    expected = predict_plainly(
        training, make_padded_region(open_image(PIXELS)).read_tile(Tile.whole(90, 110), torch.float64)
    )[0]
    assert training.predict(PIXELS, memory_mb=100_000, progress=False) == int(expected.argmax())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("source", "asked", "error", "message"),
    [
        (torch.zeros(2, 4, 12, 20), {}, ImageError, "trained on 3 channels"),
        (torch.zeros(0, 3, 12, 20), {}, ImageError, "nothing to predict"),
        (torch.zeros(1, 3, 13, 21), {}, TraceError, "cannot be traced"),
        ("nowhere.svs", {}, ImageError, "nowhere.svs"),
        (PIXELS, {"kind": "colours"}, PlanError, "kind='colours' is unknown"),
        (PIXELS, {"region": (0, 0, 0, 9)}, ImageError, "has no pixels"),
        (PIXELS, {"level": 3}, ImageError, "no level 3"),
        (PIXELS, {"memory_mb": 1}, PlanError, "before it computes anything, and the bound is 1 MB"),
        (PIXELS, {"to": "nowhere/out.tif", "memory_mb": 100_000}, ImageError, "nowhere"),
    ],
)
def test_what_cannot_be_predicted(source, asked, error, message: str, cluster: Cluster):
    training = train_one_step(make_segmenter(), SEGMENTS, cluster, per_pixel=True)
    with pytest.raises(error, match=message):
        training.predict(source, progress=False, **asked)
    images = torch.randn(2, 3, 12, 20)
    assert close(training.predict(images), predict_plainly(training, images))  # and the ranks are ready for more


def test_an_array_that_would_be_too_large(cluster: Cluster, monkeypatch):
    monkeypatch.setattr("mpi4dl_nb.training.prediction.ARRAY_BYTES", 1000)
    training = train_one_step(make_segmenter(), SEGMENTS, cluster, per_pixel=True)
    with pytest.raises(PlanError, match=r"Write it to a file \(to='prediction.tif'\)"):
        training.predict(PIXELS, progress=False)
