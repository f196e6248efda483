"""A made file for each row of the table of metadata, held against the project's readers and independent ones."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.mask_file import MaskFile
from mpi4dl_nb.engines.images.picture import open_image

Array = NDArray[Any]
Expected = Array | str
"""The right numbers, or a pattern that the error matches."""


class MetadataRow(NamedTuple):
    """A row of `docs/metadata.md`: what is done with one tag, attribute or order in a picture, and in a mask.

    `mask` is None if masks are not read from the format.
    """

    name: str
    where: str
    changes: str
    picture: str
    mask: str | None
    how: str


def _read_sections() -> dict[str, list[MetadataRow]]:
    """The rows of the page by the titles of its sections, which are formats."""
    sections: dict[str, list[MetadataRow]] = {}
    text = (Path(__file__).parents[2] / "docs" / "metadata.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        title, _, *lines = section.splitlines()
        cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:] if line]
        sections[title] = [MetadataRow(*row)._replace(mask=None if row[4] == "–" else row[4]) for row in cells]
    return sections


SECTIONS = _read_sections()


@dataclass(frozen=True)
class MadeFile:
    """How to make a file in a folder, and what is right for it as a picture and as a mask.

    `write` gets an empty folder and returns the path to open. `picture` is (H, W) or (H, W, 3) bytes, and `mask` (H, W)
    classes, or patterns of errors (None: the row has no masks). `naive` is the picture for a reader that passes the row
    over: what is read has to differ from it, and what is ignored has to be equal to it. `others` are independent
    readers of the same file, each with the right numbers (None: `picture`). `write_mask` makes another file for the
    mask, and `options` are those of `MaskFile`.
    """

    write: Callable[[Path], Path]
    picture: Expected
    mask: Expected | None = None
    naive: Array | None = None
    others: Mapping[Callable[[Path], Array], Array | None] = field(default_factory=dict)
    write_mask: Callable[[Path], Path] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"classes": 256})


def list_rows_without_files(rows: Iterable[MetadataRow], made: Mapping[str, object]) -> list[str]:
    """Names that stand only in the table, or only among the made files."""
    return sorted({row.name for row in rows} ^ set(made))


def check_row(row: MetadataRow, made: MadeFile, folder: Path) -> None:
    """Hold a row against the readers of pictures and masks, and against independent readers."""
    assert isinstance(made.picture, str) == (row.picture == "refused"), "the table says read, and the file refused"
    assert (made.mask is None) == (row.mask is None)
    path = made.write(folder)
    _check_picture(row, made, path)
    if made.mask is not None:
        assert isinstance(made.mask, str) == (row.mask == "refused")
        (folder / "mask").mkdir()
        _check_mask(made, made.write_mask(folder / "mask") if made.write_mask else path)
    for reader, numbers in made.others.items():
        expected = made.picture if numbers is None else numbers
        assert np.array_equal(expand_channels(reader(path)), expand_channels(expected)), reader.__name__


def expand_channels(pixels: Array) -> Array:
    """(H, W) or (H, W, 1) -> (H, W, 3); more channels stay."""
    pixels = np.atleast_3d(pixels)
    return np.broadcast_to(pixels, (*pixels.shape[:2], max(3, pixels.shape[2])))


def _check_picture(row: MetadataRow, made: MadeFile, path: Path) -> None:
    if isinstance(made.picture, str):
        check_refused(lambda: read_picture(path), made.picture)
        return
    found, expected = read_picture(path), expand_channels(made.picture)
    assert np.array_equal(found, expected)
    if made.naive is not None:
        assert np.array_equal(found, expand_channels(made.naive)) == (row.picture == "ignored")


def _check_mask(made: MadeFile, path: Path) -> None:
    if isinstance(made.mask, str):
        check_refused(lambda: read_mask(path, **made.options), made.mask)
    else:
        assert np.array_equal(read_mask(path, **made.options), made.mask)


def check_refused(read: Callable[[], object], pattern: str) -> None:
    """Its error is typed, matches, and speaks of damage only if the pattern does."""
    with pytest.raises(ImageError, match=pattern) as caught:
        read()
    assert ("damaged" in pattern) == bool(re.search("damaged|export it again", str(caught.value)))


def write_packed_tiff(path: Path, numbers: Array, bits: int) -> None:
    """Write (H, W) numbers of `bits` each: as rows of bytes, whose tags are changed then (few encoders pack them)."""
    digits = (numbers[..., None] >> np.arange(bits)[::-1]) & 1
    tifffile.imwrite(path, np.packbits(digits.astype(bool).reshape(len(numbers), -1), axis=1))
    with tifffile.TiffFile(path, mode="r+b") as file:
        tags = file.pages[0].tags
        tags["ImageWidth"].overwrite(numbers.shape[1])
        tags["BitsPerSample"].overwrite(bits)


def read_picture(path: Path) -> Array:
    picture = open_image(path)
    return picture.read(0, 0, *picture.shape())


def read_mask(path: Path, classes: int = 256, **options: Any) -> Array:
    mask = MaskFile(path, classes, **options)
    return mask.read(Tile.whole(*mask.shape))


# Independent readers, for `MadeFile.others`.


def read_by_pillow(path: Path) -> Array:
    from PIL import Image, ImageOps

    # From bytes: of a plain TIFF file by name, Pillow 13 maps the memory and turns it wrongly (Orientation 5 to 8).
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        image.load()  # this turns a TIFF image upright, and `exif_transpose` the others
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def read_by_tifffile(path: Path) -> Array:
    """The numbers of the first series, with channels last."""
    import tifffile

    found = tifffile.imread(path)
    return np.moveaxis(found, 0, -1) if found.ndim == 3 and found.shape[0] == 3 else found


def read_by_gdal(path: Path) -> Array:
    """The numbers of all bands, with channels last."""
    import rasterio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        source = rasterio.open(path)
    with source:
        return np.moveaxis(source.read(), 0, -1)


def read_by_openslide(path: Path) -> Array:
    """Level 0 on white."""
    import openslide

    with openslide.OpenSlide(path) as slide:
        found = np.array(slide.read_region((0, 0), 0, slide.dimensions)).astype(int)
    return ((found[..., :3] * found[..., 3:] + 255 * (255 - found[..., 3:]) + 127) // 255).astype(np.uint8)


def read_by_zarr(path: Path) -> Array:
    """Level 0 of an OME-Zarr group, or an array, as it is stored."""
    import zarr

    found = zarr.open(path, mode="r")
    return np.asarray(found[...] if isinstance(found, zarr.Array) else found["0"][...])
