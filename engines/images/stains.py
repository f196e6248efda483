"""How much of a stain lies at each pixel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from skimage.color import rgb2hed

from engines.images.picture import Pixels

__all__ = ["dab"]

_DAB = 2


def dab(image: Pixels) -> NDArray[np.float64]:
    """(H, W, 3) -> (H, W): the optical density of DAB (brown), by colour deconvolution.

    0 is none. Ruifrok and Johnston's method and stain colours, as scikit-image has them.
    """
    stains: NDArray[np.float64] = rgb2hed(image)
    return stains[..., _DAB]
