"""Tables from folders of masks and from boxes, on small folders and on the user's data."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpi4dl_nb.engines.cli import command
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile
from mpi4dl_nb.engines.images.folder import write_boxes_table, write_masks_table
from mpi4dl_nb.engines.images.picture import open_cached, open_image
from mpi4dl_nb.engines.images.tables import COLUMNS, table_images, write_table
from tests.images.made_slides import find_shared, make_tissue, write_pages

OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


def make_voc(folder: Path) -> Path:
    """Two pictures of 40 x 50 pixels, with white discs where the boxes are."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    boxes = {"one": [("cell", 11, 11, 20, 20), ("dust", 31, 1, 40, 6), ("cell", 41, 31, 50, 40)], "two": []}
    for name, found in boxes.items():
        pixels = np.zeros((40, 50, 3), np.uint8)
        for _, left, top, right, bottom in found:
            pixels[top - 1 : bottom, left - 1 : right] = 200
        Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.png")
        objects = "".join(OBJECT.format(*box) for box in found)
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{objects}</annotation>")
    (folder / "ImageSets" / "Main" / "train.txt").write_text("one\ntwo\n\n")
    return folder


def test_crops_are_centred_on_boxes(tmp_path: Path):
    table = tmp_path / "crops.csv"
    assert write_boxes_table(make_voc(tmp_path / "voc"), "train", table, crop_px=10) == 3
    images = table_images(table, (10, 10))
    assert (images.names, [images.label(index) for index in range(3)]) == (("cell", "dust"), [0, 1, 0])
    whole = Tile.whole(10, 10)
    assert (images.part(0, whole) > 0.5).all()
    assert (images.part(2, whole) > 0.5).all()
    dust = images.part(1, whole)[0]
    assert (dust[:2] == 1).all()  # what lies above the picture is white
    assert (dust[2:8] > 0.5).all()
    assert (dust[2:8] < 1).all()
    assert (dust[8:] == -1).all()
    assert {images.slide(index) for index in range(3)} == {"one"}


def test_of_each_class_the_first_boxes_are_taken(tmp_path: Path):
    assert write_boxes_table(make_voc(tmp_path / "voc"), "train", tmp_path / "crops.csv", 10, most=1) == 2


