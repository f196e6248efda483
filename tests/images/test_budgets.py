"""Bounds that bound: what a header asks for is refused before memory or time is spent on it."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images import files, folder, tiff_directory
from mpi4dl_nb.engines.images.mask_file import open_raw_image
from mpi4dl_nb.engines.images.ome_xml import choose_image, list_planes, parse_ome
from mpi4dl_nb.engines.images.picture import crop_picture, open_image
from mpi4dl_nb.engines.images.picture_reader import DecodeBlock, Level, Picture, Pixels
from mpi4dl_nb.engines.images.pillow import count_jpeg_scans
from mpi4dl_nb.engines.images.sample_data import load_cifar_images
from tests.images.made_slides import make_tissue
from tests.images.test_annotations import make_voc

# ---- pictures that are decoded whole


def write_false_header(path: Path, rows: int, cols: int, file_bytes: int) -> Path:
    """A small JPEG file whose header claims another size, and which is as long as that could be."""
    Image.new("RGB", (64, 64)).save(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"\xff\xc0")
    struct.pack_into(">HH", data, at + 5, rows, cols)
    path.write_bytes(data)
    os.truncate(path, file_bytes)
    return path


def test_a_picture_that_takes_more_memory_than_its_file_is_worth(tmp_path: Path):
    path = write_false_header(tmp_path / "a.jpg", 60_000, 60_000, 8 << 20)
    says = (
        r"a\.jpg: its 60000 x 60000 px can only be decoded all at once, which takes 23\.5 GB of memory, and 2\.0 GB are"
    )
    for read in (open_image, lambda path: open_raw_image(path).read(Tile.whole(1, 1))):
        with pytest.raises(
            ImageError, match=says + r" the most for a file of 8\.0 MB\. Save it as a TIFF file in tiles"
        ):
            read(path)


def test_no_pixel_is_decoded_before_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow decodes a PNG for whoever asks whether it is turned."""
    path = tmp_path / "a.png"
    Image.fromarray(make_tissue(64, 64)).save(path)
    decoded = []
    monkeypatch.setattr(PngImageFile, "load", decoded.append)
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(files, "_get_free_bytes", lambda: 40_000)
    for read in (open_image, lambda path: open_raw_image(path).read(Tile.whole(1, 1))):
        with pytest.raises(ImageError, match="half of what is free"):
            read(path)
    assert decoded == []


def test_what_is_free_bounds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.png"
    Image.fromarray(make_tissue(64, 64)).save(path)
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(files, "_get_free_bytes", lambda: 40_000)
    with pytest.raises(ImageError, match=r"19\.5 KB are the most here, half of what is free"):
        open_image(path)


def test_a_real_photograph_of_30_000_px_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At a tenth of a byte for each pixel, which is little; and a mask of as many, which packs into nothing."""
    monkeypatch.setattr(files, "_get_free_bytes", lambda: 16 << 30)
    (tmp_path / "a.jpg").touch()
    os.truncate(tmp_path / "a.jpg", 90 << 20)
    files.check_budget(tmp_path / "a.jpg", 7 * 30_000**2, "", "")
    (tmp_path / "mask.png").touch()
    os.truncate(tmp_path / "mask.png", 1 << 20)
    files.check_budget(tmp_path / "mask.png", 2 * 30_000**2, "", "")


def test_a_header_that_claims_more_than_a_format_can_pack(tmp_path: Path):
    with pytest.raises(ImageError, match="it says that it holds 60000 x 60000 pixels, but it has only 1048576 bytes"):
        open_image(write_false_header(tmp_path / "a.jpg", 60_000, 60_000, 1 << 20))


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path):
    path = tmp_path / "a.png"
    Image.fromarray(make_tissue(8, 8)).save(path)
    os.truncate(path, 1 << 42)
    for read in (open_image, open_raw_image):
        with pytest.raises(ImageError, match=r"it has 4,398,046,511,104 bytes and is read whole"):
            read(path)


PEAK = """
import sys
from pathlib import Path
from mpi4dl_nb.engines.images.picture import open_image

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

open_image(sys.argv[1])
before = peak()
open_image(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_picture_takes_what_was_asked_for_it(name: str, tmp_path: Path):
    """Pillow's four bytes and our three for a pixel, and not each of them twice."""
    Image.new("RGB", (8, 8)).save(tmp_path / f"small{name}")
    Image.new("RGB", (6000, 6000)).save(tmp_path / name)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PEAK, tmp_path / f"small{name}", tmp_path / name]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert int(told) < 10 * 6000**2


