"""TIFF files of every kind that is read by tiles or strips, held against what was written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import tifffile
from made_slides import find_misread, make_tissue, write_ome, write_pages
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import Level
from mpi4dl_nb.engines.images.pillow import PillowPicture
from mpi4dl_nb.engines.images.tiff import TiffPicture

PIXELS = make_tissue(203, 301)
BOX = (37, 90, 121, 150)


def cut(pixels: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    y, x, height, width = box
    return pixels[y : y + height, x : x + width]


STORED = {
    "plain strips": {},
    "plain strips of 7 rows": {"rowsperstrip": 7},
    "plain tiles": {"tile": (32, 48)},
    "plain planes": {"planarconfig": "separate"},
    "deflate tiles": {"tile": (64, 64), "compression": "deflate"},
    "deflate planes": {"tile": (64, 64), "compression": "deflate", "planarconfig": "separate"},
    "deflate with a predictor": {"rowsperstrip": 16, "compression": "deflate", "predictor": True},
    "LZW": {"rowsperstrip": 16, "compression": "lzw"},
    "PackBits": {"rowsperstrip": 16, "compression": "packbits"},
    "Zstandard": {"tile": (64, 64), "compression": "zstd"},
    "JPEG 2000": {"tile": (64, 64), "compression": "jpeg2000"},
    "BigTIFF": {"tile": (64, 64), "bigtiff": True},
    "big-endian": {"tile": (64, 64), "byteorder": ">"},
}


@pytest.mark.parametrize("kind", STORED)
def test_a_lossless_file_gives_the_pixels_of_each_rectangle(tmp_path, kind):
    options = dict(STORED[kind])
    writer = {name: options.pop(name) for name in ("bigtiff", "byteorder") if name in options}
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path, **writer) as file:
        data = PIXELS.transpose(2, 0, 1) if options.get("planarconfig") == "separate" else PIXELS
        file.write(data, photometric="rgb", **options)
    opened = open_image(path)
    assert isinstance(opened, TiffPicture)
    assert opened.shape() == (203, 301)
    for box in (BOX, (0, 0, 203, 301), (202, 300, 1, 1), (5, 63, 60, 2)):
        assert np.array_equal(opened.read(*box), cut(PIXELS, box)), box


@pytest.mark.parametrize("tiled", [True, False])
def test_jpeg_segments_are_those_of_the_whole_page(tmp_path, tiled):
    path, size = tmp_path / "a.tif", {"tile": (64, 64)} if tiled else {"rowsperstrip": 16}
    tifffile.imwrite(path, PIXELS, photometric="rgb", compression="jpeg", **size)
    assert np.array_equal(open_image(path).read(*BOX), cut(tifffile.imread(path), BOX))


def test_grey_and_alpha(tmp_path):
    grey = PIXELS[..., 0]
    tifffile.imwrite(tmp_path / "grey.tif", grey, tile=(64, 64), compression="deflate")
    assert np.array_equal(open_image(tmp_path / "grey.tif").read(*BOX), cut(np.repeat(grey[..., None], 3, 2), BOX))
    clear = np.dstack([PIXELS, np.zeros_like(grey)])
    clear[60:, :, 3] = 255
    tifffile.imwrite(tmp_path / "clear.tif", clear, photometric="rgb", extrasamples=["unassalpha"], tile=(64, 64))
    pixels = open_image(tmp_path / "clear.tif").read(0, 0, 203, 301)
    assert (pixels[:60] == 255).all()
    assert np.array_equal(pixels[60:], PIXELS[60:])


def test_alpha_that_is_multiplied_in_already(tmp_path):
    half = np.full((32, 32, 4), 100, np.uint8)  # red, green and blue of 200, half transparent
    half[..., 3] = 128
    tifffile.imwrite(tmp_path / "a.tif", half, photometric="rgb", extrasamples=["assocalpha"])
    expected = 100 + 255 - 128
    assert np.abs(open_image(tmp_path / "a.tif").read(0, 0, 32, 32).astype(int) - expected).max() <= 1


def test_a_fourth_channel_without_a_meaning_is_left_out(tmp_path):
    more = np.dstack([PIXELS, PIXELS[..., 0]])
    tifffile.imwrite(tmp_path / "a.tif", more, photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(open_image(tmp_path / "a.tif").read(*BOX), cut(PIXELS, BOX))


@pytest.mark.parametrize("write", [write_ome, write_pages])
def test_a_pyramid_has_its_levels(tmp_path, write):
    path = tmp_path / {write_ome: "a.ome.tif", write_pages: "a.tif"}[write]
    levels = write(path, PIXELS)
    opened = open_image(path)
    assert opened.levels[0] == Level(203, 301, 1.0)
    assert [level.shape for level in opened.levels] == [level.shape[:2] for level in levels]
    assert [round(level.downsample) for level in opened.levels] == [1, 2, 4]
    for number, level in enumerate(levels):
        rows, cols = opened.shape(number)
        assert np.array_equal(opened.read(0, 0, rows, cols, number), level)
        assert np.array_equal(opened.read(11, 7, 30, 40, number), cut(level, (11, 7, 30, 40)))
    assert opened.microns_per_px == (0.25 if write is write_ome else None)


def test_what_is_no_level_is_none(tmp_path):
    """Slides carry a label and a photograph of the glass along."""
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for shape in ((203, 301), (50, 60), (101, 150)):
            file.write(make_tissue(*shape), photometric="rgb", tile=(16, 16), metadata=None)
    assert [level.shape for level in open_image(tmp_path / "a.tif").levels] == [(203, 301), (101, 150)]


def test_channels_in_pages_of_their_own_are_colours(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        file.write(PIXELS.transpose(2, 0, 1), photometric="minisblack", metadata={"axes": "CYX"}, tile=(64, 64))
    opened = open_image(tmp_path / "a.ome.tif")
    assert isinstance(opened, TiffPicture)
    assert np.array_equal(opened.read(*BOX), cut(PIXELS, BOX))


@pytest.mark.parametrize(
    ("unit", "per_unit", "microns"), [(3, 20_000, 0.5), (2, 50_800, 0.5), (2, 72, None), (1, 2, None)]
)
def test_a_resolution_is_a_measure_where_a_microscope_wrote_it(tmp_path, unit, per_unit, microns):
    tifffile.imwrite(
        tmp_path / "a.tif", PIXELS, photometric="rgb", resolution=(per_unit, per_unit), resolutionunit=unit
    )
    assert open_image(tmp_path / "a.tif").microns_per_px == microns


def test_only_the_segments_that_are_touched_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, make_tissue(1024, 1024), photometric="rgb", tile=(128, 128), compression="deflate")
    opened, read = open_image(path), []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *place: read.append(place) or pread(*place))
    opened.read(130, 260, 100, 300)
    assert len(read) == 3, "tiles (1, 2) to (1, 4)"
    plain = tmp_path / "plain.tif"
    tifffile.imwrite(plain, make_tissue(1024, 1024), photometric="rgb")
    opened = open_image(plain)
    read.clear()
    opened.read(130, 260, 100, 300)
    assert sum(size for _, size, _ in read) == 100 * 300 * 3, "of what is not compressed, only the bytes themselves"


def test_tiles_that_were_left_out_are_black(tmp_path):
    def iterate_tiles():
        yield PIXELS[:64, :64]
        yield from [None] * 3

    tifffile.imwrite(
        tmp_path / "a.tif",
        iterate_tiles(),
        shape=(128, 128, 3),
        dtype=np.uint8,
        photometric="rgb",
        tile=(64, 64),
        compression="deflate",
    )
    pixels = open_image(tmp_path / "a.tif").read(0, 0, 128, 128)
    assert np.array_equal(pixels[:64, :64], PIXELS[:64, :64])
    assert (pixels[64:] == 0).all()
    assert (pixels[:, 64:] == 0).all()


def test_a_small_page_in_large_tiles_is_read(tmp_path):
    pixels = np.tile(PIXELS, (4, 8, 1))[:400, :1100]
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(2048, 2048), compression="deflate")
    assert np.array_equal(open_image(path).read(0, 0, 400, 1100), pixels)


def test_a_copy_opens_the_file_itself(tmp_path):
    write_pages(tmp_path / "a.tif", PIXELS)
    sent = pickle.dumps(open_image(tmp_path / "a.tif"))
    assert len(sent) < 2000, "the path, not the pixels"
    assert np.array_equal(pickle.loads(sent).read(*BOX), cut(PIXELS, BOX))
    write_pages(tmp_path / "a.tif", PIXELS[:100])
    with pytest.raises(ImageError, match=r"a\.tif has changed since it was opened"):
        pickle.loads(sent).read(*BOX)
    (tmp_path / "a.tif").unlink()
    with pytest.raises(ImageError, match=r"a\.tif does not exist"):
        pickle.loads(sent).read(*BOX)


def test_no_handle_is_left_open(tmp_path):
    write_pages(tmp_path / "a.tif", PIXELS)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        open_image(tmp_path / "a.tif").read(*BOX)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_threads_read_through_one_picture(tmp_path):
    write_pages(tmp_path / "a.tif", PIXELS)
    assert find_misread(pickle.loads(pickle.dumps(open_image(tmp_path / "a.tif"))), PIXELS) == []


@pytest.mark.parametrize("compression", ["deflate", None])
def test_a_file_that_was_cut_off_is_known_when_it_is_opened(tmp_path, compression):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(PIXELS, photometric="rgb", tile=(64, 64), compression=compression)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ImageError, match=r"a\.tif is damaged: \d+ of its 20 segments lie beyond its end"):
        open_image(path)


def test_damage_inside_a_tile_is_reported_where_it_is_read(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(64, 64), compression="deflate")
    with tifffile.TiffFile(path) as file:
        start = file.pages.first.dataoffsets[3]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"not deflated")
    opened = open_image(path)
    assert np.array_equal(opened.read(0, 0, 64, 64), PIXELS[:64, :64])
    with pytest.raises(ImageError, match=r"a\.tif is damaged"):
        opened.read(0, 192, 64, 64)


STACKS = {
    "pages.tif": ({"photometric": "minisblack", "metadata": None}, False, "a stack"),
    "focus.ome.tif": ({"photometric": "minisblack", "metadata": {"axes": "ZYX"}}, True, "4 focal planes"),
    "times.ome.tif": ({"photometric": "minisblack", "metadata": {"axes": "TYX"}}, True, "4 times"),
    "stains.ome.tif": ({"photometric": "minisblack", "metadata": {"axes": "CYX"}}, True, "4 channels of 1"),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_refused(tmp_path, name):
    options, ome, reason = STACKS[name]
    with tifffile.TiffWriter(tmp_path / name, ome=ome) as file:
        file.write(np.stack([PIXELS[..., 0]] * 4), **options)
    with pytest.raises(ImageError, match=f"{name} holds .*{reason}"):
        open_image(tmp_path / name)


@pytest.mark.parametrize("options", [{"imagej": True}, {"metadata": {"axes": "ZYX"}}], ids=str)
def test_a_stack_behind_one_page_is_refused(tmp_path, options):
    stack = np.stack([PIXELS[..., 0]] * 4)
    chosen = {"photometric": "minisblack", "contiguous": True} | options
    if "metadata" in options:
        options["metadata"]["truncate"] = True
    tifffile.imwrite(tmp_path / "a.tif", stack, **chosen)
    with pytest.raises(ImageError, match=r"a\.tif holds .*a stack"):
        open_image(tmp_path / "a.tif")


def test_a_child_process_has_a_handle_of_its_own(tmp_path, monkeypatch):
    write_pages(tmp_path / "a.tif", PIXELS)
    opened = open_image(tmp_path / "a.tif")
    first = opened.handle
    assert opened.handle is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert opened.handle[0] != first[0]
    assert np.array_equal(opened.read(*BOX), cut(PIXELS, BOX))


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (np.uint16, "16 bits per channel.*img_as_ubyte"),
        (np.int32, "signed integers of 32 bits"),
        (np.float32, "floating-point numbers"),
    ],
)
def test_more_than_8_bits_are_refused_with_a_way_to_mend(tmp_path, dtype, reason):
    tifffile.imwrite(tmp_path / "a.tif", PIXELS.astype(dtype), photometric="rgb")
    with pytest.raises(ImageError, match=rf"a\.tif has {reason}"):
        open_image(tmp_path / "a.tif")


@pytest.mark.parametrize("name", ["palette", "fax", "turned", "inverse"])
def test_only_a_fax_is_decoded_whole(tmp_path, name):
    path, image = tmp_path / f"{name}.tif", Image.fromarray(PIXELS)
    if name == "palette":
        image = image.quantize(16)
        image.save(path)
    elif name == "fax":
        image = image.convert("1")
        image.save(path, compression="group4")
    elif name == "turned":
        exif = Image.Exif()
        exif[0x0112] = 3
        image.save(path, exif=exif)
        image = image.rotate(180)
    else:
        grey = 255 - PIXELS[..., 0]
        tifffile.imwrite(path, grey, photometric="miniswhite")
        image = Image.fromarray(PIXELS[..., 0])
    opened = open_image(path)
    assert isinstance(opened, PillowPicture if name == "fax" else TiffPicture)
    assert np.array_equal(opened.read(*BOX), cut(np.array(image.convert("RGB")), BOX))


def test_ome_xml_that_cannot_be_read_is_reported(tmp_path: Path):
    path = tmp_path / "a.ome.tif"
    write_ome(path, PIXELS)
    path.write_bytes(path.read_bytes().replace(b"SizeZ=", b"SizeQ="))
    with pytest.raises(ImageError, match=r"its OME-XML cannot be read .KeyError: 'SizeZ'"):
        open_image(path)
