"""Augmentation by mirroring, rotation, cropping and colour changes, consistent across all tiles of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.color import hed_from_rgb, rgb_from_hed
from torch import Tensor

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages, Subset, parse_image_size, to_network_input
from mpi4dl_nb.engines.program.rng import sample_uniform

KINDS = ("flip", "rotate", "stain", "brightness", "contrast")
_OF_COLOURS = frozenset(KINDS[2:])

_DRAWS = 13  # random numbers per image: 2 for the crop, 3 for the symmetry, 6 for the stains, 2 for the light


@dataclass(frozen=True, slots=True)
class _GeometricTransform:
    """The map from a source to an image of `size`: crop a rectangle at `corner`, transpose it, then mirror it."""

    #     source           crop         transpose    mirror the rows: the image
    #     . . . . . .
    #     . a b c d .      a b c d      a e          d h
    #     . e f g h .      e f g h      b f          c g
    #     . . . . . .                   c g          b f
    #                                   d h          a e
    #
    # A rank augments its tile alone. It needs the inverse map of rectangles: its tile of the first two rows of the
    # image is made from columns c and d of the source. It reads only these, and transposes and mirrors them.

    size: tuple[int, int]
    corner: tuple[int, int]
    transposed: bool = False
    mirrored: tuple[bool, bool] = (False, False)

    def find_source_tile(self, tile: Tile) -> Tile:
        """Return the tile of the source that a tile of the image is made from."""
        # The steps are undone in reverse order: the mirrors, the transposition, the crop.
        rows, cols = (
            Span(size - span.stop, size - span.start) if mirrored else span
            for size, span, mirrored in zip(self.size, (tile.rows, tile.cols), self.mirrored, strict=True)
        )
        spans = (cols, rows) if self.transposed else (rows, cols)
        return Tile(*(Span(at + span.start, at + span.stop) for at, span in zip(self.corner, spans, strict=True)))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Transform the pixels of a source tile, (..., h, w), into those of the tile."""
        turned = pixels.transpose(-2, -1) if self.transposed else pixels
        return turned.flip([axis - 2 for axis in (0, 1) if self.mirrored[axis]]).contiguous()


