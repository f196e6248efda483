"""Stain amounts per pixel, augmentation of the staining, and a small classification task on stained tissue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import skimage.data
import torch
from numpy.typing import NDArray
from skimage.color import hed_from_rgb, rgb2hed, rgb_from_hed
from torch import Tensor

from engines.errors import ImageError
from engines.images.picture import Pixels, Source, open_image

__all__ = ["StainCrops", "compute_dab", "immunohistochemistry", "restain"]

_DAB = 2
_STEPS = 1 << 12  # per unit of optical density; before rounding, a byte is off by at most a thirtieth
_DENSITY = (-_STEPS * np.log((np.arange(256) + 1) / 256)).astype(np.float32)
"""The optical density of each byte value, in steps; 1 is added to the value so that black has a finite density."""
_BYTE = np.rint(256 * np.exp(-np.arange(6 * _STEPS) / _STEPS) - 1).clip(0, 255).astype(np.uint8)
"""The byte value of each optical density in steps: the inverse of `_DENSITY`."""


def compute_dab(image: Pixels) -> NDArray[np.float64]:
    """Return the optical density of DAB (brown) by colour deconvolution: (H, W, 3) -> (H, W); 0 is no stain.

    Ruifrok and Johnston's method and stain colours, as implemented in scikit-image.
    """
    stains: NDArray[np.float64] = rgb2hed(image)
    return stains[..., _DAB]


def restain(image: NDArray[np.uint8], factors: Sequence[float], added: Sequence[float]) -> NDArray[np.uint8]:
    """Scale the amounts of haematoxylin, eosin and DAB by `factors` and add the densities `added`: (3, H, W) -> same.

    (Tellez et al., 2018, "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference to train
    distilled stain-invariant convolutional networks", IEEE TMI 37: section III-C.) Each result depends bit for bit only
    on its own pixel: sums are written out and functions tabulated, since library routines round slightly differently at
    the borders of an array.
    """
    #     optical density of red, green, blue  --hed_from_rgb-->  amounts of stains
    #         amounts * factors + added        --rgb_from_hed-->  optical density
    #
    # The three linear steps are one matrix and one vector, so that no stain is ever computed.
    mix = np.asarray(hed_from_rgb @ np.diag(factors) @ rgb_from_hed, np.float32)
    more = np.asarray(_STEPS * np.asarray(added) @ rgb_from_hed, np.float32)
    red, green, blue = _DENSITY[image]
    made = np.empty_like(image)
    for colour in range(3):
        density = red * mix[0, colour] + green * mix[1, colour] + blue * mix[2, colour] + more[colour]
        made[colour] = _BYTE[np.rint(density).clip(0, len(_BYTE) - 1).astype(np.int32)]
    return made


# A small classification task on real data: is a crop of stained tissue browner than the median crop?


MOST_PX = 1 << 26  # of the picture, which is held in memory together with its stains


class StainCrops:
    """`count` random square crops of a picture, with label 1 where the mean DAB is above the median over the crops.

    Half of the labels are therefore 1, and the task needs only the picture. The same arguments give the same crops.
    `corners` is (count, 2): the first row and column of each crop; `labels` is (count,), int64.

    Raises ImageError if the picture is smaller than a crop or too large for memory, or if `count` is less than 2.
    """

    def __init__(self, image: Source, size_px: int = 128, count: int = 256, seed: int = 0) -> None:
        picture = open_image(image)
        if not 1 <= size_px <= min(picture.shape()):
            raise ImageError(
                f"{picture.name} has {picture.shape()[0]} x {picture.shape()[1]} pixels, which no crop of "
                f"{size_px} x {size_px} fits. Use size_px from 1 to {min(picture.shape())}."
            )
        if math.prod(picture.shape()) > MOST_PX:
            raise ImageError(
                f"{picture.name} has {picture.shape()[0]} x {picture.shape()[1]} pixels, and crops are taken from at "
                f"most {MOST_PX}. Take them from a part: "
                "engines.images.picture.crop_picture(picture, y0, x0, height, width)."
            )
        if count < 2:
            raise ImageError(f"count={count} crops have no median between them. Use count >= 2.")
        self.size_px = size_px
        self._pixels = picture.read(0, 0, *picture.shape())
        random = np.random.default_rng(seed)
        self.corners = random.integers(0, [side - size_px + 1 for side in picture.shape()], size=(count, 2))
        stain = compute_dab(self._pixels)
        means = np.array([self._crop(stain, corner).mean() for corner in self.corners])
        self.labels = torch.from_numpy((means > np.median(means)).astype(np.int64))

    def __len__(self) -> int:
        return len(self.corners)

    def iterate_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, 3, size_px, size_px), float32, and labels (N,), in order, with N = `batch_size`.

        Each channel has mean 0 and deviation 1 over the whole picture. An incomplete last batch is dropped.
        Raises ImageError if there are fewer crops than one batch.
        """
        if not 1 <= batch_size <= len(self):
            raise ImageError(f"batch_size={batch_size}, but there are {len(self)} crops: use 1 to {len(self)}.")
        mean, deviation = self._pixels.mean((0, 1)), self._pixels.std((0, 1))
        for start in range(0, len(self) - batch_size + 1, batch_size):
            members = slice(start, start + batch_size)
            crops = np.stack([self._crop(self._pixels, corner) for corner in self.corners[members]])
            normalised = (crops.astype(np.float32) - mean) / np.maximum(deviation, 1.0)  # a flat channel becomes 0
            images = torch.from_numpy(normalised.astype(np.float32)).permute(0, 3, 1, 2).contiguous()
            yield images, self.labels[members]

    def _crop(self, array: NDArray[Any], corner: NDArray[np.int64]) -> NDArray[Any]:
        row, col = corner
        return array[row : row + self.size_px, col : col + self.size_px]


# Sample pictures that are included in required packages, so that nothing is downloaded.


def immunohistochemistry() -> Pixels:
    """Return the (512, 512, 3) pixels of stained colonic glands.

    The protein FHL2 is stained brown (DAB), the rest blue (haematoxylin). From the Center for Microscopy and Molecular
    Imaging (CMMI), no known copyright restrictions; the file is in scikit-image's wheel.
    """
    pixels: Pixels = skimage.data.immunohistochemistry()
    return pixels
