"""Files whose numbers are no picture: each error gives the line that trains on them as tensors, which is run here."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr
from PIL import Image
from torch import nn

from mpi4dl_nb import Cluster, ImageError, Plan, Training, open_image

RANDOM = np.random.default_rng(0)


def write_png(folder: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels[0]).save(folder / "deep.png")
    return folder / "deep.png"


def write_tiff(folder: Path, pixels: np.ndarray, **options: object) -> Path:
    tifffile.imwrite(folder / "a.tif", pixels, photometric="minisblack", **options)
    return folder / "a.tif"


def write_zarr(folder: Path, pixels: np.ndarray) -> Path:
    zarr.create_array(folder / "a.zarr", data=pixels)
    return folder / "a.zarr"


DEEP, STACK = (np.uint16, (1, 16, 24)), (np.uint8, (5, 16, 24))
CASES = {
    "PNG of 16 bits": (*DEEP, write_png),
    "TIFF of 16 bits": (*DEEP, write_tiff),
    "signed TIFF": (np.int16, (1, 16, 24), write_tiff),
    "TIFF of five planes": (*STACK, write_tiff),
    "TIFF of seven channels": (np.uint8, (7, 16, 24), partial(write_tiff, planarconfig="separate")),
    "OME-TIFF of focal planes": (*STACK, partial(write_tiff, ome=True, metadata={"axes": "ZYX"})),
    "Zarr of 16 bits": (*DEEP, write_zarr),
    "Zarr of five channels": (*STACK, write_zarr),
    "array of 16 bits": (*DEEP, lambda _, pixels: pixels[0]),
    "array of 13 channels": (np.uint8, (13, 16, 24), lambda _, pixels: pixels.transpose(1, 2, 0)),
}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, backend="loopback") as ready:
        yield ready


@pytest.mark.parametrize("case", CASES)
def test_the_line_of_the_error_trains_on_all_numbers(tmp_path, cluster, case):
    dtype, shape, write = CASES[case]
    pixels = RANDOM.integers(0, 100, shape).astype(dtype)
    with pytest.raises(ImageError) as caught:
        open_image(write(tmp_path, pixels))
    line = re.search(r"training\.fit\(.*?\)(?= for pixels of shape \(C, H, W\))", str(caught.value))[0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    wanted = nn.functional.cross_entropy(model(torch.from_numpy(pixels.astype(np.float32))[None]), torch.tensor([2]))
    training = Training(model, Plan(split_size=2, spatial_size=0), cluster, (1, *shape))
    names = {"training": training, "torch": torch, "pixels": pixels, "labels": torch.tensor([2])}
    assert eval(line, names).losses[0] == pytest.approx(wanted.item(), rel=1e-5)