class Augmented(Subset):
    """Images augmented by these `kinds`, as determined by each image's draw; unchanged without a draw.

    `flip` mirrors; `rotate` rotates by quarter turns (by half turns if a turned crop does not fit); each case has equal
    probability. `stain` changes the amounts of haematoxylin, eosin and DAB by up to the fraction `stain`, and adds up
    to that optical density of each. `brightness` and `contrast` change by up to the fraction `light`. With `size` =
    (height, width), an image is a random crop of that size; without a draw, the centre crop. The last three take pixels
    from -1 to 1, and clamp to these. Masks are transformed with their images.
    Raises ImageError if a kind is unknown or a fraction invalid.

    >>> from mpi4dl_nb.engines.images.dataset import SyntheticImages
    >>> from mpi4dl_nb import Augmented
    >>> images = Augmented(SyntheticImages(8, (64, 64), classes=3), kinds=("flip", "rotate"), size=(32, 32))
    >>> len(images), images.shape(0)
    (8, (32, 32))
    """

    def __init__(
        self,
        images: LabelledImages,
        kinds: Sequence[str] = ("flip", "rotate"),
        size: tuple[int, int] | None = None,
        stain: float = 0.05,
        light: float = 0.1,
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ImageError(f"There is no augmentation {unknown[0]!r}. Choose among {', '.join(KINDS)}.")
        if not (0 <= stain < 1 and 0 <= light < 1):
            raise ImageError(f"stain={stain} and light={light} are shares: use numbers from 0 to less than 1.")
        size = size if size is None else parse_image_size(size)
        super().__init__(images, range(len(images)))
        self.kinds, self.size, self.stain, self.light = frozenset(kinds), size, stain, light

    def shape(self, index: int) -> tuple[int, int]:
        return self.size or super().shape(index)

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the augmented pixels of a tile, (3, h, w).

        Raises ImageError if the image is too small for the crop, cannot be read, or has colours beyond -1 to 1.
        """
        numbers = _sample_numbers(draw)
        pose = self._make_transform(index, numbers)
        pixels = pose(super().part(index, pose.find_source_tile(tile), draw))
        if numbers is None or not self.kinds & _OF_COLOURS:
            return pixels
        if not (most := pixels.abs().max()) <= 1:  # would be clamped, or taken for other bytes
            raise ImageError(
                f"{self.name(index)} has pixels up to {most:g}, but {', '.join(sorted(self.kinds & _OF_COLOURS))} "
                "changes those from -1 to 1. Give such pixels and normalise them in the model, or choose other kinds."
            )
        # The colours: each result depends only on its own pixel, so that tiles agree.
        moved = [2 * sample - 1 for sample in numbers[5:]]
        if "stain" in self.kinds:
            # Stains are tabulated for bytes. The inverse of `to_network_input` is exact after rounding.
            image = pixels.add(1).mul(127.5).round().byte().numpy()
            factors, added = [1 + self.stain * by for by in moved[:3]], [self.stain * by for by in moved[3:6]]
            pixels = to_network_input(restain(image, factors, added).transpose(1, 2, 0))
        if "contrast" in self.kinds:
            pixels = pixels.mul(1 + self.light * moved[6])
        if "brightness" in self.kinds:
            pixels = pixels.add(self.light * moved[7])
        return pixels.clamp(-1, 1)

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        pose = self._make_transform(index, _sample_numbers(draw))
        return pose(super().mask(index, pose.find_source_tile(tile), draw))

    def check(self) -> None:
        """Raise ImageError if an image is too small for the crop; only headers are read, where they suffice."""
        for index in range(len(self) if self.size else 0):
            self._make_transform(index, None)

    def _make_transform(self, index: int, numbers: Sequence[float] | None) -> _GeometricTransform:
        # The random numbers have fixed places: [0:2] the crop, [2] the transposition, [3:5] the mirrors, [5:] the
        # colours. All of them are drawn whatever the kinds, so that another kind more does not change the crops.
        whole = super().shape(index)
        size = self.size or whole
        if size[0] > whole[0] or size[1] > whole[1]:
            raise ImageError(
                f"{self.name(index)} has {whole[0]} x {whole[1]} pixels, of which no {size[0]} x {size[1]} can be "
                "cropped. Use a smaller image size, or scale the images instead."
            )
        if numbers is None:
            return _GeometricTransform(size, ((whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2))
        fits = size[1] <= whole[0] and size[0] <= whole[1]
        transposed = "rotate" in self.kinds and fits and numbers[2] < 0.5
        mirrored = ("flip" in self.kinds or "rotate" in self.kinds) and numbers[3] < 0.5
        # The symmetries of a square are a transposition and two mirrors, each on or off. Rotations are those with an
        # even number of them, so without "flip" the second mirror follows from the other two.
        other = numbers[4] < 0.5 if "flip" in self.kinds else mirrored != transposed
        taken = size[::-1] if transposed else size
        corner = [int(sample * (there - here + 1)) for sample, there, here in zip(numbers, whole, taken, strict=False)]
        return _GeometricTransform(size, (corner[0], corner[1]), transposed, (mirrored, other))


def _sample_numbers(draw: int | None) -> list[float] | None:
    """Return the random numbers of a draw, in [0, 1), or None without a draw."""
    if draw is None:
        return None
    return sample_uniform(draw, 0, [(_DRAWS, 0, _DRAWS)], torch.device("cpu")).tolist()


# Augmentation of the staining of tissue.


_STEPS = 1 << 12  # per unit of optical density; before rounding, a byte is off by at most a thirtieth
_DENSITY = (-_STEPS * np.log((np.arange(256) + 1) / 256)).astype(np.float32)
"""The optical density of each byte value, in steps; 1 is added to the value so that black has a finite density."""
_BYTE = np.rint(256 * np.exp(-np.arange(6 * _STEPS) / _STEPS) - 1).clip(0, 255).astype(np.uint8)
"""The byte value of each optical density in steps: the inverse of `_DENSITY`."""


def restain(image: NDArray[np.uint8], factors: Sequence[float], added: Sequence[float]) -> NDArray[np.uint8]:
    """Scale the amounts of haematoxylin, eosin and DAB by `factors` and add the densities `added`: (3, H, W) -> same.

    (Tellez et al., 2018, "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference to train
    distilled stain-invariant convolutional networks", IEEE TMI 37: section III-C.) Each result depends bit for bit only
    on its own pixel: sums are written out and functions tabulated, since library routines round slightly differently at
    the borders of an array.

    >>> from mpi4dl_nb import immunohistochemistry, restain
    >>> pixels = immunohistochemistry().transpose(2, 0, 1)
    >>> pale = restain(pixels, factors=(1, 0.4, 0.4), added=(0, 0, 0))
    >>> pale.shape, bool(pale.mean() > pixels.mean())
    ((3, 512, 512), True)
    """
    #     optical density of red, green, blue  --hed_from_rgb-->  amounts of stains
    #         amounts * factors + added        --rgb_from_hed-->  optical density
    #
    # The three linear steps are one matrix and one vector, so that no stain is ever computed.
    mix = np.asarray(hed_from_rgb @ np.diag(factors) @ rgb_from_hed, np.float32)
    more = np.asarray(_STEPS * np.asarray(added) @ rgb_from_hed, np.float32)
    red, green, blue = _DENSITY[image]
    restained = np.empty_like(image)
    for colour in range(3):
        density = red * mix[0, colour] + green * mix[1, colour] + blue * mix[2, colour] + more[colour]
        restained[colour] = _BYTE[np.rint(density).clip(0, len(_BYTE) - 1).astype(np.int32)]
    return restained
