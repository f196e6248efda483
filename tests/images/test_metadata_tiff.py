"""A made file for each row of the sections TIFF and OME-TIFF of the table of metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from made_files import MadeFile, by_pillow, check_row, list_rows_without_files

from engines.images.metadata.tiff import TIFF

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
GREY = PIXELS[..., 0]


def make(pixels: np.ndarray, **options: Any) -> Callable[[Path], Path]:
    """How to write one page with tifffile."""

    def write(folder: Path) -> Path:
        tifffile.imwrite(folder / "a.tif", pixels, **{"photometric": "minisblack", "metadata": None} | options)
        return folder / "a.tif"

    return write


MADE: dict[str, MadeFile] = {
    "Orientation": MadeFile(
        make(GREY, extratags=[(274, "H", 1, 6, True)]),
        np.rot90(GREY, -1),
        np.rot90(GREY, -1),
        others={by_pillow: None},
    ),
}


def test_every_row_has_a_made_file():
    assert list_rows_without_files(TIFF, MADE) == []


@pytest.mark.parametrize("row", TIFF, ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    check_row(row, MADE[row.name], tmp_path)
