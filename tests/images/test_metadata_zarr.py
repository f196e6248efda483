"""A made file for each row of the section OME-Zarr of the table of metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from made_files import SECTIONS, MadeFile, check_row, list_rows_without_files

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.picture import open_image

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
GREY, FIRST = PIXELS[..., 0], PIXELS.transpose(2, 0, 1)
HALF, QUARTER = FIRST[:, ::2, ::2], FIRST[:, ::4, ::4]
UNIT = {"y": [1, 0.25, 0.25], "half": [1, 0.5, 0.5], "quarter": [1, 1.0, 1.0]}

Change = Callable[[dict[str, Any]], object]


def make_store(data: np.ndarray, **options: Any) -> Callable[[Path], Path]:
    """How to write one array in chunks of at most 16 px."""

    def write(folder: Path) -> Path:
        chosen = {"chunks": tuple(min(16, side) for side in data.shape)} | options
        zarr.create_array(folder / "a", data=data, **chosen)
        return folder / "a"

    return write


def read_array_by_zarr(path: Path) -> np.ndarray:
    """An array as zarr reads it, with channels last."""
    return move_channels_last(np.asarray(zarr.open(path, mode="r")[...]))


def make_level_reader(name: str) -> Callable[[Path], np.ndarray]:
    """One array of a group as zarr reads it, with channels last."""

    def read(path: Path) -> np.ndarray:
        return move_channels_last(np.asarray(zarr.open(path, mode="r", use_consolidated=False)[name][...]))

    return read


def read_by_copy(path: Path) -> np.ndarray:
    """An array of a group as zarr reads it by the group's copy of the metadata."""
    return move_channels_last(np.asarray(zarr.open(path, mode="r")["0"][...]))


def read_in_xarray_order(path: Path) -> np.ndarray:
    """An array (x, y) as rows and columns."""
    return read_array_by_zarr(path).T


def move_channels_last(found: np.ndarray) -> np.ndarray:
    return np.moveaxis(found, 0, -1) if found.ndim == 3 and found.shape[0] == 3 else found


def update_fields(path: Path, name: str, fields: dict[str, Any]) -> Path:
    """Change fields of a JSON file of a store."""
    file = path / name
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")
    return path


def make_pyramid(
    levels: Sequence[tuple[str, np.ndarray]],
    scales: Sequence[Sequence[float]] | None = ((1, 0.25, 0.25), (1, 0.5, 0.5), (1, 1.0, 1.0)),
    axes: Sequence[str] | None = ("c", "y", "x"),
    edit: Change = lambda attributes: None,
    at: str = "",
    version: str = "0.4",
) -> Callable[[Path], Path]:
    """How to write an OME-Zarr picture with these levels, in this order; `edit` changes the group's attributes."""

    def write(folder: Path) -> Path:
        group = zarr.open_group(folder / "a" / at, mode="w", zarr_format=2)
        for name, data in levels:
            group.create_array(name, data=data, chunks=tuple(min(16, side) for side in data.shape))
        transforms = [
            {} if scale is None else {"coordinateTransformations": [{"type": "scale", "scale": list(scale)}]}
            for scale in (scales or [None] * len(levels))[: len(levels)]
        ]
        datasets = [{"path": name} | each for (name, _), each in zip(levels, transforms, strict=True)]
        named = {
            "axes": [{"name": axis, "unit": "micrometer"} if axis in "yx" else {"name": axis} for axis in axes or ()]
        }
        attributes = {"multiscales": [{"version": version, "datasets": datasets} | (named if axes else {})]}
        edit(attributes)
        group.attrs.update(attributes)
        return folder / "a"

    return write


def make_raw_layout(*names: str) -> Callable[[Path], Path]:
    """How to write a store as bioformats2raw does, with these pictures."""

    def write(folder: Path) -> Path:
        zarr.open_group(folder / "a", mode="w", zarr_format=2, attributes={"bioformats2raw.layout": 3})
        (folder / "a" / "OME").mkdir()
        for name in names:
            make_pyramid([("0", FIRST), ("1", HALF)], at=name)(folder)
        return folder / "a"

    return write


