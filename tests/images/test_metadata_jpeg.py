"""A made file for each row of the section JPEG of the table of metadata."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from made_files import SECTIONS, MadeFile, check_row, list_rows_without_files, read_by_pillow, read_picture
from made_profiles import ADOBE_RGB, DISPLAY_P3, INKS, OPPONENTS, convert_by_imagecodecs, hide_opponents
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import colour_profile
from mpi4dl_nb.engines.images.picture import open_image, read_shape

# A smooth picture of 16 x 24 px, since JPEG changes any other; the same coefficients by jpegtran in two ways of coding.
_ROWS, _COLS = np.mgrid[:16, :24]
PIXELS = np.stack([_ROWS * 15, _COLS * 10, (_ROWS + _COLS) * 6], -1).astype(np.uint8)
GREY = PIXELS[..., 2]
_TABLES = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQ"
    "YEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//"
)
ARITHMETIC = base64.b64decode(
    _TABLES
    + "yQARCAAQABgDASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AKUbvp7/AANK5wYBd6XfATwNUK3UHek/82goBPKKMz0W7hA4HsBM"
    "/9k="
)
HUFFMAN = base64.b64decode(
    _TABLES
    + "wAARCAAQABgDASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAAMGBf/EABcQAAMBAAAAAAAAAAAAAAAAAAAEITH/xAAXAQADAQAAAAAAAAAA"
    "AAAAAAABAgQG/8QAHBEAAQMFAAAAAAAAAAAAAAAAAAEFMQMEESEi/9oADAMBAAIRAxEAPwCJSWyFCktkEJLZCgSWyBVCq8bZ0PSWyAbKS2QBMGaq"
    "tvUH/9k="
)
BEST = {"quality": 100, "subsampling": 0}


def encode(pixels: np.ndarray, mode: str | None = None, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels) if mode is None else Image.fromarray(pixels, mode)
    image.save(buffer, "jpeg", **BEST | options)
    return buffer.getvalue()


def decode(data: bytes) -> np.ndarray:
    """The stored numbers, by another program than Pillow."""
    return np.asarray(imagecodecs.jpeg8_decode(data))


def make(data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "a.jpg").write_bytes(data)
        return folder / "a.jpg"

    return write


def cut(data: bytes, *markers: int) -> bytes:
    """JPEG data without the segments of these markers."""
    at, kept = 2, data[:2]
    while data[at + 1] != 0xDA:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += b"" if data[at + 1] in markers else data[at : at + length]
        at += length
    return kept + data[at:]


def rename_channels(data: bytes, names: bytes) -> bytes:
    """JPEG data whose three channels have other names, in the frame and in the scan."""
    found = bytearray(data)
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    for place, name in enumerate(names):
        found[frame + 10 + 3 * place] = name
        found[scan + 5 + 2 * place] = name
    return bytes(found)


def make_exif(**tags: object) -> Image.Exif:
    exif = Image.Exif()
    for name, value in tags.items():
        if name == "orientation":
            exif[0x0112] = value
        else:
            exif.get_ifd(0x8769)[0xA001] = value
    return exif


def append_picture(folder: Path) -> Path:
    Image.fromarray(PIXELS).save(
        folder / "a.jpg", "mpo", save_all=True, append_images=[Image.fromarray(255 - PIXELS)], **BEST
    )
    return folder / "a.jpg"


def append_gain_map(folder: Path) -> Path:
    """As cameras write it: XMP that names the version of the gain map, and the map as a second picture."""
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/"><a hdrgm:Version="1.0"/></x:xmpmeta>'
    data = append_picture(folder).read_bytes()
    segment = b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp
    (folder / "a.jpg").write_bytes(data[:2] + segment + data[2:])
    return folder / "a.jpg"


PLAIN = encode(PIXELS)
STORED = decode(PLAIN)
AS_RGB = encode(PIXELS, keep_rgb=True)
RENAMED = rename_channels(cut(AS_RGB, 0xE0, 0xEE), b"RGB")
INK = np.dstack([PIXELS, 255 - GREY])
IN_INKS = encode(INK, "CMYK", icc_profile=INKS)
PALE = PIXELS // 3 + 90  # a table of a profile is coarse at the borders of what sRGB can show
HIDDEN = np.rint(hide_opponents(PALE / 255) * 255).astype(np.uint8)
IN_OPPONENTS = encode(HIDDEN, keep_rgb=True, icc_profile=OPPONENTS)
TWELVE = imagecodecs.jpeg8_encode((GREY.astype(np.uint16) * 16).copy(), bitspersample=12)
LS = imagecodecs.jpegls_encode(GREY.copy())
TURNED = np.rot90(decode(encode(GREY)), -1)
LOSSY = "is compressed as JPEG"


def find_shown(data: bytes) -> np.ndarray:
    """The picture of inks or opponents as Pillow's own conversion has it."""
    from PIL import ImageCms

    image = Image.open(io.BytesIO(data))
    return np.array(
        ImageCms.profileToProfile(
            image, io.BytesIO(image.info["icc_profile"]), ImageCms.createProfile("sRGB"), 1, "RGB"
        )
    )


def make_two_channels() -> bytes:
    """The header of a JPEG file of two channels; nothing decodes it."""
    data = bytearray(PLAIN)
    data[data.index(b"\xff\xc0") + 9] = 2
    return bytes(data)


