"""Slides through OpenSlide, and whatever is read as OpenSlide is."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from made_slides import find_misread, find_shared, make_tissue, write_pages, write_svs
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import picture as reader
from mpi4dl_nb.engines.images.picture import OpenSlidePicture, SlideLikePicture, open_image
from mpi4dl_nb.engines.images.picture_reader import Level, Picture
from mpi4dl_nb.engines.images.tiff import TiffPicture

PIXELS = make_tissue(600, 800)
LOSSLESS = {"compression": None}


def test_the_users_slide_is_read_as_tifffile_reads_it():
    path = find_shared("CMU-1-Small-Region.svs")
    opened = open_image(path)
    assert isinstance(opened, OpenSlidePicture)
    assert opened.levels == (Level(2967, 2220, 1.0),)
    assert opened.microns_per_px == 0.499
    whole = opened.read(0, 0, 2967, 2220)
    assert np.array_equal(whole, TiffPicture(path).read(0, 0, 2967, 2220))
    assert np.array_equal(opened.read(2000, 1500, 300, 400), whole[2000:2300, 1500:1900])
    assert opened.bytes_read == 2967 * 2220 * 3 + 300 * 400 * 3


def test_a_level_is_read_in_its_own_pixels(tmp_path):
    """OpenSlide asks for locations in pixels of level 0: where these are whole numbers, each pixel is exact."""
    levels = write_svs(tmp_path / "a.svs", PIXELS, **LOSSLESS)
    opened = open_image(tmp_path / "a.svs")
    assert isinstance(opened, OpenSlidePicture)
    assert opened.levels == (Level(600, 800, 1.0), Level(150, 200, 4.0))
    for number, level in enumerate(levels):
        for y, x, height, width in ((0, 0, 150, 200), (1, 3, 77, 5), (149, 199, 1, 1), (-2, 190, 20, 20)):
            around = np.pad(level, ((20, 20), (20, 20), (0, 0)), constant_values=255)
            expected = around[y + 20 : y + 20 + height, x + 20 : x + 20 + width]
            if number == 0:
                expected = np.pad(level, ((20, 20), (20, 20), (0, 0)), constant_values=255)[
                    y + 20 : y + 20 + height, x + 20 : x + 20 + width
                ]
            assert np.array_equal(opened.read(y, x, height, width, number), expected), (number, y, x)


def test_large_rectangles_are_read_block_by_block(tmp_path, monkeypatch):
    levels = write_svs(tmp_path / "a.svs", PIXELS, **LOSSLESS)
    monkeypatch.setattr(reader, "BLOCK_PX", 128)
    opened = open_image(tmp_path / "a.svs")
    assert np.array_equal(opened.read(50, 60, 500, 700), levels[0][50:550, 60:760])


def test_where_a_level_does_not_divide_pixels_do_not_depend_on_where_a_read_begins(tmp_path, monkeypatch):
    """Rows of 599 / 4 begin between two rows of level 0, and OpenSlide blends: by itself, ranks would disagree."""
    levels = write_svs(tmp_path / "a.svs", make_tissue(1399, 1601), **LOSSLESS)
    opened = open_image(tmp_path / "a.svs")
    assert not opened.levels[1].downsample.is_integer()
    rows, cols = opened.shape(1)
    whole = opened.read(0, 0, rows, cols, 1)
    assert np.abs(whole.astype(int) - levels[1]).mean() < 1.5, "not more than 1/8 of a pixel away"
    for y, x, height, width in ((0, 0, 100, 300), (255, 100, 3, 300), (301, 17, 48, 383), (100, 399, 200, 1)):
        assert np.array_equal(opened.read(y, x, height, width, 1), whole[y : y + height, x : x + width])
    monkeypatch.setattr(reader, "_split_blocks", lambda wanted, *_: [wanted])
    assert any(
        not np.array_equal(opened.read(y, 17, 100, 300, 1), whole[y : y + 100, 17:317]) for y in range(1, 200, 7)
    ), "this test could not fail"


def test_tiles_that_a_slide_lacks_are_white(tmp_path):
    def iterate_tiles():
        yield PIXELS[:64, :64]
        yield from [None] * 3

    told = "Aperio Image Library v11.2.1 \r\n128x128 [0,0 128x128] (64x64) |AppMag = 20"
    options = {"photometric": "rgb", "metadata": None, "description": told, "compression": "jpeg"}
    tifffile.imwrite(tmp_path / "a.svs", iterate_tiles(), shape=(128, 128, 3), dtype=np.uint8, tile=(64, 64), **options)
    pixels = open_image(tmp_path / "a.svs").read(0, 0, 128, 128)
    assert not (pixels[:64, :64] == 255).all()
    assert (pixels[64:] == 255).all()
    assert (pixels[:, 64:] == 255).all()


def test_a_copy_opens_the_slide_itself(tmp_path):
    write_svs(tmp_path / "a.svs", PIXELS, **LOSSLESS)
    opened = open_image(tmp_path / "a.svs")
    opened.read(0, 0, 10, 10)
    sent = pickle.dumps(opened)
    assert len(sent) < 2000, "the path, not the pixels"
    copy = pickle.loads(sent)
    assert (copy.bytes_read, copy.levels, copy.microns_per_px) == (0, opened.levels, 0.499)
    assert np.array_equal(copy.read(5, 6, 70, 80), PIXELS[5:75, 6:86])


def test_threads_read_through_one_slide(tmp_path):
    write_svs(tmp_path / "a.svs", PIXELS, **LOSSLESS)
    assert find_misread(open_image(tmp_path / "a.svs"), PIXELS) == []


def test_a_slide_that_was_cut_off_is_known_when_it_is_opened(tmp_path):
    path = tmp_path / "a.svs"
    write_svs(path, PIXELS)
    data = path.read_bytes()
    for share in (0.1, 0.3, 0.9, 0.95, 0.999):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ImageError, match=r"a\.svs is damaged"):
            open_image(path)


def test_damage_inside_a_slide_is_reported_and_what_is_whole_is_still_read(tmp_path):
    """OpenSlide refuses everything after one failure; ours opens the slide again."""
    path = tmp_path / "a.svs"
    write_svs(path, PIXELS)
    with tifffile.TiffFile(path) as file:
        start = file.pages.first.dataoffsets[9]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"no JPEG data at all")
    opened = open_image(path)
    before = opened.read(300, 300, 64, 64)
    with pytest.raises(ImageError, match=r"a\.svs is damaged"):
        opened.read(0, 0, 600, 800)
    assert np.array_equal(opened.read(300, 300, 64, 64), before)


BAD = {
    "text.svs": (b"this is no slide", "is not a PNG, JPEG or TIFF picture, nor a slide .* begins with b'this is '"),
    "empty.svs": (b"", "nor a slide that OpenSlide knows: it is empty"),
    "header.svs": (b"II*\0\x08\0\0\0", "is damaged"),
    "half.ndpi": (b"II*\0", "is damaged"),
    "lone.mrxs": (b"\xff\xd8\xff\xe0 and no folder beside it", "nor a slide"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_slide_is_refused_by_name_and_reason(tmp_path, name):
    data, reason = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ImageError, match=reason) as caught:
        open_image(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_without_the_extra_its_name_is_said(tmp_path, monkeypatch):
    write_svs(tmp_path / "a.svs", PIXELS)
    (tmp_path / "a.mrxs").write_bytes(b"")
    write_pages(tmp_path / "a.tif", PIXELS)
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    for name in ("a.svs", "a.mrxs"):
        with pytest.raises(ImageError, match=rf"{name} is a whole slide.*pip install 'mpi4dl_nb\[wsi\]'"):
            open_image(tmp_path / name)
    assert open_image(tmp_path / "a.tif").shape() == (600, 800), "not every TIFF needs it"


class Slide:
    """OpenSlide's interface and nothing else: two levels of one picture, transparent outside."""

    level_dimensions = ((800, 600), (400, 300))
    level_downsamples = (1.0, 2.0)

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        (x, y), step = location, (1, 2)[level]
        inside = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 255, np.uint8)])[y::step, x::step][: size[1], : size[0]]
        return Image.fromarray(np.pad(inside, ((0, size[1] - len(inside)), (0, size[0] - inside.shape[1]), (0, 0))))


