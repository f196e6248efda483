"""Files that strangers made: no pipe is waited for, no device is read without end, and nothing outside of a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from PIL import Image

from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.engines.errors import CheckpointError, ImageError, Mpi4dlError, PlanError
from mpi4dl_nb.engines.images.folder import write_boxes_table
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.regular_file import open_regular, read_bounded
from mpi4dl_nb.engines.images.tables import table_images
from mpi4dl_nb.engines.train.checkpoint_reader import Checkpoint
from mpi4dl_nb.engines.train.training_events import EpochLog
from mpi4dl_nb.launch.hosts import read_hosts

Make = Callable[[Path], None]
KINDS: dict[str, Make] = {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero")}


FILES = ("a.png", "a.tif", "a.npy", "a.svs")


def make_in_folder(path: Path, name: str, make: Make) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    make(path / name)
    return path


def write_boxes(folder: Path, make: Make) -> None:
    make_in_folder(folder / "JPEGImages", "a.jpg", lambda path: path.write_bytes(b""))
    make_in_folder(folder / "ImageSets" / "Main", "train.txt", make)
    write_boxes_table(folder, "train", folder / "t.csv", 8)


def make_table_reader(name: str, column: str) -> Callable[[Path, Make], object]:
    """A table, one of whose files is no regular one."""

    def read(folder: Path, make: Make) -> object:
        Image.new("RGB", (8, 8)).save(folder / "ok.png")
        make(folder / name)
        row = f"{name},0" if column == "label" else f"ok.png,{name}"
        (folder / "t.csv").write_text(f"path,{column}\n{row}\n")
        return table_images(folder / "t.csv", (8, 8), within="/", **({"classes": 2} if column == "mask" else {}))

    return read


READERS: dict[str, tuple[type[Mpi4dlError], Callable[[Path, Make], object]]] = {
    "table": (ImageError, lambda folder, make: table_images(make_in_folder(folder, "t.csv", make) / "t.csv", (8, 8))),
    "list of pictures": (ImageError, write_boxes),
    "picture": (ImageError, lambda folder, make: open_image(make_in_folder(folder, "a.png", make) / "a.png")),
    **{
        f"{column}, {name}": (ImageError, make_table_reader(name, column))
        for column in ("label", "mask")
        for name in FILES
    },
    "checkpoint": (
        CheckpointError,
        lambda folder, make: Checkpoint.open(make_in_folder(folder, "checkpoint.json", make)),
    ),
    "machine": (
        PlanError,
        lambda folder, make: CalibrationCache(make_in_folder(folder, "m.json", make) / "m.json").read(),
    ),
    "log": (PlanError, lambda folder, make: EpochLog(make_in_folder(folder, "log.json", make) / "log.json")),
    "hosts": (PlanError, lambda folder, make: read_hosts(make_in_folder(folder, "hosts", make) / "hosts")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READERS)
def test_what_is_no_regular_file_is_named_at_once(what: str, kind: str, tmp_path: Path):
    error, read = READERS[what]
    with pytest.raises(error, match=r"regular file|there is no checkpoint"):
        read(tmp_path, KINDS[kind])


def test_a_file_of_text_that_is_too_large_is_not_read(tmp_path: Path):
    with (tmp_path / "t").open("wb") as file:
        file.truncate(1 << 20)
    assert len(read_bounded(tmp_path / "t")) == 1 << 20
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_bounded(tmp_path / "t", 1000)


def test_a_regular_file_is_read_as_ever(tmp_path: Path):
    (tmp_path / "t").write_bytes(b"text")
    with open_regular(tmp_path / "t") as file:
        assert file.read() == b"text"
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def store(folder: Path, version: int) -> Path:
    """A group of one array with two chunks."""
    path = folder / "store.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    made = group.create_array("0", shape=(8, 8), chunks=(8, 4), dtype="uint8")
    made[:] = np.arange(64, dtype=np.uint8).reshape(8, 8)
    axes = [{"name": name, "type": "space"} for name in "yx"]
    scales = [{"axes": axes, "datasets": [{"path": "0"}]}]
    group.attrs.update({"multiscales": scales} if version == 2 else {"ome": {"multiscales": scales}})
    return path


def list_chunks(path: Path) -> list[Path]:
    return sorted(each for each in (path / "0").rglob("*") if each.is_file() and each.name[0] not in "z.")


@pytest.mark.parametrize("version", [2, 3])
def test_no_link_in_a_store_leads_out_of_it(version: int, tmp_path: Path):
    """What it would show is somebody's file: the canary's bytes are those of a chunk."""
    path = store(tmp_path, version)
    assert open_image(path).read(0, 0, 8, 8).shape == (8, 8, 3)
    chunk = list_chunks(path)[-1]
    canary = chunk.rename(tmp_path / "canary")
    chunk.symlink_to(canary)
    with pytest.raises(ImageError, match="a link leads out of it"):
        open_image(path).read(0, 0, 8, 8)
    chunk.unlink()
    canary.rename(path / "beside")
    chunk.symlink_to(path / "beside")
    assert open_image(path).read(0, 0, 8, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("level", ["", "0"])
@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_what_describes_a_store_is_of_that_store(kind: str, level: str, version: int, tmp_path: Path):
    path = store(tmp_path, version)
    name = "zarr.json" if version == 3 else ".zattrs"
    file = path / level / name
    canary = tmp_path / "canary"
    canary.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(canary)
    with pytest.raises(ImageError, match=r"is no regular file|a link leads out of it|is a folder\. Give"):
        open_image(path)


def test_a_level_that_is_a_folder_elsewhere(tmp_path: Path):
    path = store(tmp_path, 3)
    (path / "0").rename(tmp_path / "elsewhere")
    (path / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match="a link leads out of it"):
        open_image(path)


def test_a_chunk_that_is_a_pipe(tmp_path: Path):
    path = store(tmp_path, 3)
    chunk = list_chunks(path)[0]
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(ImageError, match="is no regular file"):
        open_image(path).read(0, 0, 8, 8)