MADE: dict[str, MadeFile] = {
    "baseline, progressive": MadeFile(
        make(encode(PIXELS, progressive=True)), STORED, LOSSY, others={read_by_pillow: None}
    ),
    "arithmetic": MadeFile(make(ARITHMETIC), decode(HUFFMAN), LOSSY, others={read_by_pillow: None}),
    "12 bits": MadeFile(make(TWELVE), "has 12 bits per channel", "has 12 bits per channel"),
    "JPEG-LS": MadeFile(make(LS), "a JPEG file of the kind JPEG-LS", "of the kind JPEG-LS"),
    "two channels": MadeFile(make(make_two_channels()), "with 2 channels", "with 2 channels"),
    "Adobe transform": MadeFile(make(AS_RGB), decode(AS_RGB), LOSSY, others={read_by_pillow: None}),
    "names of channels": MadeFile(make(RENAMED), decode(AS_RGB), LOSSY, others={read_by_pillow: None}),
    "CMYK": MadeFile(make(IN_INKS), find_shown(IN_INKS), "mode CMYK", naive=255 - INK[..., :3]),
    "CMYK without a profile": MadeFile(make(encode(INK, "CMYK")), "mode CMYK .*no colour profile", "mode CMYK"),
    "ICC profile": MadeFile(make(encode(PIXELS, icc_profile=DISPLAY_P3)), STORED, LOSSY, naive=STORED),
    "ICC profile of no red, green and blue": MadeFile(
        make(IN_OPPONENTS), find_shown(IN_OPPONENTS), LOSSY, naive=decode(IN_OPPONENTS)
    ),
    "ColorSpace": MadeFile(make(encode(PIXELS, exif=make_exif(space=2))), STORED, LOSSY, naive=STORED),
    "Orientation": MadeFile(
        make(encode(GREY, exif=make_exif(orientation=6))),
        TURNED,
        (TURNED > 60).astype(int),
        naive=decode(encode(GREY)),
        others={read_by_pillow: None},
        options={"classes": 2, "threshold": 60},
    ),
    "further pictures": MadeFile(append_picture, STORED, LOSSY, naive=STORED),
    "gain map": MadeFile(append_gain_map, STORED, LOSSY, naive=STORED),
    "density": MadeFile(make(encode(PIXELS, dpi=(72, 300))), STORED, LOSSY, naive=STORED),
}
WARNED = {"ICC profile": "colour profile 'RGB built-in'", "ColorSpace": "EXIF ColorSpace .Adobe RGB"}


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr(colour_profile, "_SAID", set())


def test_every_row_has_a_made_file():
    assert list_rows_without_files(SECTIONS["JPEG"], MADE) == []


@pytest.mark.parametrize("row", SECTIONS["JPEG"], ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_row(row, MADE[row.name], tmp_path)
    told = [str(warning.message) for warning in caught if "says that its numbers have other" in str(warning.message)]
    assert len(told) == (row.name in WARNED)


@pytest.mark.parametrize("name", WARNED)
def test_other_colours_are_said_once(tmp_path: Path, name: str):
    path = MADE[name].write(tmp_path)
    with pytest.warns(UserWarning, match=rf"a\.jpg: its {WARNED[name]}.* says that its numbers have other colours"):
        read_shape(path)
    open_image(path)  # a second warning would be an error


def test_two_profiles_are_two_warnings(tmp_path: Path):
    for number, profile in enumerate((DISPLAY_P3, ADOBE_RGB)):
        (tmp_path / str(number)).mkdir()
        path = make(encode(PIXELS, icc_profile=profile.replace(b"R\0G\0B\0", bytes([82, 0, 71, 0, 65 + number, 0]))))(
            tmp_path / str(number)
        )
        with pytest.warns(UserWarning, match="is said once for each profile"):
            open_image(path)


def test_inks_are_not_inverted(tmp_path: Path):
    """No ink is the white of paper, and black ink is black, whichever way round the file stores them."""
    none, black = np.zeros((16, 16, 4), np.uint8), np.zeros((16, 16, 4), np.uint8)
    black[..., 3] = 255
    for inks, shade in ((none, 255), (black, 0)):
        assert (read_picture(make(encode(inks, "CMYK", icc_profile=INKS))(tmp_path)) == shade).all()


def test_conversions_agree_with_another_program(tmp_path: Path):
    for data, stored, profile in (
        (IN_INKS, 255 - decode(IN_INKS), INKS),
        (IN_OPPONENTS, decode(IN_OPPONENTS), OPPONENTS),
    ):
        found = read_picture(make(data)(tmp_path)).astype(int)
        assert np.abs(found - convert_by_imagecodecs(stored, profile)).max() <= 1  # another program rounds otherwise
    assert np.abs(found - PALE).mean() < 2  # and it is the picture that was hidden


@pytest.mark.parametrize("without", ["a profile", "a profile, in Adobe RGB", "a marker", "a profile for inks"])
def test_inks_of_unknown_colours_are_refused_before_they_are_decoded(tmp_path: Path, without: str):
    options = {
        "a profile": {},
        "a profile, in Adobe RGB": {"exif": make_exif(space=2)},
        "a profile for inks": {"icc_profile": DISPLAY_P3},
        "a marker": {"icc_profile": INKS},
    }
    data = encode(INK, "CMYK", **options[without])
    path = make(cut(data, 0xEE) if without == "a marker" else data)(tmp_path)
    for read in (open_image, read_shape):
        with pytest.raises(ImageError, match="no Adobe marker" if without == "a marker" else "no colour profile for"):
            read(path)
