"""Data sets to begin with: crops of a picture of stained tissue, which is installed, and CIFAR-10 from local files."""

from __future__ import annotations

import math
import pickle
import pickletools
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import torch
from numpy.typing import NDArray
from skimage.color import rgb2hed
from torch import Tensor

from mpi4dl_nb.engines.errors import ImageError, describe_working_folder
from mpi4dl_nb.engines.formatting import FactTable
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages, to_network_input
from mpi4dl_nb.engines.images.examples import resize_tile
from mpi4dl_nb.engines.images.files import translate_errors
from mpi4dl_nb.engines.images.folder import folder_images
from mpi4dl_nb.engines.images.picture import Source, open_image
from mpi4dl_nb.engines.images.picture_reader import Pixels
from mpi4dl_nb.engines.images.regular_file import read_bounded


def immunohistochemistry() -> Pixels:
    """Return the (512, 512, 3) pixels of stained colonic glands.

    The protein FHL2 is stained brown (DAB), the rest blue (haematoxylin). From the Center for Microscopy and Molecular
    Imaging (CMMI), no known copyright restrictions; the file is in scikit-image's wheel.

    >>> from mpi4dl_nb import immunohistochemistry
    >>> immunohistochemistry().shape
    (512, 512, 3)
    """
    return skimage.data.immunohistochemistry()


def compute_dab(image: Pixels) -> NDArray[np.float64]:
    """Return the optical density of DAB (brown) by colour deconvolution: (H, W, 3) -> (H, W); 0 is no stain.

    Ruifrok and Johnston's method and stain colours, as implemented in scikit-image.

    >>> from mpi4dl_nb import compute_dab, immunohistochemistry
    >>> compute_dab(immunohistochemistry()).shape
    (512, 512)
    """
    return rgb2hed(image)[..., 2]  # of haematoxylin, eosin, DAB


# A small classification task on a picture of stained tissue: is a crop browner than the median crop?


MOST_PX = 1 << 26  # of the picture, which is held in memory together with its stains