def test_scans_that_never_end(tmp_path: Path):
    path = tmp_path / "a.jpg"
    Image.fromarray(make_tissue(64, 64)).save(path, progressive=True)
    data = path.read_bytes()
    scans = count_jpeg_scans(data)
    assert 6 <= scans <= 14
    assert count_jpeg_scans(data + b"\xff\xda\0\2" * 100) == scans, "what lies behind the picture is not the picture"
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:-2] + data[last:-2] * 40 + data[-2:])
    with pytest.raises(ImageError, match=r"a\.jpg has more than 32 scans, where a JPEG picture has about 10"):
        open_image(path)


def test_scans_of_a_file_with_further_pictures(tmp_path: Path):
    """Pillow gives such a file another name, and it has the same limits."""
    path, several = tmp_path / "a.jpg", tmp_path / "b.jpg"
    image = Image.fromarray(make_tissue(64, 64))
    image.save(path, progressive=True)
    image.save(several, "mpo", save_all=True, append_images=[image])
    data, other = path.read_bytes(), several.read_bytes()
    at, last = other.index(b"MPF\0") - 4, data.rindex(b"\xff\xda")
    index = other[at : at + 2 + int.from_bytes(other[at + 2 : at + 4], "big")]
    path.write_bytes(data[:2] + index + data[2:-2] + data[last:-2] * 40 + data[-2:])
    with pytest.raises(ImageError, match=r"a\.jpg has more than 32 scans"):
        open_image(path)


# ---- XML


OME = (
    '<OME>{}<Image><Pixels SizeX="4" SizeY="4" SizeZ="1" SizeT="1" SizeC="3" PhysicalSizeX="0.5" PhysicalSizeY="0.5">'
    '<Channel SamplesPerPixel="3"/>{}</Pixels></Image>{}'
)


def find_page(text: str) -> tuple[int, float | None]:
    (image,) = parse_ome(Path("a"), text).images
    (source,) = list_planes(Path("a"), image, alone=True)
    return source.ifd, image.microns_per_px


def test_what_follows_the_images_of_ome_xml_is_not_read():
    assert find_page(OME.format("", '<TiffData IFD="2"/>', "<StructuredAnnotations><this is never read")) == (2, 0.5)
    assert find_page(OME.format("", "<X><TiffData IFD='2'/></X>", "<ROI/><nor this")) == (0, 0.5)


def test_no_tree_is_made_of_what_comes_before():
    text = OME.format('<Well Row="1"/>' * 50_000, "", "</OME>")
    tracemalloc.start()
    try:
        assert find_page(text)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


def test_the_pages_of_a_stack_are_not_kept():
    pages = "<TiffData IFD='1'/>" * 50_000
    text = OME.format("", pages, "</OME>").replace('SizeT="1"', 'SizeT="50000"')
    assert parse_ome(Path("a"), text).images[0].tiff_data == []


def test_thousands_of_images_are_refused():
    image = '<Image><Pixels SizeX="4" SizeY="4"/></Image>'
    with pytest.raises(ImageError, match="describes more than 1000 images"):
        choose_image(Path("a"), parse_ome(Path("a"), f"<OME>{image * 1001}</OME>").images)


def test_annotations_of_many_megabytes_are_not_parsed(tmp_path: Path):
    make_voc(tmp_path)
    os.truncate(tmp_path / "Annotations" / "one.xml", folder.XML_BYTES + 1)
    with pytest.raises(ImageError, match=r"one\.xml .*larger than 33,554,432 bytes"):
        folder.write_boxes_table(tmp_path, "train", tmp_path / "t.csv")


def test_a_link_of_annotations_is_not_followed_out(tmp_path: Path):
    voc = make_voc(tmp_path / "voc")
    (voc / "Annotations" / "one.xml").rename(tmp_path / "canary.xml")
    (voc / "Annotations" / "one.xml").symlink_to(tmp_path / "canary.xml")
    with pytest.raises(ImageError, match=r"one\.xml is a link that leads out of .*voc\. Copy the folder whole"):
        folder.write_boxes_table(voc, "train", tmp_path / "t.csv")


# ---- TIFF


