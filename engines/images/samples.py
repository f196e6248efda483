"""Sample pictures that are included in required packages, so that nothing is downloaded."""

from __future__ import annotations

import skimage.data

from engines.images.picture import Pixels

__all__ = ["immunohistochemistry"]


def immunohistochemistry() -> Pixels:
    """Return the (512, 512, 3) pixels of stained colonic glands.

    The protein FHL2 is stained brown (DAB), the rest blue (haematoxylin). From the Center for Microscopy and Molecular
    Imaging (CMMI), no known copyright restrictions; the file is in scikit-image's wheel.
    """
    pixels: Pixels = skimage.data.immunohistochemistry()
    return pixels
