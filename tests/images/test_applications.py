"""What a training goes through: random images, CIFAR-10, folders; whole or in parts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages, SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.images.folder import folder_images
from mpi4dl_nb.engines.images.sample_data import load_cifar_images

SIZE = (37, 50)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (6, 3072), dtype=np.uint8)
CLASSES = [3, 0, 9, 9, 1, 4]


# ---- files as they come


def write_binary(folder: Path) -> Path:
    records = np.concatenate([np.array(CLASSES, np.uint8)[:, None], PIXELS], axis=1)
    for number, half in ((1, records[:4]), (2, records[4:])):
        half.tofile(folder / f"data_batch_{number}.bin")
    return folder


def write_pickled(folder: Path, protocol: int = 2, inside: str = "cifar-10-batches-py") -> Path:
    """As the archive has it, but for the version of Python that wrote it."""
    (folder / inside).mkdir(exist_ok=True)
    for number, rows in ((1, slice(0, 4)), (2, slice(4, 6))):
        batch = {b"batch_label": b"one", b"data": PIXELS[rows], b"labels": CLASSES[rows], b"filenames": [b"a.png"]}
        (folder / inside / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol))
    return folder


def write_pictures(folder: Path) -> Path:
    """Two classes, three formats, three sizes, one of them grey."""
    for name, shape, mode in (("a/1.png", (37, 50), "RGB"), ("a/2.JPG", (80, 91), "RGB"), ("b/1.tiff", (20, 30), "L")):
        (folder / name).parent.mkdir(exist_ok=True)
        pixels = RANDOM.integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / name)
    (folder / "a" / "notes.txt").write_text("no picture")
    return folder


KINDS: dict[str, Callable[[Path], LabelledImages]] = {
    "synthetic": lambda path: SyntheticImages(count=6, size=SIZE, classes=10, seed=3),
    "cifar, binary": lambda path: load_cifar_images(write_binary(path), SIZE),
    "cifar, pickled": lambda path: load_cifar_images(write_pickled(path), SIZE),
    "cifar, folder": lambda path: load_cifar_images(write_pictures(path), SIZE),
    "folder": lambda path: folder_images(write_pictures(path), SIZE),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_parts_are_those_of_the_whole_to_the_bit(make: Callable[[Path], LabelledImages], tmp_path: Path):
    images = make(tmp_path)
    assert len(images) >= 3
    for index in range(len(images)):
        whole = images.part(index, Tile.whole(*SIZE))
        assert whole.shape == (3, *SIZE)
        assert whole.dtype == torch.float32
        assert -1 <= whole.min() < 0 < whole.max() <= 1
        for tile in Grid(2, 3).cut(*SIZE):
            part = images.part(index, tile)
            assert part.is_contiguous()
            assert torch.equal(part, whole[(slice(None), *tile.to_slices(Tile.whole(*SIZE)))])
        assert 0 <= images.label(index) < images.classes
        assert images.shape(index) == SIZE
        mask = images.mask(index, Tile.whole(*SIZE))
        assert (mask.dtype, mask.shape) == (torch.int64, SIZE)
        assert 0 <= mask.min() <= mask.max() < images.classes
        for tile in Grid(3, 2).cut(*SIZE):
            assert torch.equal(images.mask(index, tile), mask[tile.to_slices(Tile.whole(*SIZE))])
    names = [images.name(index) for index in range(len(images))]
    assert len(set(names)) == len(names)
    assert [images.slide(index) for index in range(len(images))] == names


# ---- synthetic


def test_random_images_follow_from_the_seed_and_differ():
    first, again, other = (SyntheticImages(4, (8, 8), 1000, seed) for seed in (1, 1, 2))
    whole = Tile.whole(8, 8)
    assert torch.equal(first.part(2, whole), again.part(2, whole))
    assert [first.label(i) for i in range(4)] == [again.label(i) for i in range(4)]
    assert not torch.equal(first.part(2, whole), other.part(2, whole))
    parts = [first.part(index, whole) for index in range(4)]
    assert not any(torch.equal(one, two) for one, two in pairwise(parts))
    assert len({first.label(index) for index in range(4)}) > 1


def test_random_classes_are_spread_evenly():
    images = SyntheticImages(4000, (1, 1), 4)
    counts = torch.bincount(torch.tensor([images.label(index) for index in range(4000)]), minlength=4)
    assert counts.min() > 900


def test_random_masks_are_drawn_pixel_by_pixel():
    images, whole = SyntheticImages(3, (60, 60), 4), Tile.whole(60, 60)
    masks = [images.mask(index, whole) for index in range(3)]
    counts = torch.bincount(masks[0].flatten(), minlength=4)
    assert counts.min() > 750
    assert not torch.equal(masks[0], masks[1])


def test_without_masks_each_pixel_has_the_class_of_its_image(tmp_path: Path):
    images = load_cifar_images(write_binary(tmp_path), SIZE)
    assert [images.mask(index, Tile.whole(2, 3)).unique().tolist() for index in range(6)] == [[c] for c in CLASSES]


# ---- CIFAR-10


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_of_every_kind_say_what_the_binary_says(protocol: int, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "py").mkdir()
    mine = load_cifar_images(write_pickled(tmp_path / "py", protocol), (32, 32))
    theirs = load_cifar_images(write_binary(tmp_path / "bin"), (32, 32))
    assert len(mine) == len(theirs) == 6
    assert [mine.label(index) for index in range(6)] == [theirs.label(index) for index in range(6)] == CLASSES
    whole = Tile.whole(32, 32)
    for index in range(6):
        expected = torch.from_numpy(PIXELS[index].reshape(3, 32, 32) / 127.5 - 1).float()
        assert torch.equal(mine.part(index, whole), theirs.part(index, whole))
        assert torch.allclose(mine.part(index, whole), expected, atol=1e-6)


def test_a_pickle_of_python_2_is_read(tmp_path: Path):
    """Its arrays are numpy.core's, and its texts are bytes."""
    batch = pickle.dumps({b"data": PIXELS, b"labels": CLASSES}, 2).replace(b"numpy._core", b"numpy.core")
    (tmp_path / "data_batch_1").write_bytes(batch)
    assert len(load_cifar_images(tmp_path, (32, 32))) == 6


