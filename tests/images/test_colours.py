"""Palettes of 8 bits, and colour profiles, of files that are read in tiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from made_profiles import DISPLAY_P3, OPPONENTS
from PIL import Image, ImageCms

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import colour_profile
from mpi4dl_nb.engines.images.colour_profile import find_effect
from mpi4dl_nb.engines.images.picture import open_image

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
GREY = PIXELS[..., 0]
COLOURS = np.random.default_rng(1).integers(0, 256, (3, 256)).astype(np.uint16)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr(colour_profile, "_SAID", set())


@pytest.mark.parametrize("factor", [1, 257, 256], ids=["8 bits", "16 bits", "16 bits, shifted"])
@pytest.mark.parametrize(
    "options", [{}, {"tile": (16, 16)}, {"compression": "deflate"}, {"compression": "lzma"}], ids=str
)
def test_a_palette_has_16_bits_or_8(tmp_path: Path, factor: int, options: dict[str, object]):
    tifffile.imwrite(tmp_path / "a.tif", GREY, photometric="palette", colormap=COLOURS * np.uint16(factor), **options)
    assert np.array_equal(open_image(tmp_path / "a.tif").read(3, 5, 30, 40), COLOURS.T[GREY][3:33, 5:45])


@pytest.mark.parametrize("options", [{"tile": (16, 16)}, {"rowsperstrip": 8, "compression": "deflate"}], ids=str)
def test_the_profile_of_a_tiff_file_is_named_once(tmp_path: Path, options: dict[str, object]):
    for name, profile in (("a.tif", DISPLAY_P3), ("b.tif", DISPLAY_P3), ("c.tif", SRGB)):
        tifffile.imwrite(tmp_path / name, PIXELS, photometric="rgb", iccprofile=profile, **options)
    with pytest.warns(UserWarning, match=r"a\.tif: its colour profile 'RGB built-in' says .* used as they are stored"):
        found = open_image(tmp_path / "a.tif").read(0, 0, 40, 56)
    assert np.array_equal(found, PIXELS)
    for name in ("b.tif", "c.tif"):  # a second warning would be an error
        assert np.array_equal(open_image(tmp_path / name).read(0, 0, 40, 56), PIXELS)


def test_numbers_in_tiles_that_are_no_colours_are_refused(tmp_path: Path):
    tifffile.imwrite(tmp_path / "a.tif", PIXELS, photometric="rgb", iccprofile=OPPONENTS, tile=(16, 16))
    with pytest.raises(
        ImageError, match=r"a\.tif holds numbers that are red, green and blue only by its colour profile"
    ):
        open_image(tmp_path / "a.tif")


def make_slide(profile: object) -> SimpleNamespace:
    return SimpleNamespace(
        level_dimensions=[(56, 40)],
        level_downsamples=[1.0],
        read_region=lambda place, level, size: Image.fromarray(PIXELS).crop(
            (*place, place[0] + size[0], place[1] + size[1])
        ),
        color_profile=profile,
    )


def test_the_profile_of_a_slide_is_named_once():
    slide = make_slide(SimpleNamespace(tobytes=lambda: DISPLAY_P3))
    with pytest.warns(UserWarning, match="slide: its colour profile 'RGB built-in' says"):
        found = open_image(slide).read(0, 0, 40, 56)
    assert np.array_equal(found, PIXELS)
    assert open_image(make_slide(None)).shape() == (40, 56)
    with pytest.raises(ImageError, match="only by its colour profile"):
        open_image(make_slide(SimpleNamespace(tobytes=lambda: OPPONENTS)))


def test_what_is_no_profile_for_these_colours_is_passed_over():
    assert find_effect(b"junk" * 100, "RGB") is None
    assert find_effect(None, "RGB") is None
    assert find_effect(DISPLAY_P3, "L") is None
    assert find_effect(DISPLAY_P3, "CMYK") is None
