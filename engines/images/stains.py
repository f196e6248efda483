"""Stain amounts per pixel, augmentation of the staining, and a small classification task on stained tissue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from skimage.color import hed_from_rgb, rgb2hed, rgb_from_hed

from engines.images.picture import Pixels

__all__ = ["compute_dab", "restain"]

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