class Hostile:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


HOSTILE = {
    "os.system": (Hostile(os.system, "touch ran"), r"(posix|nt)\.system"),
    "eval": (Hostile(eval, "open('ran', 'w')"), r"(builtins|__builtin__)\.eval"),
    "a class": (Hostile(Path, "ran"), r"pathlib"),
    "numpy's own loader": (Hostile(np.load, "ran"), r"numpy\.?.*load"),
}


@pytest.mark.parametrize(("bad", "named"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_hostile_pickle_is_named_and_not_run(bad: Hostile, named: str, protocol: int, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = {b"data": PIXELS, b"labels": CLASSES, b"more": [bad]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
    with pytest.raises(ImageError, match=f"data_batch_1 .*asks for {named}.*not run"):
        load_cifar_images(tmp_path, SIZE)
    assert not (tmp_path / "ran").exists()


def _dump_batch(**changes: object) -> bytes:
    batch = {b"data": PIXELS, b"labels": CLASSES} | {name.encode(): value for name, value in changes.items()}
    return pickle.dumps({name: value for name, value in batch.items() if value is not None})


DAMAGED = {
    "cut off": ("data_batch_1.bin", bytes(5000), "its 5000 bytes are not records of 3073"),
    "empty": ("data_batch_1.bin", b"", "its 0 bytes"),
    "a class of 10": ("data_batch_1.bin", b"\x0a" + bytes(3072), "1 images, of classes up to 10"),
    "no pickle": ("data_batch_1", b"<html>not found</html>", "UnpicklingError"),
    "empty pickle": ("data_batch_1", b"", "EOFError"),
    "half a pickle": ("data_batch_1", _dump_batch()[:9000], "Error"),
    "no images": ("data_batch_1", _dump_batch(data=PIXELS[:0], labels=[]), "0 images"),
    "no labels": ("data_batch_1", _dump_batch(labels=None), "KeyError"),
    "a list": ("data_batch_1", pickle.dumps([1, 2]), "TypeError"),
    "floats": ("data_batch_1", _dump_batch(data=PIXELS.astype(float)), "type float64"),
    "another shape": ("data_batch_1", _dump_batch(data=PIXELS[:, :99]), r"pixels of shape \(6, 99\)"),
    "labels missing": ("data_batch_1", _dump_batch(labels=CLASSES[:5]), "5 classes, and pixels of shape"),
    "labels that are no bytes": ("data_batch_1", _dump_batch(labels=[300] * 6), "Error"),
    "labels below zero": ("data_batch_1", _dump_batch(labels=[-1] * 6), "Error"),
}


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_batch_is_named(name: str, content: bytes, said: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=f"{name} is no CIFAR-10 batch, or damaged: .*{said}"):
        load_cifar_images(tmp_path, SIZE)


@pytest.mark.parametrize("folder", ["empty", "not there"])
def test_where_there_is_no_cifar(folder: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match=r"There is no CIFAR-10 in .*nothing is downloaded here.*--datapath"):
        load_cifar_images(tmp_path / folder, SIZE)


# ---- folders


def test_classes_and_files_are_in_the_order_of_their_names(tmp_path: Path):
    images = folder_images(write_pictures(tmp_path), SIZE)
    assert [example.path.name for example in images.examples] == ["1.png", "2.JPG", "1.tiff"]
    assert [images.label(index) for index in range(3)] == [0, 0, 1]
    assert (images.classes, images.names) == (2, ("a", "b"))


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path: Path):
    pixels = np.asarray(Image.open(write_pictures(tmp_path) / "a" / "1.png"))
    part = folder_images(tmp_path, SIZE).part(0, Tile.whole(*SIZE))
    assert torch.equal(((part + 1) * 127.5).round().byte(), torch.from_numpy(pixels.copy()).permute(2, 0, 1))


def test_a_damaged_picture_is_named(tmp_path: Path):
    path = write_pictures(tmp_path) / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ImageError, match=r"1\.png is damaged"):
        folder_images(tmp_path, SIZE).part(0, Tile.whole(*SIZE))


def test_folders_without_pictures(tmp_path: Path):
    with pytest.raises(
        ImageError, match=r"not there is not a folder .*Give a folder that has a folder of pictures for each class"
    ):
        folder_images(tmp_path / "not there", SIZE)
    (tmp_path / "cats").mkdir()
    with pytest.raises(ImageError, match="has 1 folders, and no picture in these of them: cats"):
        folder_images(tmp_path, SIZE)


# ---- order


def test_every_epoch_has_its_own_order_of_all_images():
    first, second = (shuffle_indices(50, seed=1, epoch=epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == shuffle_indices(50, seed=1, epoch=0) != shuffle_indices(50, seed=2, epoch=0)
