"""Folders as people have them: what an archive, a drive or a system has put there is neither a class nor a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import SyntheticImages, check_channels
from mpi4dl_nb.engines.images.folder import folder_images, list_pictures, write_masks_table
from mpi4dl_nb.engines.images.picture import open_image, read_shape

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


# ---- pictures that are there and would be left out, and classes that would be others


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(folder / name, format="PNG")


def test_pictures_of_other_formats_are_counted(folder: Path):
    add(folder, "benign/c.webp", "benign/d.webp", "tumour/e.BMP", "tumour/slide1/f.gif")
    told = r"4 pictures are used\. 4 others are of formats that are not read \(1 \.bmp, 1 \.gif, 2 \.webp\): save them"
    with pytest.warns(UserWarning, match=told) as found:
        assert len(folder_images(folder, (6, 8))) == 4
    assert len(found) == 1
    add(folder, "third/a.webp")
    with pytest.raises(ImageError, match=r"no picture in these of them: third .*5 others are of formats .*3 \.webp"):
        folder_images(folder, (6, 8))


def test_pictures_at_other_places_are_counted(folder: Path):
    add(folder, "loose.png", "tumour/slide1/deep/d.png")
    with pytest.warns(UserWarning, match=r"2 others are left out, as they are neither in CLASS/ nor in CLASS/SLIDE/"):
        assert len(folder_images(folder, (6, 8))) == 4


def test_pictures_are_counted_by_whatever_ending_they_are_read(folder: Path, recwarn: pytest.WarningsRecorder):
    for name in ("c.jpe", "d.JFIF"):
        Image.new("RGB", (8, 6)).save(folder / "benign" / name, format="JPEG")
    for name in ("stored", "stored.zarr"):  # a Zarr store is a folder of any name
        (folder / "tumour" / name).mkdir()
        (folder / "tumour" / name / ".zarray").write_text("{}")
    images = folder_images(folder, (6, 8))
    names = [Path(images.name(index)).name for index in range(len(images))]
    assert names == ["a.png", "b.png", "c.jpe", "d.JFIF", "a.png", "stored", "stored.zarr", "c.png"]
    assert not recwarn.list


def test_files_of_one_slide_are_not_counted_as_several(folder: Path):
    (folder / "tumour" / "slide1" / "c.dcm").write_bytes(b"one is enough")
    assert len(folder_images(folder, (6, 8))) == 5
    (folder / "tumour" / "slide1" / "d.dcm").write_bytes(b"its label")
    with pytest.raises(ImageError, match=r"slide1 has slides of several files \(c\.dcm, d\.dcm\), .*table_images"):
        folder_images(folder, (6, 8))
    (folder / "benign" / "a.vms").write_text("the list of its pictures")
    with pytest.raises(ImageError, match=r"benign has slides of several files \(a\.vms\)"):
        folder_images(folder, (6, 8))


def test_a_folder_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read = Path.iterdir

    def list_folder(path: Path):  # root may read everything
        if path.name == "tumour":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "iterdir", list_folder)
    with pytest.raises(ImageError, match=r"tumour may not be read by this user"):
        folder_images(folder, (6, 8))


def test_class_names_are_texts(folder: Path):
    with pytest.raises(ImageError, match=r"names=range\(0, 2\) must be the names of the classes"):
        folder_images(folder, (6, 8), names=range(2))


def test_shares_of_a_data_set_are_no_classes(tmp_path: Path):
    add(tmp_path, *(f"{share}/{name}/0.png" for share in ("train", "Val") for name in "ab"))
    with pytest.raises(ImageError, match=r"folders Val, train, .* inside: a, b\. .*held_out=folder_images") as found:
        folder_images(tmp_path, None)
    assert "names=('Val', 'train')" in str(found.value)
    assert folder_images(tmp_path / "train", None).names == ("a", "b")
    assert len(folder_images(tmp_path, None, names=("Val", "train"))) == 4  # slides a and b of these classes


def test_numbers_keep_the_order_of_text_and_that_is_said(tmp_path: Path):
    add(tmp_path, *(f"{number}/0.png" for number in (0, 1, 2)))
    assert folder_images(tmp_path, None).names == ("0", "1", "2")  # no warning
    add(tmp_path, "10/0.png")
    with pytest.warns(UserWarning, match=r"sorted as text, .*class 2 is the folder 10, not 2\. Give names="):
        images = folder_images(tmp_path, (6, 8))
    assert images.names == ("0", "1", "10", "2")
    assert repr(images) == "<4 images of 6 x 8 px (scale), 4 classes: 0: 0, 1: 1, 2: 10, 3: 2>"
    by_number = folder_images(tmp_path, None, names=("0", "1", "2", "10"))
    assert {Path(by_number.name(index)).parts[-2]: by_number.label(index) for index in range(4)}["10"] == 3


@pytest.mark.parametrize("size", [32, (32,), (32, 0), (32.5, 32), "32", (3, 32, 32), (None, 32)], ids=str)
def test_a_size_is_a_height_and_a_width(size: object, folder: Path):
    images = SyntheticImages(2, (64, 64), 3)
    for make in (
        lambda: folder_images(folder, size),
        lambda: SyntheticImages(2, size, 3),
        lambda: Augmented(images, size=size),
    ):
        with pytest.raises(ImageError, match=r"^size=.* must be \(height, width\), two whole numbers of pixels"):
            make()
    assert folder_images(folder, [6, 8]).shape(0) == (6, 8)


def test_channels_are_compared_before_an_image_is_read(folder: Path):
    for images in (folder_images(folder, (6, 8)), Augmented(folder_images(folder, (6, 8)))):
        check_channels(images, 3)
        with pytest.raises(ImageError, match=r"images have 3 channels .* but the training was made for 1"):
            check_channels(images, 1)


def test_an_animation_is_no_picture(tmp_path: Path):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    for read in (open_image, read_shape):
        with pytest.raises(ImageError, match=r"a\.png is an animation of several pictures\. Save the one you want"):
            read(tmp_path / "a.png")