class StainCrops(FactTable):
    """`count` random square crops of a picture, with label 1 where the mean DAB is above the median over the crops.

    Half of the labels are therefore 1, and the task needs only the picture. The same arguments give the same crops.
    `corners` is (count, 2): the first row and column of each crop; `labels` is (count,), int64.

    Raises ImageError if the picture is smaller than a crop or too large for memory, or if `count` is less than 2.

    >>> from mpi4dl_nb import StainCrops, immunohistochemistry
    >>> crops = StainCrops(immunohistochemistry(), size_px=64, count=8)
    >>> crops.corners.shape, int(crops.labels.sum())
    ((8, 2), 4)
    """

    def __init__(self, image: Source, size_px: int = 128, count: int = 256, seed: int = 0) -> None:
        picture = open_image(image)
        if not 1 <= size_px <= min(picture.shape()):
            raise ImageError(
                f"{picture.name} has {picture.shape()[0]} x {picture.shape()[1]} pixels, which no crop of "
                f"{size_px} x {size_px} fits. Use size_px from 1 to {min(picture.shape())}."
            )
        if math.prod(picture.shape()) > MOST_PX:
            raise ImageError(
                f"{picture.name} has {picture.shape()[0]} x {picture.shape()[1]} pixels, and crops are taken from at "
                f"most {MOST_PX}. Take them from a part: "
                "mpi4dl_nb.engines.images.picture.crop_picture(picture, y0, x0, height, width)."
            )
        if count < 2:
            raise ImageError(f"count={count} crops have no median between them. Use count >= 2.")
        self.size_px = size_px
        self._pixels = picture.read(0, 0, *picture.shape())
        random = np.random.default_rng(seed)
        self.corners = random.integers(0, [side - size_px + 1 for side in picture.shape()], size=(count, 2))
        stain = compute_dab(self._pixels)
        means = np.array([self._crop(stain, corner).mean() for corner in self.corners])
        self.labels = torch.from_numpy((means > np.median(means)).astype(np.int64))

    def __len__(self) -> int:
        return len(self.corners)

    @property
    def facts(self) -> dict[str, object]:
        ones = int(self.labels.sum())
        return {
            "crops": f"{len(self)} of {self.size_px} × {self.size_px} px",
            "labels": f"{len(self) - ones} 0, {ones} 1",
        }

    def iterate_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, 3, size_px, size_px), float32, and labels (N,), in order, with N = `batch_size`.

        Each channel has mean 0 and deviation 1 over the whole picture. An incomplete last batch is dropped.
        Raises ImageError if there are fewer crops than one batch.
        """
        if not 1 <= batch_size <= len(self):
            raise ImageError(f"batch_size={batch_size}, but there are {len(self)} crops: use 1 to {len(self)}.")
        mean, deviation = self._pixels.mean((0, 1)), self._pixels.std((0, 1))
        for start in range(0, len(self) - batch_size + 1, batch_size):
            members = slice(start, start + batch_size)
            crops = np.stack([self._crop(self._pixels, corner) for corner in self.corners[members]])
            normalised = (crops.astype(np.float32) - mean) / np.maximum(deviation, 1.0)  # a flat channel becomes 0
            images = torch.from_numpy(normalised.astype(np.float32)).permute(0, 3, 1, 2).contiguous()
            yield images, self.labels[members]

    def _crop(self, array: NDArray[Any], corner: NDArray[np.int64]) -> NDArray[Any]:
        row, col = corner
        return array[row : row + self.size_px, col : col + self.size_px]


# CIFAR-10 (Krizhevsky, 2009, "Learning Multiple Layers of Features from Tiny Images") from local files. Nothing is
# downloaded. Both distributed forms are supported: binary records and Python pickles. A restricted unpickler reads the
# latter, since an ordinary one could run any code.


_SIDE, _CLASSES = 32, 10
_PIXELS = 3 * _SIDE * _SIDE
_FORMS = {
    False: (("cifar-10-batches-bin", "data_batch_*.bin"), ("cifar-10-batches-py", "data_batch_[0-9]")),
    True: (("cifar-10-batches-bin", "test_batch.bin"), ("cifar-10-batches-py", "test_batch")),
}
"""Folders and file patterns of the training images (False) and the test images (True)."""

Bytes = NDArray[np.uint8]


def load_cifar_images(
    folder: Path, size: tuple[int, int], test: bool = False, names: tuple[str, ...] | None = None
) -> LabelledImages:
    """Return the training images of CIFAR-10, or with `test` its test images, scaled to `size` = (height, width).

    `folder` contains the files, or the folder that the archives unpack to. A folder with one folder of pictures per
    class is also accepted, with the classes `names` of a related set. Raises ImageError if it is neither, or a file is
    damaged.
    """
    for inside, pattern in _FORMS[test]:
        files = sorted(folder.glob(pattern)) or sorted((folder / inside).glob(pattern))
        if files:
            return CifarImages([_read_batch(path) for path in files], size)
    others = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    if others - {inside for inside, _ in _FORMS[test]}:
        return folder_images(folder, size, names=names)
    binary, pickled = (pattern.replace("*", "1").replace("[0-9]", "1") for _, pattern in _FORMS[test])
    raise ImageError(
        f"There is no CIFAR-10 in {folder} (looked for in {describe_working_folder()}): neither {binary} nor "
        f"{pickled}, nor a folder of pictures for each class. Unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz "
        "there (from https://www.cs.toronto.edu/~kriz/cifar.html; nothing is downloaded here), or set --datapath."
    )


class CifarImages(LabelledImages):
    """Batches of (N, 3072) bytes, all red before all green before all blue, with (N,) classes; scaled when read."""

    classes = _CLASSES
    channels = 3

    def __init__(self, batches: list[tuple[Bytes, Bytes]], size: tuple[int, int]) -> None:
        self.size = size
        self.places = [(batch, row) for batch, (_, labels) in enumerate(batches) for row in range(len(labels))]
        self.batches = batches

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        return "CIFAR-10, batch {}, image {}".format(*self.places[index])

    def shape(self, index: int) -> tuple[int, int]:
        return self.size

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        batch, row = self.places[index]
        pixels = self.batches[batch][0][row].reshape(3, _SIDE, _SIDE).transpose(1, 2, 0)
        whole = Tile.whole(_SIDE, _SIDE)
        return to_network_input(
            resize_tile(lambda tile: pixels[tile.to_slices(whole)], (_SIDE, _SIDE), self.size, tile)
        )

    def label(self, index: int) -> int:
        batch, row = self.places[index]
        return int(self.batches[batch][1][row])


def _read_batch(path: Path) -> tuple[Bytes, Bytes]:
    """Return the (N, 3072) pixels and (N,) classes of one file."""
    with translate_errors(path):
        if path.suffix == ".bin":
            # Records of one class byte and 3072 pixel bytes. The pixels stay in the file, and are paged in when read.
            size = path.stat().st_size
            if not size or size % (1 + _PIXELS):
                raise _make_damaged_error(path, f"its {size} bytes are not records of {1 + _PIXELS}")
            records = np.memmap(path, np.uint8, "r").reshape(-1, 1 + _PIXELS)
            pixels, labels = records[:, 1:], np.array(records[:, 0])
        else:
            pixels, labels = _read_pickle(path)
    if not len(labels) or labels.max() >= _CLASSES:
        raise _make_damaged_error(path, f"it has {len(labels)} images, of classes up to {labels.max(initial=0)}")
    return pixels, labels


def _read_pickle(path: Path) -> tuple[Bytes, Bytes]:
    # A pickle is a program. Three bounds make it harmless: it may call only what `_MADE` lists, it may not ask for a
    # memo larger than the file, and it may begin arrays of no other shape than (0,), which are then filled from bytes
    # in the file. Memory and time are therefore of the order of the file's size.
    data = read_bounded(path)
    try:
        batch = _Unpickler(path, data).load()
        pixels, labels = batch[b"data"], batch[b"labels"]
        if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim == 1:
            labels = labels.tolist()
        if not isinstance(pixels, np.ndarray) or not all(type(label) is int for label in labels):
            raise ValueError("its data are no array, or its labels no numbers")
        labels = np.asarray(labels, np.uint8)
    except ImageError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _make_damaged_error(path, f"{type(error).__name__}: {error}") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
        raise _make_damaged_error(
            path, f"it has {len(labels)} classes, and pixels of shape {pixels.shape} and type {pixels.dtype}"
        )
    return pixels, labels


def _make_damaged_error(path: Path, reason: str) -> ImageError:
    return ImageError(f"{path} is no CIFAR-10 batch, or damaged: {reason}. Unpack the archive again.")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Return bytes from the latin-1 text that older pickle protocols store for them."""
    if encoding != "latin1":
        raise ValueError(f"bytes written as {encoding}")
    return text.encode("latin1")


