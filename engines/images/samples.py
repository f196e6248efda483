"""Real pictures that come with the packages we need anyway: nothing is downloaded."""

from __future__ import annotations

import skimage.data

from engines.images.picture import Pixels

__all__ = ["immunohistochemistry"]


def immunohistochemistry() -> Pixels:
    """(512, 512, 3): colonic glands; the protein FHL2 is stained brown (DAB), the rest blue (haematoxylin).

    From the Center for Microscopy and Molecular Imaging (CMMI), no known copyright restrictions; the file
    lies inside scikit-image's wheel.
    """
    pixels: Pixels = skimage.data.immunohistochemistry()
    return pixels
