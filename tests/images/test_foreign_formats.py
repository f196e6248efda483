"""Files of formats that are not read are named as what they are, with what would read them."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.mask_file import open_raw_image
from mpi4dl_nb.engines.images.picture import open_image

PIXELS = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)


def save_by_pillow(name: str, **options: object) -> Callable[[Path], object]:
    return lambda path: Image.fromarray(PIXELS).save(path, format=name, **options)


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def make_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("picture.png", b"")


FORMATS: dict[str, tuple[Callable[[Path], object], str]] = {
    "WebP": (save_by_pillow("webp"), r"it is a WebP file. Pillow converts it"),
    "GIF": (save_by_pillow("gif"), "it is a GIF file. Pillow"),
    "BMP": (save_by_pillow("bmp"), "it is a BMP file. Pillow"),
    "JPEG 2000": (save_by_pillow("jpeg2000"), "it is a JPEG 2000 file. Pillow"),
    "JPEG 2000 without a container": (save_by_pillow("jpeg2000", no_jp2=True), "it is a JPEG 2000 file. Pillow"),
    "PNM": (save_by_pillow("ppm"), "it is a PNM file. Pillow"),
    "AVIF": (write(b"\0\0\0\x20ftypavif" + b"\0" * 20), "it is an AVIF file. Pillow"),
    "HEIC": (write(b"\0\0\0\x18ftypheic" + b"\0" * 20), "it is an HEIC file. .*pillow-heif"),
    "JPEG XL": (write(b"\xff\x0a" + b"\x7f" * 20), "it is a JPEG XL file. imagecodecs"),
    "DICOM": (write(bytes(range(128)) + b"DICM" + b"\0" * 20), "it is a DICOM file, and no whole slide. pydicom"),
    "NIfTI": (write(b"\x5c\1\0\0" + b"\0" * 340 + b"n+1\0"), "it is a NIfTI volume. nibabel"),
    "NumPy": (write(b"\x93NUMPY\1\0" + b"\0" * 20), "it is a NumPy array. np.load"),
    "HDF5": (write(b"\x89HDF\r\n\x1a\n" + b"\0" * 20), "it is an HDF5 file. h5py"),
    "ZIP": (make_zip, "it is a ZIP archive.* Unpack it"),
    "gzip": (write(gzip.compress(b"pixels")), "it is compressed by gzip. Unpack it"),
    "Git LFS": (write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "git lfs pull"),
    "web page": (write(b"<!DOCTYPE html><title>403</title>"), "a download that was refused"),
    "zero bytes": (write(b"\0" * 400), "it is empty at its beginning .zero bytes."),
    "nothing": (write(b""), r"it is empty\.$"),
    "text": (write(b"no picture"), r"it begins with b'no pictu'\.$"),
}


@pytest.mark.parametrize(("make", "said"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("ending", [".png", ".svs"])
def test_a_picture_of_another_format_is_named(tmp_path: Path, make: Callable[[Path], object], said: str, ending: str):
    path = tmp_path / f"picture{ending}"
    make(path)
    with pytest.raises(ImageError, match=f"is not a PNG, JPEG or TIFF picture, nor a slide .*{said}"):
        open_image(path)


def test_a_mask_of_another_format_is_named(tmp_path: Path):
    save_by_pillow("webp")(tmp_path / "mask.png")
    with pytest.raises(ImageError, match=r"so it is no mask: it is a WebP file\. Save it as a grey PNG"):
        open_raw_image(tmp_path / "mask.png")