class _NdarrayStub:
    """Stand-in for `numpy.ndarray`, which a pickle may name but not call: it would allocate memory for any shape."""


def _make_empty_array(kind: object, shape: object, _dtype: object) -> NDArray[Any]:
    """Return the empty array that NumPy's pickles start from; its state is set later from bytes in the file."""
    if kind is not _NdarrayStub or shape != (0,):
        raise ValueError(f"an array that begins with shape {shape}")
    return np.empty(0, np.uint8)


_MADE: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _NdarrayStub,
    ("numpy", "dtype"): np.dtype,
    ("numpy._core.multiarray", "_reconstruct"): _make_empty_array,
    ("numpy._core.numeric", "_frombuffer"): np.empty(1).__reduce_ex__(5)[0],  # type: ignore[dict-item]
    ("_codecs", "encode"): _encode_latin1,
}
"""The only globals that are allowed: those that arrays consist of, in every version of the pickle protocol."""


class _Unpickler(pickle.Unpickler):
    """Unpickler of numbers, bytes, texts, lists, mappings and arrays; nothing else is looked up, imported or called."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(BytesIO(data), encoding="bytes")  # unlike a file, BytesIO never allocates more than it has
        self.name = path
        if not data:
            raise EOFError("it is empty")
        try:
            for opcode, argument, _ in pickletools.genops(data):
                # A memo index beyond the file's size: the unpickler would allocate that memory.
                if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
                    raise ValueError(f"it speaks of its object {argument}, and has {len(data)} bytes")
        except ValueError as error:
            raise pickle.UnpicklingError(str(error)) from error

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed global. Raises ImageError if the file refers to any other."""
        allowed = _MADE.get((module.replace("numpy.core", "numpy._core"), name))
        if allowed is None:
            raise ImageError(
                f"{self.name} is no CIFAR-10 batch: it asks for {module}.{name}, and a file that names functions "
                "could run anything. It was not run. Unpack the archive again."
            )
        return allowed
