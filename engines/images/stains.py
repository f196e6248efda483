"""How much of a stain lies at each pixel, and pictures as if they had been stained a little otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from skimage.color import hed_from_rgb, rgb2hed, rgb_from_hed

from engines.images.picture import Pixels

__all__ = ["compute_dab", "restain"]

_DAB = 2
_STEPS = 1 << 12  # per unit of optical density; a byte is never off by more than a thirtieth before it is rounded
_DENSITY = (-_STEPS * np.log((np.arange(256) + 1) / 256)).astype(np.float32)
"""The optical density that each byte stands for, in steps, with 1 added so that black has one too."""
_BYTE = np.rint(256 * np.exp(-np.arange(6 * _STEPS) / _STEPS) - 1).clip(0, 255).astype(np.uint8)
"""And back."""


def compute_dab(image: Pixels) -> NDArray[np.float64]:
    """(H, W, 3) -> (H, W): the optical density of DAB (brown), by colour deconvolution.

    0 is none. Ruifrok and Johnston's method and stain colours, as scikit-image has them.
    """
    stains: NDArray[np.float64] = rgb2hed(image)
    return stains[..., _DAB]


def restain(image: NDArray[np.uint8], factors: Sequence[float], added: Sequence[float]) -> NDArray[np.uint8]:
    """(3, H, W) -> (3, H, W): with so many times as much haematoxylin, eosin and DAB, and so much density more of each.

    (Tellez et al., 2018, "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference to train
    distilled stain-invariant convolutional networks", IEEE TMI 37: section III-C.) A pixel follows from itself alone,
    to the bit: sums are written out and functions looked up, since libraries compute both a little differently at the
    borders of an array.
    """
    mix = np.asarray(hed_from_rgb @ np.diag(factors) @ rgb_from_hed, np.float32)
    more = np.asarray(_STEPS * np.asarray(added) @ rgb_from_hed, np.float32)
    red, green, blue = _DENSITY[image]
    made = np.empty_like(image)
    for colour in range(3):
        density = red * mix[0, colour] + green * mix[1, colour] + blue * mix[2, colour] + more[colour]
        made[colour] = _BYTE[np.rint(density).clip(0, len(_BYTE) - 1).astype(np.int32)]
    return made
