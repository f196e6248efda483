"""Images as they might have been: mirrored, turned, cropped and coloured otherwise, all tiles of an image alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.images.dataset import LabelledImages, to_network_input
from engines.images.stains import restain
from engines.spatial.rng import sample_uniform
from engines.spatial.tiles import Span, Tile

__all__ = ["KINDS", "Augmented"]

KINDS = ("flip", "rotate", "stain", "brightness", "contrast")

_CPU = torch.device("cpu")
_DRAWS = 13  # random numbers of an image: 2 of its place, 3 of its symmetry, 6 of its stains, 2 of its light


@dataclass(frozen=True, slots=True)
class _GeometricTransform:
    """How an image of `size` comes from another: a rectangle of it from `corner`, transposed, then mirrored."""

    size: tuple[int, int]
    corner: tuple[int, int]
    transposed: bool = False
    mirrored: tuple[bool, bool] = (False, False)

    def find_source_tile(self, tile: Tile) -> Tile:
        """The pixels of the other image that become those of a tile."""
        rows, cols = (
            Span(size - span.stop, size - span.start) if mirrored else span
            for size, span, mirrored in zip(self.size, (tile.rows, tile.cols), self.mirrored, strict=True)
        )
        spans = (cols, rows) if self.transposed else (rows, cols)
        return Tile(*(Span(at + span.start, at + span.stop) for at, span in zip(self.corner, spans, strict=True)))

    def __call__(self, pixels: Tensor) -> Tensor:
        """(..., h, w) of the source of a tile -> those of the tile."""
        turned = pixels.transpose(-2, -1) if self.transposed else pixels
        return turned.flip([axis - 2 for axis in (0, 1) if self.mirrored[axis]]).contiguous()


class Augmented:
    """Other images, augmented in these `kinds` from each image's draw; without a draw they are as they are.

    `flip` mirrors, `rotate` turns by quarters (by halves where an image is not square), both with equal chances.
    `stain` changes the amounts of haematoxylin, eosin and DAB by up to the share `stain`, and adds up to that optical
    density of each. `brightness` and `contrast` change by up to the share `light`. With a `size` = (height, width),
    each image is a random rectangle of that size of the other; without a draw, its middle.
    Masks move with their images. Raises ImageError where a kind is unknown.

    >>> from engines.images.synthetic import SyntheticImages
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
        self.images, self.kinds, self.size = images, frozenset(kinds), size
        self.stain, self.light = stain, light

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.images.classes

    @property
    def ignore(self) -> Sequence[int]:
        """The numbers of masks that are no class."""
        return getattr(self.images, "ignore", ())

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """As the other image's."""
        return self.images.name(index)

    def slide(self, index: int) -> str:
        """As the other image's."""
        return self.images.slide(index)

    def label(self, index: int) -> int:
        """As the other image's."""
        return self.images.label(index)

    def shape(self, index: int) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.size or self.images.shape(index)

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(3, h, w). Raises ImageError where the image is too small for the crop, or cannot be read."""
        numbers = _sample_numbers(draw)
        pose = self._make_transform(index, numbers)
        pixels = pose(self.images.part(index, pose.find_source_tile(tile), draw))
        return pixels if numbers is None else self._jitter_colours(pixels, numbers[5:])

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(h, w): of the same pixels."""
        pose = self._make_transform(index, _sample_numbers(draw))
        return pose(self.images.mask(index, pose.find_source_tile(tile), draw))

    def check(self) -> None:
        """Raises ImageError where an image is too small for the crop; only headers are read for it, where they do."""
        for index in range(len(self) if self.size else 0):
            self._make_transform(index, None)

    def _make_transform(self, index: int, numbers: Sequence[float] | None) -> _GeometricTransform:
        whole = self.images.shape(index)
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
        # A turn is a transposition and one mirror, or two mirrors; any other symmetry is a flip.
        other = numbers[4] < 0.5 if "flip" in self.kinds else mirrored != transposed
        taken = size[::-1] if transposed else size
        corner = [int(number * (there - here + 1)) for number, there, here in zip(numbers, whole, taken, strict=False)]
        return _GeometricTransform(size, (corner[0], corner[1]), transposed, (mirrored, other))

    def _jitter_colours(self, pixels: Tensor, numbers: Sequence[float]) -> Tensor:
        """(3, h, w) -> (3, h, w); each pixel follows from itself alone."""
        moved = [2 * number - 1 for number in numbers]
        if "stain" in self.kinds:
            image = pixels.add(1).mul(127.5).round().byte().numpy()
            factors, added = [1 + self.stain * by for by in moved[:3]], [self.stain * by for by in moved[3:6]]
            pixels = to_network_input(restain(image, factors, added).transpose(1, 2, 0))
        if "contrast" in self.kinds:
            pixels = pixels.mul(1 + self.light * moved[6])
        if "brightness" in self.kinds:
            pixels = pixels.add(self.light * moved[7])
        return pixels.clamp(-1, 1)


def _sample_numbers(draw: int | None) -> list[float] | None:
    """Of [0, 1); None where nothing is drawn."""
    if draw is None:
        return None
    numbers: list[float] = sample_uniform(draw, 0, [(_DRAWS, 0, _DRAWS)], _CPU).tolist()
    return numbers