BROKEN = {
    "no list": (lambda voc: (voc / "ImageSets/Main/train.txt").unlink(), r"train\.txt does not exist"),
    "no boxes": (lambda voc: (voc / "Annotations/one.xml").unlink(), r"one\.xml does not exist"),
    "no picture": (lambda voc: (voc / "JPEGImages/two.png").unlink(), r"train\.txt names 1 images .*: two"),
    "no pictures": (lambda voc: [path.unlink() for path in (voc / "JPEGImages").iterdir()], "no pictures in .*JPEG"),
    "half a file": (lambda voc: (voc / "Annotations/one.xml").write_text("<annotation><obj"), r"one\.xml is damaged"),
    "no numbers": (
        lambda voc: (voc / "Annotations/one.xml").write_text("<a>" + OBJECT.format("x", "?", 1, 2, 3) + "</a>"),
        r"one\.xml is damaged: could not convert string to float: '\?'",
    ),
    "no name": (
        lambda voc: (voc / "Annotations/one.xml").write_text("<a>" + OBJECT.format(" ", 1, 1, 2, 3) + "</a>"),
        r"one\.xml is damaged: an object has no name",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_missing_or_damaged_is_named(spoil, said: str, tmp_path: Path):
    voc = make_voc(tmp_path / "voc")
    spoil(voc)
    with pytest.raises(ImageError, match=said):
        write_boxes_table(voc, "train", tmp_path / "crops.csv")
    assert not (tmp_path / "crops.csv").exists()


def test_every_picture_needs_its_mask(tmp_path: Path):
    for name in ("images/a.jpg", "images/b.jpg", "masks/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
    with pytest.raises(ImageError, match=r"1 of 2 pictures in .*images have no mask of their name in .*masks.*b\.jpg"):
        write_masks_table(tmp_path / "images", tmp_path / "masks", tmp_path / "t.csv")
    (tmp_path / "images" / "b.jpg").unlink()
    assert write_masks_table(tmp_path / "images", tmp_path / "masks", tmp_path / "t.csv") == 1
    assert (tmp_path / "t.csv").read_text() == "path,mask\nimages/a.jpg,masks/a.png\n"
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "images" / "b.jpg")
    np.save(tmp_path / "masks" / "b.npy", np.zeros((4, 4), np.uint8))
    assert write_masks_table(tmp_path / "images", tmp_path / "masks", tmp_path / "t.csv") == 2
    with pytest.raises(ImageError, match=r"no pictures in .*nowhere"):
        write_masks_table(tmp_path / "nowhere", tmp_path / "masks", tmp_path / "t.csv")


def test_the_command_writes_a_table_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    voc, table = make_voc(tmp_path / "voc"), tmp_path / "t.csv"
    assert command.main(["table", "boxes", str(voc), "train", str(table), "--crop-px", "8", "--most", "1"]) == 0
    assert capsys.readouterr().out == f"{table}: 2 images\n"
    assert command.main(["table", "boxes", str(voc), "test", str(table)]) == 2
    assert capsys.readouterr().err.startswith("ImageError: ")
    assert command.main(["table", "masks", str(voc)]) == 2
    assert "PlanError: The following arguments are required: masks, table" in capsys.readouterr().err


# ---- the user's data


def test_nuclei_of_breast_tissue(tmp_path: Path):
    folder = find_shared("brecahad")
    assert write_masks_table(folder / "images", folder / "masks", tmp_path / "t.csv") == 24
    images = table_images(tmp_path / "t.csv", (1024, 1360), threshold=127, within=folder)
    tile = Tile.whole(1024, 1360)
    share = images.mask(3, tile).double().mean().item()
    assert images.mask(3, tile).unique().tolist() == [0, 1]
    assert 0.02 < share < 0.25
    nuclei, rest = (images.part(3, tile)[:, images.mask(3, tile) == kind].mean() for kind in (1, 0))
    assert nuclei < rest - 0.1  # stained darker, so image and mask lie on each other
    train, judge = images.split(0.25, seed=0)
    assert (len(train), len(judge)) == (18, 6)


def test_cells_of_blood(tmp_path: Path):
    folder = find_shared("bccd") / "BCCD"
    found = {}
    for chosen in ("train", "val", "test"):
        write_boxes_table(folder, chosen, tmp_path / f"{chosen}.csv", crop_px=96, most=1)
        found[chosen] = table_images(
            tmp_path / f"{chosen}.csv", (48, 48), names=["Platelets", "RBC", "WBC"], within=folder
        )
    slides = {chosen: {images.slide(i) for i in range(len(images))} for chosen, images in found.items()}
    assert not slides["train"] & slides["test"]
    assert not slides["train"] & slides["val"]
    counts = Counter(found["train"].label(index) for index in range(len(found["train"])))
    assert min(counts.values()) > 100
    images = found["test"]
    assert all(images.part(index, Tile.whole(48, 48)).std() > 0.05 for index in range(0, len(images), 9))


def test_regions_of_a_slide(tmp_path: Path):
    path = find_shared("CMU-1-Small-Region.svs")
    write_table(
        tmp_path / "t.csv", [(path, "tissue", "400 500 300 200"), (path, "glass", "")], (*COLUMNS[:2], "region")
    )
    images, picture = table_images(tmp_path / "t.csv", None, within=path.parent), open_image(path)
    assert [images.shape(0), images.shape(1)] == [(300, 200), picture.shape()]
    parts = [images.part(0, tile) for tile in Grid(2, 2).cut(300, 200)]
    whole = torch.cat([torch.cat(parts[:2], 2), torch.cat(parts[2:], 2)], 1)
    read = torch.from_numpy(picture.read(400, 500, 300, 200)).permute(2, 0, 1)
    assert torch.equal(((whole + 1) * 127.5).round().byte(), read)


# ---- slides are opened once


def test_regions_of_one_slide_open_it_once_until_it_changes(tmp_path: Path):
    paths = [tmp_path / f"{number}.tiff" for number in range(6)]
    for path in paths:
        write_pages(path, make_tissue(128, 128))
    first = weakref.ref(open_cached(paths[0]))
    assert open_cached(paths[0]) is first()
    for path in paths[1:]:
        open_cached(path)
    assert first() is None
    again = open_cached(paths[0])
    write_pages(paths[0], 255 - make_tissue(192, 128))
    assert open_cached(paths[0]) is not again
    assert open_cached(paths[0]).shape() == (192, 128)
