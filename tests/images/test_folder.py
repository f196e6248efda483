"""Folders as people have them: what an archive, a drive or a system has put there is neither a class nor a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from engines.errors import ImageError
from engines.images.folder import folder_images, list_pictures, write_masks_table

FORK = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(4000)  # as `._` files begin (AppleDouble)
CLASSES = ("benign", "tumour")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four pictures of two classes, one of them in the folder of a slide."""
    for name in ("benign/a.png", "benign/b.png", "tumour/a.png", "tumour/slide1/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(tmp_path / name)
    return tmp_path


STRAY = (
    "benign/._a.png",
    "tumour/slide1/._c.png",
    "benign/.hidden.png",
    "__MACOSX/benign/._a.png",
    "__MACOSX/._benign.png",
    "benign/__MACOSX/._a.png",
    ".ipynb_checkpoints/a-checkpoint.png",
    "benign/.ipynb_checkpoints/a-checkpoint.png",
    "@eaDir/a.png",
    "tumour/@eaDir/a.png",
    "$RECYCLE.BIN/a.png",
    ".DS_Store",
    "benign/Thumbs.db",
)


@pytest.mark.parametrize("stray", [*STRAY, STRAY], ids=str)
def test_what_the_user_has_not_put_there_is_passed_over(folder: Path, stray: str | tuple[str, ...]):
    before = folder_images(folder, (6, 8))
    for name in (stray,) if isinstance(stray, str) else stray:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FORK)
    images = folder_images(folder, (6, 8))
    assert images.names == CLASSES
    assert images.examples == before.examples
    assert [images.label(index) for index in range(4)] == [0, 0, 1, 1]
    images.check()


def test_hidden_pictures_fill_no_class(folder: Path):
    (folder / "other").mkdir()
    (folder / "other" / "._a.png").write_bytes(FORK)
    (folder / "third" / "__MACOSX").mkdir(parents=True)
    (folder / "third" / "__MACOSX" / "a.png").write_bytes(FORK)
    with pytest.raises(ImageError, match=r"has 4 folders, and no picture in these of them: other, third .*hidden ones"):
        folder_images(folder, (6, 8))


def test_a_folder_without_classes_is_said(folder: Path):
    with pytest.raises(ImageError, match=r"slide1 has no folders\. Put the pictures of each class into a folder"):
        folder_images(folder / "tumour" / "slide1", (6, 8))


def test_a_path_may_be_text(folder: Path):
    assert len(folder_images(str(folder), (6, 8))) == 4


def test_tables_of_folders_pass_over_the_same(folder: Path, tmp_path: Path):
    (folder / "benign" / "._a.png").write_bytes(FORK)
    assert [path.name for path in list_pictures(folder / "benign")] == ["a.png", "b.png"]
    assert write_masks_table(folder / "benign", folder / "benign", tmp_path / "t.csv") == 2


def test_two_masks_of_one_name_are_not_chosen_between(folder: Path, tmp_path: Path):
    Image.new("L", (8, 6)).save(folder / "benign" / "a.tif")
    with pytest.raises(ImageError, match=r"benign has several masks of one name: a\.png, a\.tif"):
        write_masks_table(folder / "tumour", folder / "benign", tmp_path / "t.csv")