def write_renamed_chunks(folder: Path) -> Path:
    """Chunks in folders, and metadata that do not say so, as early writers of OME-Zarr left it out."""
    path = make_store(GREY, zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"})(folder)
    return update_fields(path, ".zarray", {"dimension_separator": "."})


def write_blank_chunks(folder: Path) -> Path:
    """An array of which one chunk is stored, and all others have the value 7."""
    array = zarr.create_array(folder / "a", shape=(40, 56), chunks=(16, 16), dtype="uint8", fill_value=7)
    array[:16, :16] = GREY[:16, :16]
    return folder / "a"


PARTLY = np.full((40, 56), 7, np.uint8)
PARTLY[:16, :16] = GREY[:16, :16]
ZERO = PARTLY.copy()
ZERO[ZERO == 7] = 0


def write_stale_copy(folder: Path) -> Path:
    """A group with a copy of its metadata that says that the array is smaller."""
    path = make_pyramid([("0", FIRST)])(folder)
    zarr.consolidate_metadata(path)
    copy = json.loads((path / ".zmetadata").read_text(encoding="utf-8"))
    copy["metadata"]["0/.zarray"]["shape"] = [3, 20, 30]
    (path / ".zmetadata").write_text(json.dumps(copy), encoding="utf-8")
    return path


def set_origin(*origins: float) -> Change:
    def add_origins(attributes: dict[str, Any]) -> None:
        for dataset, origin in zip(attributes["multiscales"][0]["datasets"], origins, strict=True):
            dataset["coordinateTransformations"].append({"type": "translation", "translation": [0, origin, 0]})

    return add_origins


def list_twice(paths: Sequence[str]) -> Change:
    def add_second(attributes: dict[str, Any]) -> None:
        (one,) = attributes["multiscales"]
        attributes["multiscales"] = [one, one | {"name": "two", "datasets": [{"path": path} for path in paths]}]

    return add_second


LEVELS = [("0", FIRST), ("1", HALF), ("2", QUARTER)]
WINDOW = {
    "color": "0000FF",
    "active": False,
    "inverted": True,
    "window": {"start": 10, "end": 20, "min": 0, "max": 255},
}
SHARED = {"coordinateTransformations": [{"type": "scale", "scale": [1, 2, 2]}]}
FORTRAN = {"zarr_format": 2, "order": "F"}
TURNED = {"filters": [zarr.codecs.TransposeCodec(order=(2, 0, 1))]}

MADE: dict[str, MadeFile] = {
    "shape": MadeFile(make_store(FIRST), PIXELS, others={read_array_by_zarr: None}),
    "dimension_names": MadeFile(
        make_store(np.ascontiguousarray(GREY.T), dimension_names=("x", "y")), GREY, others={read_in_xarray_order: None}
    ),
    "data type": MadeFile(make_store(GREY.astype(np.int16)), "holds int16 numbers"),
    "order": MadeFile(make_store(PIXELS, **FORTRAN), PIXELS, others={read_array_by_zarr: None}),
    "transpose": MadeFile(make_store(PIXELS, **TURNED), PIXELS, others={read_array_by_zarr: None}),
    "fill_value": MadeFile(write_blank_chunks, PARTLY, naive=ZERO, others={read_array_by_zarr: None}),
    "dimension_separator": MadeFile(
        make_store(PIXELS, zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"}),
        PIXELS,
        others={read_array_by_zarr: None},
    ),
    # zarr reads nothing but blank pixels, which is why the file is refused.
    "other dimension_separator": MadeFile(
        write_renamed_chunks,
        r"damaged: its first chunk is \d, and by its .* as 0\.0",
        others={read_array_by_zarr: 0 * GREY},
    ),
    "chunk_key_encoding": MadeFile(
        make_store(PIXELS, chunk_key_encoding={"name": "v2", "separator": "."}),
        PIXELS,
        others={read_array_by_zarr: None},
    ),
    "sharding_indexed": MadeFile(make_store(PIXELS, shards=(32, 32, 3)), PIXELS, others={read_array_by_zarr: None}),
    "compressors": MadeFile(
        make_store(PIXELS, zarr_format=2, compressors=numcodecs.Blosc()), PIXELS, others={read_array_by_zarr: None}
    ),
    "filters": MadeFile(make_store(GREY, zarr_format=2, filters=[numcodecs.Delta("u1")]), "is packed by delta"),
    "scale_factor, add_offset": MadeFile(make_store(GREY, attributes={"scale_factor": 0.5}), "has a scale_factor"),
    "consolidated metadata": MadeFile(
        write_stale_copy, PIXELS, others={make_level_reader("0"): None, read_by_copy: PIXELS[:20, :30]}
    ),
    "multiscales": MadeFile(make_pyramid(LEVELS, edit=list_twice("012")), PIXELS),
    "several multiscales": MadeFile(
        make_pyramid(LEVELS, edit=list_twice("12")),
        "lists 2 pictures .*first levels are 0, 1, .*Give the path of one array",
    ),
    "bioformats2raw.layout": MadeFile(make_raw_layout("0"), PIXELS),
    "bioformats2raw.layout, several": MadeFile(
        make_raw_layout("0", "1"), r"holds 2 pictures \(0, 1\), .*such as .*a/0\."
    ),
    "image-label": MadeFile(
        make_pyramid([("0", GREY[None])], edit=lambda told: told.update({"image-label": {}})), "holds labels"
    ),
    "labels": MadeFile(
        lambda folder: [make_pyramid(LEVELS)(folder), make_pyramid([("0", HALF)], at="labels/b")(folder)][0], PIXELS
    ),
    "axes": MadeFile(make_pyramid([("0", FIRST.transpose(0, 2, 1))], axes=("c", "x", "y")), PIXELS),
    "axes, none": MadeFile(make_pyramid(LEVELS, axes=None), "is OME-Zarr 0.4 without the names of its axes"),
    "datasets, order": MadeFile(
        make_pyramid(LEVELS[::-1], [(1, 1, 1), (1, 0.5, 0.5), (1, 0.25, 0.25)]),
        PIXELS,
        others={make_level_reader("0"): None, make_level_reader("2"): QUARTER.transpose(1, 2, 0)},
    ),
    "datasets, sizes": MadeFile(
        make_pyramid([("0", FIRST), ("1", FIRST[:, :10, :10])]), "array 1 of 10 x 10 px, .*has another aspect ratio"
    ),
    "datasets, channels": MadeFile(make_pyramid([("0", FIRST), ("1", HALF[:1])]), "damaged: a level has 1 channels"),
    "scale": MadeFile(
        make_pyramid(LEVELS, [(1, 0.25, 0.25), (1, 1, 1), (1, 1, 1)]), "array 1 .*pixels are 4 times as large along y"
    ),
    "translation": MadeFile(make_pyramid(LEVELS, edit=set_origin(0, 5, 0)), "array 1 .*begins 20 px further along y"),
    "translation, half a pixel": MadeFile(make_pyramid(LEVELS, edit=set_origin(1, 1.125, 1.375)), PIXELS, naive=PIXELS),
    "coordinateTransformations, shared": MadeFile(
        make_pyramid(LEVELS, edit=lambda told: told["multiscales"][0].update(SHARED)), PIXELS
    ),
    "omero.channels": MadeFile(
        make_pyramid(LEVELS, edit=lambda told: told.update({"omero": {"channels": [WINDOW] * 3}})), PIXELS, naive=PIXELS
    ),
    "omero.rdefs": MadeFile(
        make_pyramid(LEVELS, edit=lambda told: told.update({"omero": {"rdefs": {"model": "greyscale"}}})),
        PIXELS,
        naive=PIXELS,
    ),
}


def test_every_row_has_a_made_file():
    assert list_rows_without_files(SECTIONS["OME-Zarr"], MADE) == []


@pytest.mark.parametrize("row", SECTIONS["OME-Zarr"], ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    check_row(row, MADE[row.name], tmp_path)


# ---- levels


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_levels_are_sorted_from_the_finest(tmp_path: Path, order: tuple[int, ...], scaled: bool):
    scales = [(1, 0.25 * 2**place, 0.25 * 2**place) for place in order]
    path = make_pyramid([LEVELS[place] for place in order], scales if scaled else None)(tmp_path)
    opened = open_image(path)
    assert [(level.shape, level.downsample) for level in opened.levels] == [((40, 56), 1), ((20, 28), 2), ((10, 14), 4)]
    assert opened.microns_per_px == (0.25 if scaled else None)
    for place, (_, data) in enumerate(LEVELS):
        assert np.array_equal(opened.read(0, 0, *opened.shape(place), place), data.transpose(1, 2, 0))


def test_rounded_sizes_are_reduced_copies(tmp_path: Path):
    odd = FIRST[:, :37, :51]
    rounded = [("0", odd), ("1", odd[:, ::2, ::2]), ("2", odd[:, :36:4, :48:4]), ("3", odd[:, ::32, ::32])]
    scales = [(1, step, step) for step in (1, 2, 4, 32)]
    assert [level.shape for level in open_image(make_pyramid(rounded, scales)(tmp_path)).levels] == [
        (37, 51), (19, 26), (9, 12), (2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("levels", "scales", "says"),
    [
        ([("0", FIRST), ("1", FIRST)], None, "array 1 of 40 x 56 px.*is not smaller than 0 of 40 x 56 px"),
        ([("0", FIRST), ("1", FIRST)], [(1, 1, 1), (1, 2, 2)], "is not smaller than 0"),
        ([("1", FIRST[:, ::4]), ("0", FIRST)], None, "array 1 of 10 x 56 px.*has another aspect ratio"),
        ([("0", FIRST), ("1", HALF)], [(1, 1, 1), (1, 1, 1)], "are 1 times as large along y"),
        ([("0", FIRST), ("1", HALF)], [(1, 1, 1), (1, 2, 4)], "are 4 times as large along x"),
        ([("0", FIRST)], [(1, 1)], r"damaged: its scales are \[\[1.0, 1.0\]\], and it has the 3 axes cyx"),
        ([("0", FIRST)], [(1, 0, 1)], "damaged: a level has the scale .*not positive"),
        ([("0", FIRST)], [(1, float("nan"), 1)], "damaged: a level has the scale"),
    ],
)
def test_levels_that_disagree_are_refused(tmp_path: Path, levels, scales, says: str):
    with pytest.raises(ImageError, match=says):
        open_image(make_pyramid(levels, scales)(tmp_path))


def test_a_shared_scale_multiplies_the_size_of_a_pixel(tmp_path: Path):
    assert open_image(MADE["coordinateTransformations, shared"].write(tmp_path)).microns_per_px == 0.5
