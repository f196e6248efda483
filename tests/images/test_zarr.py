"""Zarr arrays and OME-Zarr groups."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr
from made_slides import tissue

from engines.errors import ImageError
from engines.images import zarr as reader
from engines.images.picture import open_image
from engines.images.reader import Level

PIXELS = tissue(150, 200)
BOX = (31, 50, 70, 90)
CUT = PIXELS[31:101, 50:140]


def saved(path: Path, array: np.ndarray, **options: object) -> Path:
    zarr.create_array(path, data=array, chunks=tuple(min(64, side) for side in array.shape), **options)
    return path


def pyramid(path: Path, version: str = "0.5") -> Path:
    """OME-NGFF, channels first, two levels, a pixel of 0.5 micrometres."""
    group = zarr.open_group(path, mode="w", zarr_format=3 if version == "0.5" else 2)
    for name, step in (("0", 1), ("1", 2)):
        data = PIXELS[::step, ::step].transpose(2, 0, 1)[None]
        group.create_array(name, data=data, chunks=(1, 3, 64, 64))
    axes = [{"name": axis, **({"unit": "micrometer"} if axis in "yx" else {})} for axis in "tcyx"]
    scales = [[1, 1, 0.5, 0.5], [1, 1, 1.0, 1.0]]
    datasets = [
        {"path": str(number), "coordinateTransformations": [{"type": "scale", "scale": scale}]}
        for number, scale in enumerate(scales)
    ]
    told = {"multiscales": [{"version": version, "axes": axes, "datasets": datasets}]}
    group.attrs.update({"ome": told} if version == "0.5" else told)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_is_a_picture(tmp_path, version):
    opened = open_image(saved(tmp_path / "a.zarr", PIXELS, zarr_format=version))
    assert opened.levels == (Level(150, 200),)
    assert opened.microns_per_px is None
    assert np.array_equal(opened.read(*BOX), CUT)
    assert np.array_equal(pickle.loads(pickle.dumps(opened)).read(*BOX), CUT)
    assert opened.bytes_read == CUT.nbytes


def test_grey_and_channels_first(tmp_path):
    assert np.array_equal(open_image(saved(tmp_path / "first", PIXELS.transpose(2, 0, 1))).read(*BOX), CUT)
    grey = open_image(saved(tmp_path / "grey", PIXELS[..., 0])).read(*BOX)
    assert np.array_equal(grey, np.repeat(CUT[..., :1], 3, axis=2))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_an_ome_zarr_group_has_levels(tmp_path, version):
    opened = open_image(pyramid(tmp_path / "a.zarr", version))
    assert opened.levels == (Level(150, 200), Level(75, 100, 2.0))
    assert opened.microns_per_px == 0.5
    assert np.array_equal(opened.read(*BOX), CUT)
    assert np.array_equal(opened.read(10, 20, 30, 40, 1), PIXELS[::2, ::2][10:40, 20:60])


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (PIXELS.astype(np.uint16), "holds uint16 numbers"),
        (PIXELS[0, 0], r"shape \(3,\), but a picture is"),
        (np.zeros((2, 5, 6, 3), np.uint8), r"shape \(2, 5, 6, 3\)"),
        (np.zeros((5, 60, 70), np.uint8), r"has 5 channels .axes cyx"),
    ],
    ids=str,
)
def test_what_is_no_picture_is_refused(tmp_path, array, reason):
    with pytest.raises(ImageError, match=reason):
        open_image(saved(tmp_path / "a.zarr", array))


def test_a_group_without_levels_is_refused(tmp_path):
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("one", data=PIXELS)
    with pytest.raises(ImageError, match=r"a\.zarr is a Zarr group of one, and no OME-Zarr picture"):
        open_image(tmp_path / "a.zarr")


def test_a_damaged_store_is_told(tmp_path):
    (saved(tmp_path / "a.zarr", PIXELS) / "zarr.json").write_text("{")
    with pytest.raises(ImageError, match=r"a\.zarr is damaged"):
        open_image(tmp_path / "a.zarr")
    opened = open_image(saved(tmp_path / "b.zarr", PIXELS))
    next(path for path in sorted((tmp_path / "b.zarr" / "c").rglob("*")) if path.is_file()).write_bytes(b"no chunk")
    with pytest.raises(ImageError, match=r"b\.zarr is damaged"):
        opened.read(0, 0, 150, 200)


def test_without_the_extra_its_name_is_told(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.zarr", PIXELS)
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match=r"a\.zarr is a Zarr store: pip install 'mpi4dl_nb\[zarr\]'"):
        open_image(path)
