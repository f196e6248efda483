"""Pictures in memory: NumPy arrays and torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engines.errors import ImageError
from engines.images.picture_reader import Level, PictureReader, Pixels

__all__ = ["ArrayPicture", "composite_on_white", "convert_array", "convert_tensor"]


class ArrayPicture(PictureReader):
    """A picture in memory, (H, W, 3)."""

    def __init__(self, name: str, pixels: Pixels) -> None:
        super().__init__(name, [Level(*pixels.shape[:2])])
        self.pixels = pixels

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        out[:] = self.pixels[y0 : y0 + out.shape[0], x0 : x0 + out.shape[1]]


def composite_on_white(rgba: Pixels) -> Pixels:
    """Composite transparent pixels on white: (H, W, 4) -> (H, W, 3)."""
    image = Image.fromarray(rgba)
    if image.getextrema()[3] != (255, 255):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def convert_tensor(tensor: torch.Tensor) -> Pixels:
    """Convert a tensor to pixels: (C, H, W) -> (H, W, 3). Raises ImageError if the tensor is no picture."""
    if tensor.dim() != 3:
        raise ImageError(f"The tensor has shape {tuple(tensor.shape)}, but a picture is (C, H, W).")
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.dtype is torch.bfloat16 else plain
    return convert_array(plain.permute(1, 2, 0).numpy(), "The tensor")


def convert_array(array: NDArray[np.generic], what: str) -> Pixels:
    """Convert an array to pixels: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) -> (H, W, 3).

    Raises ImageError if it is no picture; `what` names the array in the message.
    """
    # Floats are taken only from 0 to 1. Scaling any other range to its own extremes would look plausible, but two
    # pictures, or two tiles of one, would then be scaled by different factors.
    floating = np.issubdtype(array.dtype, np.floating)
    if array.dtype == np.uint8:
        pixels = array.astype(np.uint8)
    elif floating and array.size and array.min() >= 0 and array.max() <= 1:
        pixels = np.rint(array.astype(np.float64) * 255).astype(np.uint8)
    else:
        found = f"from {array.min():g} to {array.max():g}" if floating and array.size else "of more than 8 bits"
        raise ImageError(
            f"{what} holds {array.dtype} numbers {found if array.dtype != bool else 'for true and false'}. "
            "A picture has uint8 from 0 to 255, or floats from 0 to 1."
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise ImageError(
            f"{what} has shape {array.shape}, but a picture has 1, 3 or 4 channels: "
            "(H, W, C) as an array, (C, H, W) as a tensor."
        )
    if pixels.shape[2] == 4:
        return composite_on_white(pixels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
