"""Folders of labelled images: tables, folders of masks and of classes, boxes of Pascal VOC, batches of CIFAR-10.

One file of a folder is damaged, or becomes something else: a pipe, a device, a folder, a link that leads out. Cells of
a table and names of a list lead out, too. (A folder of classes, and one of CIFAR-10, follow links: whoever names the
folder has put them there.)
"""

from __future__ import annotations

import csv
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages
from mpi4dl_nb.engines.images.folder import folder_images, write_boxes_table, write_masks_table
from mpi4dl_nb.engines.images.sample_data import load_cifar_images
from mpi4dl_nb.engines.images.tables import table_images
from tests.fuzz.damage import make_damaged_bytes
from tests.fuzz.judge import Case, Outside, Random
from tests.fuzz.pictures import write_odd_picture
from tests.images.made_slides import make_tissue

SIZE = (24, 20)
_BOX = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>20</xmax><ymax>20</ymax></bndbox></object>"
_NUMBERS = ("", "0", "-1", "1", "1e9", "nan", "inf", "9" * 5000, "2147483647", "-2147483648", "0.5", "0x10", "77")
_REGIONS = ("0 0 1 1", "-9 -9 999999 999999", "0 0 2147483647 2147483647", "0 0 0 0", "5 5 9", "0 0 40 999999999")


def look(images: LabelledImages) -> None:
    """Read some of the images as a training would."""
    for index in range(min(len(images), 6)):
        rows, cols = images.shape(index)
        tile = Tile.whole(min(rows, 64), min(cols, 64))
        images.part(index, tile)
        if not getattr(images, "mask_classes", None):
            images.label(index)
        images.mask(index, tile)


def _write_table(folder: Path) -> None:
    _write_pictures(folder)
    rows = ["path,label,mask,region,level,slide", "a.png,x,a_mask.png,2 3 24 20,0,s", "b.jpg,y,b_mask.npy,,0,s"]
    (folder / "t.csv").write_text("\n".join([*rows, "c.tif,x,c_mask.tif,,,"]))


def _write_masks(folder: Path) -> None:
    _write_pictures(folder)
    for inside in ("images", "masks"):
        (folder / inside).mkdir()
    for name in ("a.png", "c.tif"):
        (folder / name).rename(folder / "images" / name)
        (folder / name.replace(".", "_mask.")).rename(folder / "masks" / name)


def _write_classes(folder: Path) -> None:
    for name in ("x/1.png", "x/slide/2.png", "y/3.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(make_tissue(30, 26)).save(folder / name)


def _write_voc(folder: Path) -> None:
    for inside in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / inside).mkdir(parents=True)
    for number, name in enumerate("ab"):
        Image.fromarray(make_tissue(40, 50)).save(folder / "JPEGImages" / f"{name}.jpg")
        boxes = _BOX.format("cell", 2) + _BOX.format("dust", number)
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{boxes}</annotation>")
    (folder / "ImageSets/Main/train.txt").write_text("a\nb\n")


def _write_cifar_pickled(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), np.uint8)
    batch = {b"data": pixels, b"labels": [each % 10 for each in range(20)], b"filenames": [b"a"] * 20}
    for number, protocol in ((1, 2), (2, 4)):
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol))


def _write_cifar_binary(folder: Path) -> None:
    for number in (1, 2):
        pixels = np.random.default_rng(number).integers(0, 10, (20, 3073), np.uint8)
        (folder / f"data_batch_{number}.bin").write_bytes(pixels.tobytes())


def _write_pictures(folder: Path) -> None:
    """Three pictures with masks, each of another format."""
    pixels, classes = make_tissue(30, 26), (np.arange(30 * 26) % 3).astype(np.uint8).reshape(30, 26)
    for name in ("a.png", "b.jpg", "c.tif"):
        Image.fromarray(pixels).save(folder / name)
    Image.fromarray(classes).save(folder / "a_mask.png")
    Image.fromarray(classes).save(folder / "c_mask.tif")
    np.save(folder / "b_mask.npy", classes)


def _read_masks(folder: Path) -> None:
    write_masks_table(folder / "images", folder / "masks", folder / "t.csv")
    look(table_images(folder / "t.csv", SIZE, classes=3))


def _read_voc(folder: Path) -> None:
    write_boxes_table(folder, "train", folder / "t.csv", 16)
    look(table_images(folder / "t.csv", (16, 16)))


Kind = tuple[Callable[[Path], None], Callable[[Path], None]]
"""Writes a folder, reads one."""

