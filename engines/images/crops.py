"""A small classification task on real data: is a crop of stained tissue browner than the median crop?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.errors import ImageError
from engines.images.picture import Source, open_image
from engines.images.stains import compute_dab

__all__ = ["StainCrops"]

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
                "engines.images.region_picture.crop_picture(picture, y0, x0, height, width)."
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