def test_pages_within_pages_are_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Thousands of them may be one and the same page, with tens of thousands of tags."""
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(make_tissue(64, 64), photometric="rgb", subifds=20, metadata=None)
        for _ in range(20):
            file.write(make_tissue(32, 32), photometric="rgb", subfiletype=1, metadata=None)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert len(tiff_directory.list_sub_pages(tmp_path / "a.tif", file.pages.first)) == 16
    assert open_image(tmp_path / "a.tif").shape() == (64, 64)
    monkeypatch.setattr(tiff_directory, "MOST_TAGS", 5)
    with pytest.raises(ImageError, match=r"page 0 says that it has \d+ tags, where 5 are many"):
        open_image(tmp_path / "a.tif")


def test_a_description_of_many_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tifffile.imwrite(tmp_path / "a.tif", make_tissue(8, 8), photometric="rgb", description="x" * 2000)
    assert open_image(tmp_path / "a.tif").shape() == (8, 8)
    monkeypatch.setattr(tiff_directory, "TEXT_BYTES", 1000)
    with pytest.raises(ImageError, match="the text in tag 270 of page 0 has 2001 bytes"):
        open_image(tmp_path / "a.tif")


def test_a_strip_that_is_decoded_whole_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((64, 64), np.uint8), compression="zlib", rowsperstrip=64)
    for name, value in {"SMALL_BYTES": 0, "ANY_FILE_BYTES": 1000, "PER_BYTE": 1}.items():
        monkeypatch.setattr(files, name, value)
    for read in (open_image, open_raw_image):
        with pytest.raises(
            ImageError, match=r"its tiles or strips of 64 x 64 px are decoded whole, .* in smaller tiles"
        ):
            read(path)


@pytest.mark.parametrize("tag", [b"\x00\x01\x04\x00", b"\x01\x01\x04\x00"], ids=["width", "length"])
def test_a_tiff_header_that_claims_a_million_px(tag: bytes, tmp_path: Path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, make_tissue(64, 64), photometric="rgb", compression="zlib", rowsperstrip=64)
    data = bytearray(path.read_bytes())
    at = data.index(tag)
    struct.pack_into("<I", data, at + 8, 1 << 30)
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"a\.tif is damaged: it says that it holds .*1073741824"):
        open_image(path)


# ---- thumbnails


MILLION = (1 << 20, 1 << 20)


class Coarse(Picture):
    """A picture of which so much is decoded at once, that counts how often it is read."""

    def __init__(self, sides: tuple[int, int], segment: DecodeBlock) -> None:
        super().__init__("coarse", [Level(*sides)])
        self.decoded, self.reads = segment, 0

    def get_decode_block(self, level: int) -> DecodeBlock:
        return self.decoded

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        self.reads += 1


@pytest.mark.parametrize(
    ("sides", "segment", "reads"),
    [
        (MILLION, DecodeBlock(), 64 * 64),
        (MILLION, DecodeBlock(512, 512, 1 << 18), 64 * 64),
        (MILLION, DecodeBlock(8192, 8192, 1 << 26), 8 * 8),
        (MILLION, DecodeBlock(1 << 15, 1 << 15, 1 << 30), 4 * 4),
        (MILLION, DecodeBlock(1, 1 << 20, 1 << 20), 16 * 16),
        ((20_000, 20_000), DecodeBlock(20_000, 20_000, 400_000_000), 4 * 4),
        ((20_000, 20_000), DecodeBlock(32, 32, 1 << 18), 64 * 64),
    ],
)
def test_a_thumbnail_decodes_only_so_much(sides: tuple[int, int], segment: DecodeBlock, reads: int):
    picture = Coarse(sides, segment)
    assert max(picture.thumbnail(100).shape) == 100
    assert picture.reads <= reads


def test_a_region_says_what_its_picture_decodes_at_once():
    picture = Coarse((4096, 4096), DecodeBlock(512, 512, 1 << 18))
    assert crop_picture(picture, 5, 6, 70, 80).get_decode_block(0) == DecodeBlock(512, 512, 1 << 18)


# ---- pickles of CIFAR-10


def test_a_pickle_makes_room_for_no_more_than_it_has(tmp_path: Path):
    doubled: list[object] = [1]
    for _ in range(40):
        doubled = [doubled, doubled]
    pixels = np.zeros((1, 3072), np.uint8)
    array = b"\x80\x02}(U\x04datacnumpy\nndarray\n\x8a\x05" + (1 << 35).to_bytes(5, "little") + b"\x85RU\x06labels]u."
    for data, says in (
        (b"\x80\x02}r\xff\xff\xff\x7f.", "it speaks of its object 2147483647, and has 9 bytes"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"x.", "expected 68719476736 bytes in a bytearray8"),
        (array, "takes no arguments"),
        (pickle.dumps({b"data": pixels, b"labels": doubled}, 2), "labels no numbers"),
    ):
        (tmp_path / "data_batch_1").write_bytes(data)
        with pytest.raises(ImageError, match=f"data_batch_1 is no CIFAR-10 batch, or damaged: .*{says}"):
            load_cifar_images(tmp_path, (32, 32))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_a_batch_that_is_no_file_is_named(kind: str, tmp_path: Path):
    path = tmp_path / "data_batch_1"
    make = {"pipe": os.mkfifo, "folder": Path.mkdir, "loop": lambda path: path.symlink_to(path)}
    make.get(kind, lambda path: path.symlink_to("/dev/zero"))(path)
    with pytest.raises(ImageError, match="data_batch_1"):
        load_cifar_images(tmp_path, (32, 32))


# ---- the memory of a decode is what was asked for it, in a process of its own

MEASURE = """
import sys
from pathlib import Path
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import files
from mpi4dl_nb.engines.images.mask_file import open_raw_image
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.geometry.tiles import Tile

