"""Zarr arrays and OME-Zarr groups."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr
from made_slides import make_tissue

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import zarr as reader
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import Level

PIXELS = make_tissue(150, 200)
BOX = (31, 50, 70, 90)
CUT = PIXELS[31:101, 50:140]


def save_array(path: Path, array: np.ndarray, **options: object) -> Path:
    zarr.create_array(path, data=array, chunks=tuple(min(64, side) for side in array.shape), **options)
    return path


def write_pyramid(path: Path, version: str = "0.5") -> Path:
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
    opened = open_image(save_array(tmp_path / "a.zarr", PIXELS, zarr_format=version))
    assert opened.levels == (Level(150, 200),)
    assert opened.microns_per_px is None
    assert np.array_equal(opened.read(*BOX), CUT)
    assert np.array_equal(pickle.loads(pickle.dumps(opened)).read(*BOX), CUT)
    assert opened.bytes_read == CUT.nbytes


def test_grey_and_channels_first(tmp_path):
    assert np.array_equal(open_image(save_array(tmp_path / "first", PIXELS.transpose(2, 0, 1))).read(*BOX), CUT)
    grey = open_image(save_array(tmp_path / "grey", PIXELS[..., 0])).read(*BOX)
    assert np.array_equal(grey, np.repeat(CUT[..., :1], 3, axis=2))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_an_ome_zarr_group_has_levels(tmp_path, version):
    opened = open_image(write_pyramid(tmp_path / "a.zarr", version))
    assert opened.levels == (Level(150, 200), Level(75, 100, 2.0))
    assert opened.microns_per_px == 0.5
    assert np.array_equal(opened.read(*BOX), CUT)
    assert np.array_equal(opened.read(10, 20, 30, 40, 1), PIXELS[::2, ::2][10:40, 20:60])


def test_a_scale_that_all_levels_share_is_multiplied(tmp_path):
    path = write_pyramid(tmp_path / "a.zarr", "0.4")
    group = zarr.open_group(path)
    (told,) = group.attrs["multiscales"]
    group.attrs["multiscales"] = [
        told | {"coordinateTransformations": [{"type": "scale", "scale": [1, 1, 0.25, 0.75]}]}
    ]
    assert open_image(path).microns_per_px == 0.25


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
        open_image(save_array(tmp_path / "a.zarr", array))


def test_a_group_without_levels_is_refused(tmp_path):
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("one", data=PIXELS)
    with pytest.raises(ImageError, match=r"a\.zarr is a Zarr group of one, and no OME-Zarr picture"):
        open_image(tmp_path / "a.zarr")


def test_a_damaged_store_is_reported(tmp_path):
    (save_array(tmp_path / "a.zarr", PIXELS) / "zarr.json").write_text("{")
    with pytest.raises(ImageError, match=r"a\.zarr is damaged"):
        open_image(tmp_path / "a.zarr")
    opened = open_image(save_array(tmp_path / "b.zarr", PIXELS))
    next(path for path in sorted((tmp_path / "b.zarr" / "c").rglob("*")) if path.is_file()).write_bytes(b"no chunk")
    with pytest.raises(ImageError, match=r"b\.zarr cannot be read: Zstd"):
        opened.read(0, 0, 150, 200)


def test_without_the_extra_its_name_is_said(tmp_path, monkeypatch):
    path = save_array(tmp_path / "a.zarr", PIXELS)
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match=r"a\.zarr is a Zarr store: pip install 'mpi4dl_nb\[zarr\]'"):
        open_image(path)


def write_ome(path: Path, data: np.ndarray, axes: object, version: str = "0.4") -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=3 if version == "0.5" else 2)
    group.create_array("0", data=data, chunks=tuple(min(64, side) for side in data.shape))
    scales = {"version": version, "datasets": [{"path": "0"}]} | ({"axes": axes} if axes else {})
    group.attrs.update({"ome": {"multiscales": [scales]}} if version == "0.5" else {"multiscales": [scales]})
    return path


FIRST = PIXELS.transpose(2, 0, 1)
FIVE = FIRST[None, :, None]
TYPED = [{"name": "when", "type": "time"}, {"name": "stain", "type": "channel"}, *({"name": axis} for axis in "zyx")]


@pytest.mark.parametrize(
    ("data", "axes", "version"),
    [
        (FIVE, [{"name": axis} for axis in "tczyx"], "0.4"),
        (FIVE, [{"name": axis} for axis in "tczyx"], "0.5"),
        (FIVE, TYPED, "0.4"),
        (FIVE, list("tczyx"), "0.3"),
        (FIVE, None, "0.1"),
        (FIRST[None], [{"name": axis} for axis in "zcyx"], "0.4"),
        (FIRST[:, None], [{"name": axis} for axis in "czyx"], "0.4"),
        (PIXELS[None, :, None], [{"name": axis} for axis in "tyzxc"], "0.4"),
        (FIRST.transpose(0, 2, 1), [{"name": axis} for axis in "cxy"], "0.4"),
    ],
    ids=["0.4", "0.5", "types", "0.3", "0.1", "depth first", "depth in the middle", "odd order", "columns first"],
)
def test_axes_are_known_by_their_names(tmp_path, data, axes, version):
    opened = open_image(write_ome(tmp_path / "a.zarr", data, axes, version))
    assert np.array_equal(opened.read(*BOX), CUT)


FOUR = np.concatenate([FIRST, FIRST[:1]])


@pytest.mark.parametrize(
    ("data", "axes", "reason"),
    [
        (FIVE.repeat(3, 2), "tczyx", "holds a stack, t: 1, c: 3, z: 3"),
        (FIVE.repeat(2, 0), "tczyx", "holds a stack, t: 2"),
        (FIRST, "zyx", "holds a stack, z: 3"),
        (FOUR, "cyx", r"has 4 channels \(axes cyx.*cannot say that one is transparency"),
        (FIRST[:2], "cyx", "has 2 channels"),
        (FIRST, "cay", r"axes c\?y, but a picture is"),
    ],
    ids=str,
)
def test_other_axes_are_refused(tmp_path, data, axes, reason):
    with pytest.raises(ImageError, match=rf"a\.zarr .*{reason}"):
        open_image(write_ome(tmp_path / "a.zarr", data, [{"name": axis} for axis in axes]))


@pytest.mark.parametrize("shape", ["first", "last"])
def test_four_channels_of_an_array_are_four_channels(tmp_path, shape):
    """The fourth is no transparency: nothing says so."""
    path = save_array(tmp_path / "a.zarr", FOUR if shape == "first" else FOUR.transpose(1, 2, 0))
    with pytest.raises(ImageError, match="has 4 channels"):
        open_image(path)


def test_an_array_may_name_its_axes(tmp_path):
    zarr.create_array(tmp_path / "a", data=FIRST, chunks=(1, 64, 64), dimension_names=("z", "y", "x"))
    with pytest.raises(ImageError, match="holds a stack, z: 3"):
        open_image(tmp_path / "a")
    save_array(tmp_path / "b", FIVE, attributes={"_ARRAY_DIMENSIONS": ["time", "C", "z", "Y", "X"]})
    assert np.array_equal(open_image(tmp_path / "b").read(*BOX), CUT)
