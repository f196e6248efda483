"""Volumes and signals in memory, whose sections are pictures in grey."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.draw.figure import format_size
from mpi4dl_nb.draw.navigation import RasterCache, are_integers
from mpi4dl_nb.draw.packed_tables import pack_tables
from mpi4dl_nb.draw.sections import Section, list_sections
from mpi4dl_nb.engines.checks import is_integer
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.formatting import format_number
from mpi4dl_nb.engines.geometry.tiles import Tile, find_compact_grid
from mpi4dl_nb.engines.images.picture import Source, open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Picture, Pixels
from mpi4dl_nb.engines.plan import Plan

KEPT = 12  # cached sections
WHITE = 255


class SectionRasters(RasterCache):
    """A section of a volume: a picture of the grey of its numbers (rows, columns), and the numbers."""

    cell_words, cell_order = "number", ""

    def __init__(self, name: str, grey: Pixels, values: NDArray[Any]) -> None:
        super().__init__(ArrayPicture(name, np.repeat(grey[..., None], 3, axis=2)))
        self.values = values

    def list_cells(self, layer_px: tuple[int, int], view: Tile) -> list[list[list[str]]]:
        assert layer_px == self.values.shape, "numbers are written where a layer reads the volume itself"
        part = self.values[view.to_slices(Tile.whole(*layer_px))]
        return [[[format_number(float(value))] for value in row] for row in part]


class Volume:
    """One channel of a volume (C, D, H, W), or of a signal (C, L), of which sections are drawn in grey.

    One scale of grey holds for all sections: `low`, the least number of the channel, is black, and `high` is white.
    """

    microns_per_px: float | None = None  # a tensor has no unit of length

    def __init__(self, tensor: torch.Tensor, channel: int = 0) -> None:
        if tensor.dim() not in (2, 4) or not tensor.numel():
            raise ImageError(
                f"The tensor has shape {tuple(tensor.shape)}, but a volume is (C, D, H, W) and a signal (C, L): one of "
                "a batch, such as volumes[0]."
            )
        if not is_integer(channel) or not 0 <= channel < len(tensor):
            raise ImageError(f"channel={channel!r} is none of the {len(tensor)} channels: use 0 to {len(tensor) - 1}.")
        self.name = "volume" if tensor.dim() == 4 else "signal"
        self.channels, self.channel = len(tensor), channel
        plain = tensor[channel].detach().cpu()
        self.values: NDArray[Any] = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()
        self.get_rasters = lru_cache(KEPT)(self._make_rasters)

    def shape(self) -> tuple[int, ...]:
        """Return the sizes along planes, rows and columns."""
        return self.values.shape

    @cached_property
    def span(self) -> tuple[float, float]:
        """The least and the largest finite number: black and white."""
        known = self.values[np.isfinite(self.values)]
        return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)

    @property
    def scale_words(self) -> str:
        """The scale of grey, in words."""
        low, high = map(format_number, self.span)
        of = f" of channel {self.channel} of {self.channels}" if self.channels > 1 else ""
        return f"Grey shows the numbers{of} from {low} (black) to {high} (white)"

    def make_grey(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return numbers as grey from 0 to 255. What is no finite number is black or white, or 0 if it is none."""
        low, high = self.span
        shares = np.nan_to_num((values.astype(np.float64) - low) / ((high - low) or 1), nan=0, posinf=1, neginf=0)
        return np.rint(shares * WHITE).astype(np.uint8)

    def _make_rasters(self, section: Section) -> RasterCache:
        values = section.select(self.values)
        return SectionRasters(self.name, self.make_grey(values), values)


# What a page gets of a volume: all of it, as coarsely as it must be, and exact sections on request.

MOST_GREY = 1 << 20  # bytes: pixels of the volume that a page has


def pack_grey(volume: Volume, most_bytes: int = MOST_GREY) -> tuple[bytes, str]:
    """Return the grey of every few planes, rows and columns, packed: `sizes`, and the bytes `grey`, deflated.

    Return what is left out of it as well, in words, or "".
    """
    steps = [1] * len(volume.shape())
    while True:
        part = volume.values[tuple(slice(step // 2, None, step) for step in steps)]
        packed = b"" if part.size > MOST_GREY else zlib.compress(volume.make_grey(part).tobytes())
        if part.size == 1 or 0 < len(packed) <= most_bytes:
            words = f"The page has one pixel for {format_size(steps)} of the {volume.name}; the others are left out."
            return pack_tables({"sizes": part.shape, "grey": packed}), words if max(steps) > 1 else ""
        steps[part.shape.index(max(part.shape))] *= 2


def encode_section(volume: Volume, number: int, position: int) -> bytes:
    """Return one section as a PNG file: `number` is its place in `list_sections`."""
    section = list_sections([position] * len(volume.shape()))[number]
    buffer = io.BytesIO()
    Image.fromarray(volume.make_grey(section.select(volume.values))).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def are_sections(asked: object, sizes: Sequence[int]) -> bool:
    """Return whether these are sections of a volume of these sizes: [number, position] each.

    >>> are_sections([[0, 4], [2, 7]], (5, 6, 8)), are_sections([[0, 5]], (5, 6, 8)), are_sections([[3, 0]], (5, 6, 8))
    (True, False, False)
    """
    if not isinstance(asked, list) or len(asked) > sum(sizes):
        return False
    across = [section.across for section in list_sections([0] * len(sizes))]
    return all(
        are_integers(pair, 2)
        and 0 <= pair[0] < len(across)
        and all(0 <= pair[1] < sizes[axis] for axis in across[pair[0]])
        for pair in asked
    )


def is_position(position: object, sizes: Sequence[int]) -> bool:
    """Return whether this is a pixel: a number for each axis.

    >>> is_position([4, 5, 7], (5, 6, 8)), is_position([4, 5], (5, 6, 8)), is_position([5, 5, 7], (5, 6, 8))
    (True, False, False)
    """
    return are_integers(position, len(sizes)) and all(0 <= px < size for px, size in zip(position, sizes, strict=True))


def open_shown(source: Source | Volume, plan: Plan, channel: int | None = None) -> tuple[Picture | Volume, Plan]:
    """Open what is drawn in tiles, and return it with the plan for its size.

    It is a picture as `open_image` opens it, or a volume (C, D, H, W) or signal (C, L) in memory. Raises ImageError if
    it is neither, or if the plan cuts other axes.
    """
    if not (isinstance(source, Volume) or (isinstance(source, torch.Tensor) and source.dim() != 3)):
        picture = open_image(source)
        if channel is not None:
            raise ImageError(f"channel={channel!r} is of volumes and signals. A picture has colours: leave it out.")
        return picture, _fit(plan, picture.shape(), "Give a volume as a tensor (C, D, H, W), a signal as (C, L)")
    volume = source if isinstance(source, Volume) else Volume(source, channel or 0)
    return volume, _fit(plan, volume.shape(), "A picture is a tensor (C, H, W), such as images[0] of a batch")


def _fit(plan: Plan, sizes: Sequence[int], other: str) -> Plan:
    """Return the plan for these sizes. Raises ImageError, with what `other` could be meant, if it cuts other axes."""
    plan = plan.fit(sizes)
    grid = plan.grids[0]
    if len(grid) != len(sizes):
        raise ImageError(
            f"The plan cuts along {len(grid)} axes ({grid} tiles), but this has {len(sizes)}, of sizes "
            f"{' x '.join(map(str, sizes))}. Use slice_method='{find_compact_grid(sizes, grid.tiles)}'. {other}."
        )
    return plan
