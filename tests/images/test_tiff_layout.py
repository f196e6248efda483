"""What a TIFF file says of its pages: the picture is the one at full size, and what it is not is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
from made_slides import make_tissue
from PIL import Image
from tifffile import TiffWriter

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.pillow import PillowPicture
from mpi4dl_nb.engines.images.tiff import TiffPicture
from tests.images.made_files import write_packed_tiff

PIXELS = make_tissue(96, 130)
GREY = PIXELS[..., 0]
INSIDE = GREY > 100
TILED = {"tile": (32, 32), "metadata": None}
REDUCED, MASK = 1, 4


def write_colours(file: TiffWriter, step: int = 1, subfiletype: int = 0, **options: object) -> None:
    file.write(PIXELS[::step, ::step].copy(), photometric="rgb", subfiletype=subfiletype, **{**TILED, **options})


def write_mask(file: TiffWriter, step: int = 1, kind: int = MASK) -> None:
    file.write(INSIDE[::step, ::step], photometric="mask", subfiletype=kind, **TILED)


def write_preview_first(file: TiffWriter) -> None:
    write_colours(file, 4, REDUCED)
    write_colours(file)


def write_picture_within_preview(file: TiffWriter) -> None:
    write_colours(file, 4, REDUCED, subifds=1)
    write_colours(file)


def write_mask_first(file: TiffWriter) -> None:
    write_mask(file)
    write_colours(file)


def write_masks_between_levels(file: TiffWriter) -> None:
    for step in (1, 2):
        write_colours(file, step, 0 if step == 1 else REDUCED)
        write_mask(file, step, MASK if step == 1 else MASK | REDUCED)


def write_only_preview(file: TiffWriter) -> None:
    write_colours(file, 1, REDUCED)


FILES: dict[str, tuple[Callable[[TiffWriter], None], list[int]]] = {
    "a preview comes first": (write_preview_first, [1, 4]),
    "the picture is a page of its preview": (write_picture_within_preview, [1, 4]),
    "a mask comes first": (write_mask_first, [1]),
    "masks lie between the levels": (write_masks_between_levels, [1, 2]),
    "the only page calls itself a preview": (write_only_preview, [1]),
}


@pytest.mark.parametrize("name", FILES)
def test_the_picture_is_the_page_at_full_size(tmp_path: Path, name: str):
    write, steps = FILES[name]
    with TiffWriter(tmp_path / "a.tif") as file:
        write(file)
    opened = open_image(tmp_path / "a.tif")
    assert isinstance(opened, TiffPicture)
    assert [level.shape for level in opened.levels] == [PIXELS[::step, ::step].shape[:2] for step in steps]
    for level, step in enumerate(steps):
        assert np.array_equal(opened.read(3, 5, 19, 20, level), PIXELS[::step, ::step][3:22, 5:25])


def test_grey_with_its_mask_is_no_stack(tmp_path: Path):
    with TiffWriter(tmp_path / "a.tif") as file:
        file.write(GREY, photometric="minisblack", **TILED)
        write_mask(file)
    assert np.array_equal(open_image(tmp_path / "a.tif").read(0, 0, 96, 130), np.dstack([GREY] * 3))


def test_pillow_decodes_the_page_that_is_the_picture(tmp_path: Path):
    """A page that is compressed by LZMA is decoded whole, and by another reader."""
    with TiffWriter(tmp_path / "a.tif") as file:
        write_colours(file, 4, REDUCED)
        write_colours(file, compression="lzma")
    opened = open_image(tmp_path / "a.tif")
    assert isinstance(opened, PillowPicture)
    assert np.array_equal(opened.read(0, 0, 96, 130), PIXELS)


def test_pillow_takes_no_fourth_channel_for_alpha_that_the_file_does_not_call_so(tmp_path: Path):
    more = np.dstack([PIXELS, GREY])
    turned = {"extratags": [(274, "H", 1, 3, True)], "metadata": None}
    tifffile.imwrite(tmp_path / "a.tif", more, photometric="rgb", extrasamples=["unspecified"], **turned)
    whole = (tmp_path / "a.tif").read_bytes()
    entry = b"\x52\x01\x03\x00\x01\x00\x00\x00\x00\x00\x00\x00"  # ExtraSamples, one short number: 0
    assert whole.count(entry) == 1
    upright = PIXELS[::-1, ::-1]
    assert np.array_equal(open_image(tmp_path / "a.tif").read(0, 0, 96, 130), upright)
    (tmp_path / "b.tif").write_bytes(whole.replace(entry, b"\x51\x01" + entry[2:]))  # and without the tag
    assert np.array_equal(open_image(tmp_path / "b.tif").read(0, 0, 96, 130), upright)
    said = tmp_path / "c.tif"
    tifffile.imwrite(said, more, photometric="rgb", extrasamples=["unassalpha"], **turned)
    white = Image.alpha_composite(Image.new("RGBA", (130, 96), "white"), Image.fromarray(more)).rotate(180)
    assert np.array_equal(open_image(said).read(0, 0, 96, 130), np.array(white.convert("RGB")))


# ---- refused


def write(options: dict[str, object], *arrays: np.ndarray) -> Callable[[Path], None]:
    def write_arrays(path: Path) -> None:
        with TiffWriter(path, ome=bool(options.get("ome"))) as file:
            for array in arrays:
                file.write(array, **{name: value for name, value in options.items() if name != "ome"})

    return write_arrays


def with_compression(number: int) -> Callable[[Path], None]:
    """A file that says that its pixels are compressed by whatever has this number."""

    def write_with_number(path: Path) -> None:
        tifffile.imwrite(path, PIXELS, photometric="rgb", metadata=None)
        data = path.read_bytes()
        entry = b"\x03\x01\x03\x00\x01\x00\x00\x00"
        assert data.count(entry) == 1
        at = data.index(entry) + len(entry)
        path.write_bytes(data[:at] + number.to_bytes(2, "little") + data[at + 2 :])

    return write_with_number


SIGNED = np.random.default_rng(0).integers(-1, 97, (3, 4, 40, 60)).astype(np.int8)
PALETTE = {"photometric": "palette", "colormap": np.zeros((3, 256), np.uint16), "metadata": None}
RGBA = np.dstack([PIXELS, GREY])
OME = {"ome": True, "photometric": "rgb"}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a signed stack": (write({"ome": True, "metadata": {"axes": "TZYX"}}, SIGNED), "4 focal planes, 3 times"),
    "a signed plane": (write({}, SIGNED[0, 0]), "has signed integers of 8 bits"),
    "signed colours": (write({"photometric": "rgb"}, PIXELS.astype(np.int8)), "has signed integers of 8 bits"),
    "a stack of palettes": (write(PALETTE, GREY, GREY), "holds several pictures of one size, a stack"),
    "a stack of faxes": (
        lambda path: Image.fromarray(INSIDE).save(
            path, "tiff", compression="group4", save_all=True, append_images=[Image.fromarray(~INSIDE)]
        ),
        "holds several pictures of one size, a stack",
    ),
    "a volume": (write({"volumetric": True, "tile": (16, 16, 16)}, np.zeros((16, 32, 32), np.uint8)), "16 planes"),
    "a larger page later": (
        write({"photometric": "rgb", **TILED}, PIXELS[::4, ::4].copy(), PIXELS),
        "of 24 x 33 px comes first, and a larger one of 96 x 130",
    ),
    "grey and colours of one size": (write(TILED, GREY, PIXELS), "holds several pictures of one size"),
    "two channels": (
        write({"photometric": "minisblack", "planarconfig": "contig"}, PIXELS[..., :2].copy()),
        "has 2 channels",
    ),
    "three channels of grey": (
        write({"photometric": "minisblack", "planarconfig": "contig"}, PIXELS),
        "has 3 channels, and the file does not",
    ),
    "four channels of OME": (
        write({**OME, "extrasamples": ["unspecified"]}, RGBA),
        "has 4 channels, and the file does not say",
    ),
    "four planes of OME": (
        write({"ome": True, "photometric": "minisblack", "metadata": {"axes": "CYX"}}, RGBA.transpose(2, 0, 1).copy()),
        "4 channels of 1",
    ),
    "WebP": (write({"photometric": "rgb", "compression": "webp", **TILED}, PIXELS), "compressed by WEBP, which is not"),
    "JPEG XL": (write({"photometric": "rgb", "compression": "jpegxl", **TILED}, PIXELS), "compressed by JPEGXL"),
    "LERC": (write({"compression": "lerc", **TILED}, GREY), "compressed by LERC, which is not read here"),
    "an unknown compression": (with_compression(12345), "compressed by number 12345, which is not read here"),
    "3 bits": (partial(write_packed_tiff, numbers=GREY >> 5, bits=3), "has 3 bits per channel"),
    "16 bits and signed": (write({}, GREY.astype(np.int16)), "has signed integers of 16 bits"),
    "complex": (write({}, GREY.astype(np.complex64)), "has complex numbers of 64 bits"),
    "inks": (lambda path: Image.new("CMYK", (9, 9)).save(path, "tiff"), r"holds printing inks \(CMYK\)"),
    "L*a*b*": (lambda path: Image.new("LAB", (9, 9)).save(path, "tiff"), r"holds CIE L\*a\*b\* colours"),
    "a transparency mask alone": (write({"photometric": "mask"}, INSIDE), "holds a transparency mask"),
    "a camera's sensor": (write({"photometric": "cfa"}, GREY), "holds what a camera's sensor saw"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_8_bit_picture_is_refused_by_name(tmp_path: Path, name: str):
    make, reason = REFUSED[name]
    make(tmp_path / "a.tif")
    with pytest.raises(ImageError, match=rf"a\.tif .*{reason}") as caught:
        open_image(tmp_path / "a.tif")
    assert "damaged" not in str(caught.value)


def test_alpha_of_ome_is_what_the_file_calls_so(tmp_path: Path):
    write({**OME, "extrasamples": ["unassalpha"]}, RGBA)(tmp_path / "a.ome.tif")
    white = Image.alpha_composite(Image.new("RGBA", (130, 96), "white"), Image.fromarray(RGBA))
    assert np.array_equal(open_image(tmp_path / "a.ome.tif").read(0, 0, 96, 130), np.array(white.convert("RGB")))