def measure(read, path):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) * 1024
    before = status("VmRSS")
    try:
        read(path)
        told = "read"
    except ImageError:
        told = "refused"
    print(Path(path).name, told, status("VmHWM") - before, flush=True)

def read_mask(path):
    open_raw_image(Path(path)).read(Tile.whole(1, 1))

open_image(sys.argv[1]).read(0, 0, 8, 8)
for limit, *paths in (argument.split(",") for argument in sys.argv[2:]):
    files.ANY_FILE_BYTES, files.PACKED_PER_BYTE = int(limit), 2 if int(limit) < 1 << 30 else 2048
    files.PER_BYTE = 1 if int(limit) < 1 << 30 else 128
    for path in paths:
        measure(open_image, path)
        if int(limit) < 1 << 30:
            measure(read_mask, path)
"""
LIMIT_BYTES = 100 << 20
BANDS_BYTES = 80 << 20  # a few bands of rows, and what libraries allocate at their first use


@pytest.mark.nightly
def test_a_decode_takes_no_more_memory_than_the_limit(tmp_path: Path):
    """The largest pictures of each kind that pass take at most the limit, and larger ones nothing."""
    black, clear = Image.new("1", (8, 8)), {"transparency": 0}
    kinds = {  # mode, bytes of memory for each pixel, file ending, options
        "bits": ("1", 2, "png", {}),
        "grey": ("L", 2, "png", {}),
        "palette": ("P", 4, "png", {}),
        "clear": ("L", 4, "png", clear),
        "colours": ("RGB", 7, "png", {}),
        "alpha": ("RGBA", 7, "png", {}),
        "jpeg": ("RGB", 7, "jpg", {}),
        "scans": ("RGB", 13, "jpg", {"progressive": True}),
        "fax": ("1", 3, "tif", {"compression": "group4"}),
    }
    black.save(tmp_path / "small.png")
    small, large = [], []
    for name, (mode, per_px, ending, options) in kinds.items():
        for factor, listed in ((0.95, small), (1.3, large)):
            side = int((factor * LIMIT_BYTES / per_px) ** 0.5)
            listed.append(tmp_path / f"{name}{factor}.{ending}")
            Image.new(mode, (side, side)).save(listed[-1], **options)
    Image.new("1", (20_000, 20_000)).save(tmp_path / "48kB.png")
    command = [sys.executable, "-c", MEASURE, tmp_path / "small.png"]
    command += [f"{LIMIT_BYTES},{','.join(map(str, [*small, *large]))}", f"{1 << 30},{tmp_path / '48kB.png'}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    lines = [line.split() for line in told.splitlines()]
    assert len(lines) == 2 * (len(small) + len(large)) + 1
    for number, (name, verdict, grown) in enumerate(lines):
        as_picture = number % 2 == 0
        # Compositing on white holds each band several times.
        bands = 2 * BANDS_BYTES if name.startswith(("alpha", "clear")) else BANDS_BYTES
        most = 1 << 30 if name == "48kB.png" else LIMIT_BYTES + bands
        assert int(grown) < most, (name, verdict, grown)
        if as_picture and name != "48kB.png":
            assert verdict == ("read" if "0.95" in name else "refused"), (name, grown)
            assert verdict == "read" or int(grown) < BANDS_BYTES, (name, grown)
    assert lines[-1][1] == "read", "it is an honest picture"