@pytest.mark.parametrize("sent", [False, True])
def test_anything_with_openslides_interface_is_taken(sent):
    opened = open_image(Slide())
    opened = pickle.loads(pickle.dumps(opened)) if sent else opened
    assert isinstance(opened, Picture)
    assert opened.levels == (Level(600, 800, 1.0), Level(300, 400, 2.0))
    assert opened.microns_per_px is None
    assert np.array_equal(opened.read(101, 50, 70, 90, 1), PIXELS[::2, ::2][101:171, 50:140])
    assert np.array_equal(opened.read(590, 0, 20, 1)[10:], np.full((10, 1, 3), 255))


def test_an_open_slide_is_taken_but_not_sent(tmp_path):
    write_svs(tmp_path / "a.svs", PIXELS, **LOSSLESS)
    with openslide.OpenSlide(tmp_path / "a.svs") as slide:
        opened = open_image(slide)
        assert isinstance(opened, SlideLikePicture)
        assert opened.microns_per_px == 0.499
        assert np.array_equal(opened.read(5, 6, 70, 80), PIXELS[5:75, 6:86])
        with pytest.raises(ImageError, match=r"An open OpenSlide cannot be sent to another rank .*Give its path"):
            pickle.dumps(opened)


def test_a_slide_of_no_pixels_is_refused():
    class Nothing(Slide):
        level_dimensions = ((0, 0), (0, 0))

    with pytest.raises(ImageError, match="there is nothing to read"):
        open_image(Nothing())


def test_a_region_of_another_size_than_was_asked_for_is_reported():
    class Short(Slide):
        def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
            return super().read_region(location, level, size).crop((0, 0, 3, 3))

    with pytest.raises(ImageError, match="Asked for 10 x 10 px, read_region gave 3 x 3"):
        open_image(Short()).read(0, 0, 10, 10)


def test_a_path_may_be_a_text(tmp_path: Path):
    write_svs(tmp_path / "a.svs", PIXELS)
    assert open_image(str(tmp_path / "a.svs")).name == "a.svs"