KINDS: dict[str, Kind] = {
    "table": (_write_table, lambda folder: look(table_images(folder / "t.csv", SIZE, classes=3))),
    "table, as they are": (
        _write_table,
        lambda folder: look(table_images(folder / "t.csv", None, classes=3, check=False)),
    ),
    "masks": (_write_masks, _read_masks),
    "classes": (_write_classes, lambda folder: look(folder_images(folder, SIZE))),
    "boxes": (_write_voc, _read_voc),
    "CIFAR, pickled": (_write_cifar_pickled, lambda folder: look(load_cifar_images(folder, SIZE))),
    "CIFAR, binary": (_write_cifar_binary, lambda folder: look(load_cifar_images(folder, SIZE))),
}
_LINKS_FOLLOWED = ("classes", "CIFAR, pickled", "CIFAR, binary")
_GIVEN = "t.csv"  # whoever names a file may name a link


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Each folder as it was made."""
    for number, name in enumerate(KINDS):
        yield _write_case(folder / str(number), name, name)


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """One file of the folder, or a cell of its table."""
    name = list(KINDS)[number % len(KINDS)]
    case = _write_case(folder / "given", name, name)
    files = sorted(path for path in (folder / "given").rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix in (".csv", ".txt", ".xml")]
    odd = write_odd_picture(outside)
    if texts and random.integers(2):
        path = texts[int(random.integers(len(texts)))]
        told = _replace_text(path, random, odd)
    elif random.integers(4):
        path = files[int(random.integers(len(files)))]
        told, data = make_damaged_bytes(path.read_bytes(), random)
        path.write_bytes(data)
    else:
        path = files[int(random.integers(len(files)))]
        may_lead = name in _LINKS_FOLLOWED or path.name == _GIVEN
        told = make_other(path, random, path if may_lead else _write_canary(path, outside))
    return Case(f"{name}, {path.name}, {told}", case.names, case.read)


def _write_canary(path: Path, outside: Outside) -> Path:
    """A file that was not given and would do in the place of another one."""
    return outside.write_file(f"odd{path.suffix}", path.read_bytes())


def make_other(path: Path, random: Random, canary: Path) -> str:
    """The file becomes something else; a link leads to the `canary`, if that is another file."""
    ways = ["a pipe", "a device", "a folder", "nothing", "a loop", "empty", "huge"]
    ways += [] if canary == path else ["a link", "a link"]
    way = ways[int(random.integers(len(ways)))]
    if way == "huge":
        os.truncate(path, 1 << 40)
        return way
    path.unlink()
    if way == "a pipe":
        os.mkfifo(path)
    elif way == "a folder":
        path.mkdir()
    elif way == "empty":
        path.touch()
    elif way != "nothing":
        path.symlink_to({"a device": Path("/dev/zero"), "a loop": path, "a link": canary}[way])
    return way


def _replace_text(path: Path, random: Random, odd: Path) -> str:
    """A cell, a name or a number of it, or what XML has for leading out."""
    leads = (str(odd), os.path.relpath(odd, path.parent), f"../{odd.parent.name}/{odd.name}", "/dev/zero", "..", "a\0b")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return _replace_cell(path, random, leads)
    if path.suffix == ".txt":
        path.write_text(f"a\n{random.choice(leads)}\n{'b ' * int(random.integers(3))}\n", encoding="utf-8")
        return "a name"
    way = int(random.integers(3))
    if way == 0:
        entity = f'<!DOCTYPE annotation [<!ENTITY odd SYSTEM "{odd.as_uri()}">]>'
        path.write_text(entity + text.replace("cell", "&odd;"), encoding="utf-8")
    elif way == 1:
        changed = text.replace(">20<", f">{random.choice(_NUMBERS)}<", int(random.integers(1, 3)))
        path.write_text(changed, encoding="utf-8")
    else:
        path.write_text(text.replace("</annotation>", "<object>" * int(random.choice([1, 50_000]))), encoding="utf-8")
    return ("an entity", "a number", "an element")[way]


def _replace_cell(path: Path, random: Random, leads: tuple[str, ...]) -> str:
    rows = list(csv.reader(StringIO(path.read_text(encoding="utf-8"))))
    row, column = int(random.integers(len(rows))), int(random.integers(len(rows[0])))
    others = {"path": leads, "mask": leads, "region": _REGIONS, "level": _NUMBERS, "label": (*_NUMBERS, *leads)}
    values = others.get(rows[0][column], (*_NUMBERS, *leads, *_REGIONS))
    rows[row][column] = str(values[int(random.integers(len(values)))])
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return f"the cell {row}, {column}"


@cache
def _make_folder(name: str) -> tuple[TemporaryDirectory[str], Path]:
    held = TemporaryDirectory()
    KINDS[name][0](Path(held.name))
    return held, Path(held.name)


def _write_case(folder: Path, name: str, told: str) -> Case:
    shutil.copytree(_make_folder(name)[1], folder)
    return Case(told, folder, lambda: KINDS[name][1](folder))
