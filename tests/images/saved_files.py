"""A picture and its mask, in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.images.example_files import CLASSES, PIXELS, save_image


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A picture and its mask."""
    folder = tmp_path_factory.mktemp("files")
    return save_image(folder / "picture.png", PIXELS), save_image(folder / "mask.png", CLASSES)
