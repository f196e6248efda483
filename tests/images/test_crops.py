"""The demo's small task, on the real picture."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.sample_data import StainCrops, compute_dab, immunohistochemistry

TISSUE = immunohistochemistry()


def test_the_sample_is_a_picture():
    assert TISSUE.shape == (512, 512, 3)
    assert TISSUE.dtype == np.uint8


def test_dab_is_brown_and_not_blue_or_white():
    brown, blue, white = (101, 67, 33), (70, 80, 160), (255, 255, 255)
    density = compute_dab(np.array([[brown, blue, white]], np.uint8))
    assert density.shape == (1, 3)
    assert density[0, 0] > 3 * density[0, 1]
    assert density[0, 2] == pytest.approx(0, abs=1e-6)


def test_half_of_the_crops_are_browner_than_the_median():
    crops = StainCrops(TISSUE, size_px=64, count=50)
    assert crops.labels.dtype == torch.int64
    assert crops.labels.tolist().count(1) == 25


def test_the_label_says_where_the_crops_mean_dab_lies():
    crops = StainCrops(TISSUE, size_px=64, count=20, seed=3)
    density = compute_dab(TISSUE)
    means = np.array([density[r : r + 64, c : c + 64].mean() for r, c in crops.corners])
    assert means[crops.labels.numpy() == 1].min() > means[crops.labels.numpy() == 0].max()


def test_batches_are_whole_normalised_and_in_order():
    crops = StainCrops(TISSUE, size_px=32, count=10)
    batches = list(crops.iterate_batches(4))
    assert [images.shape for images, _ in batches] == [(4, 3, 32, 32)] * 2
    assert batches[0][0].dtype == torch.float32
    assert torch.equal(torch.cat([labels for _, labels in batches]), crops.labels[:8])
    row, col = crops.corners[5]
    mean, deviation = TISSUE.mean((0, 1)), TISSUE.std((0, 1))
    expected = torch.from_numpy((TISSUE[row : row + 32, col : col + 32] - mean) / deviation).permute(2, 0, 1)
    assert torch.allclose(batches[1][0][1], expected.float())


def test_the_same_seed_gives_the_same_batches_and_another_one_others():
    def take_first(seed: int) -> torch.Tensor:
        return next(StainCrops(TISSUE, size_px=32, count=8, seed=seed).iterate_batches(8))[0]

    assert torch.equal(take_first(1), take_first(1))
    assert not torch.equal(take_first(1), take_first(2))


def test_a_crop_may_be_the_whole_picture_and_a_flat_picture_stays_finite():
    crops = StainCrops(np.full((16, 16, 3), 9, np.uint8), size_px=16, count=2)
    images, labels = next(crops.iterate_batches(2))
    assert torch.equal(images, torch.zeros(2, 3, 16, 16))
    assert labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"size_px": 513}, "no crop of 513 x 513 fits"),
        ({"size_px": 0}, "from 1 to 512"),
        ({"count": 1}, "no median"),
    ],
    ids=str,
)
def test_crops_that_do_not_fit_are_refused(choices, reason):
    with pytest.raises(ImageError, match=reason):
        StainCrops(TISSUE, **choices)


def test_a_batch_larger_than_all_crops_is_refused():
    with pytest.raises(ImageError, match="there are 4 crops"):
        next(StainCrops(TISSUE, size_px=32, count=4).iterate_batches(5))


def test_the_demo_says_in_one_line_what_it_cannot_do():
    command = [sys.executable, "-m", "mpi4dl_nb.demo", "--backend", "loopback", "--crop-px", "5000"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ImageError: picture has 512 x 512 pixels, which no crop of 5000 x 5000 fits.")
    assert ended.returncode == 1
