"""Colours of the numbers that a TIFF page stores: shades, white is zero, palettes, few bits, transparency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffPage

from mpi4dl_nb.engines.images.picture_reader import WHITE, Pixels, composite_on_white
from mpi4dl_nb.engines.images.pillow import to_8_bit_colours
from mpi4dl_nb.engines.images.tiff_layout import (
    MULTIPLIED,
    PALETTE,
    WHITE_IS_ZERO,
    find_alpha_channel,
    get_colour_count,
)


@dataclass(frozen=True, eq=False)
class ColourRule:
    """How the numbers of all pages of a picture, (H, W, channels), become RGB on white.

    One channel of shades or indices is looked up in `table`, (numbers, 3); three are colours, times `factor`, which
    spreads few bits over 0 ... 255, and inverted if white is zero. `alpha` is the channel of transparency, if any.
    """

    table: Pixels | None
    factor: int
    is_inverted: bool
    alpha: int | None
    is_multiplied: bool

    @classmethod
    def of(cls, pages: Sequence[TiffPage]) -> ColourRule:
        """Return the rule for the pages of a picture: one with all channels, or one for each of three colours."""
        page = pages[0]
        alpha = find_alpha_channel(page) if len(pages) == 1 else None
        multiplied = alpha is not None and page.extrasamples[alpha - get_colour_count(page)] == MULTIPLIED
        levels, inverted = 1 << int(page.bitspersample), page.photometric == WHITE_IS_ZERO
        factor, table = WHITE // (levels - 1), None
        if page.photometric == PALETTE:
            table = read_palette(page)
        elif len(pages) == 1 and get_colour_count(page) == 1:
            shades = (np.arange(levels) * factor).astype(np.uint8)
            table = np.repeat((WHITE - shades if inverted else shades)[:, None], 3, axis=1)
        return cls(table, factor, inverted, alpha, multiplied)

    @property
    def is_plain(self) -> bool:
        """Whether three channels are the colours as they are."""
        return self.table is None and self.factor == 1 and not self.is_inverted and self.alpha is None

    def convert(self, numbers: NDArray[np.uint8 | np.bool_]) -> Pixels:
        """Return the colours, (H, W, channels) -> (H, W, 3)."""
        numbers = numbers.view(np.uint8)
        if self.table is not None:
            colours = self.table[numbers[..., 0]]
        else:
            colours = numbers[..., :3] * np.uint8(self.factor)
            colours = WHITE - colours if self.is_inverted else colours
        if self.alpha is None:
            return colours
        alpha = numbers[..., self.alpha, None] * np.uint8(self.factor)
        if self.is_multiplied:  # a colour cannot be brighter than its share of the light
            return np.minimum(colours, alpha) + (WHITE - alpha)
        return composite_on_white(np.concatenate([colours, alpha], axis=2))


def read_palette(page: TiffPage) -> Pixels:
    """Return the colours of a page's ColorMap, (numbers, 3)."""
    return to_8_bit_colours(np.asarray(page.colormap, np.uint16)).T
