"""Names of the file formats that are not read here, by a file's first bytes, and how to convert them."""

from __future__ import annotations

from pathlib import Path

from mpi4dl_nb.engines.images.files import read_head

_BY_PILLOW = "Pillow converts it: Image.open(path).convert('RGB').save('picture.png')."
_BY_ARRAY = "Read it into an array (H, W, C) of uint8, and give that."

# (offset in bytes, first bytes there, name, how to go on). Of two that match, the first counts.
_FORMATS = (
    (8, b"WEBP", "a WebP file", _BY_PILLOW),
    (0, b"GIF8", "a GIF file", _BY_PILLOW),
    (0, b"BM", "a BMP file", _BY_PILLOW),
    (0, b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 file", _BY_PILLOW),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 file", _BY_PILLOW),
    (4, b"ftypavi", "an AVIF file", _BY_PILLOW),
    (4, b"ftyphei", "an HEIC file", f"With the package pillow-heif, {_BY_PILLOW}"),
    (4, b"ftypmif1", "an HEIC or AVIF file", f"With the package pillow-heif, {_BY_PILLOW}"),
    (0, b"\x00\x00\x00\x0cJXL ", "a JPEG XL file", f"imagecodecs.jpegxl_decode decodes it. {_BY_ARRAY}"),
    (0, b"\xff\x0a", "a JPEG XL file", f"imagecodecs.jpegxl_decode decodes it. {_BY_ARRAY}"),
    *((0, b"P%d%s" % (kind, blank), "a PNM file", _BY_PILLOW) for kind in range(1, 8) for blank in (b"\n", b" ")),
    (0, b"8BPS", "a Photoshop file", _BY_PILLOW),
    (0, b"\x76\x2f\x31\x01", "an OpenEXR file", f"OpenEXR and imageio read it. {_BY_ARRAY}"),
    (128, b"DICM", "a DICOM file, and no whole slide", f"pydicom.dcmread(path).pixel_array reads it. {_BY_ARRAY}"),
    (344, b"n+1\x00", "a NIfTI volume", f"nibabel.load(path).get_fdata() reads it. {_BY_ARRAY}"),
    (0, b"NRRD", "an NRRD volume", f"SimpleITK reads it. {_BY_ARRAY}"),
    (0, b"ZISRAWFILE", "a Zeiss CZI file", f"pylibCZIrw and bioio read it. {_BY_ARRAY}"),
    (0, b"\xda\xce\xbe\x0a", "a Nikon ND2 file", f"The package nd2 reads it. {_BY_ARRAY}"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", f"h5py reads its data sets. {_BY_ARRAY}"),
    (0, b"\x93NUMPY", "a NumPy array", f"np.load(path) reads it. {_BY_ARRAY}"),
    (0, b"PK\x03\x04", "a ZIP archive, as .npz files are, too", "Unpack it."),
    (0, b"\x1f\x8b", "compressed by gzip", "Unpack it."),
    (0, b"%PDF", "a PDF document", "Save its picture as a PNG file."),
    (0, b"version https://git-lfs", "the pointer of Git LFS to a file that is not here", "Fetch it: git lfs pull."),
    (0, b"<", "a page or a document of XML, as a download that was refused leaves", "Open it in an editor."),
    (0, b"\x00" * 8, "empty at its beginning (zero bytes), as a download that was cut may be", "Copy it again."),
)

_HEAD_BYTES = 348


def describe_format(path: Path) -> tuple[str, str]:
    """Describe what a file is that no reader here takes, and how it becomes a picture that is read.

    The words follow "is no picture: ", such as "it is a WebP file." and "Pillow converts it: ...". The second text is
    empty for a format that is not known. Raises ImageError if the file cannot be read.
    """
    head = read_head(path, _HEAD_BYTES)
    for offset, magic, name, way in _FORMATS:
        if head.startswith(magic, offset):
            return f"it is {name}.", way
    return f"it begins with {head[:8]!r}." if head else "it is empty.", ""
