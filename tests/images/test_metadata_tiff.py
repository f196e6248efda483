"""A made file for each row of the section TIFF of the table of metadata."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from made_files import (
    SECTIONS,
    MadeFile,
    check_row,
    expand_channels,
    list_rows_without_files,
    read_by_gdal,
    read_by_openslide,
    read_by_pillow,
    read_by_tifffile,
)
from PIL import Image, ImageCms
from raw_tiff import Tags, make_tile_tags, split_tiles, write_tiff

from mpi4dl_nb.engines.images.dataset import IGNORED
from mpi4dl_nb.engines.images.tiff_page import TiffPageReader

RGB = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
GREY, OTHER = RGB[..., 0].copy(), RGB[..., 1].copy()
CLEAR = np.dstack([RGB, OTHER])
BY_ALL = {read_by_tifffile: None, read_by_pillow: None, read_by_gdal: None}
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="3"/></rdf:RDF></x:xmpmeta>'
)
SCALE = (
    '<GDALMetadata><Item name="OFFSET" sample="0" role="offset">10</Item>'
    '<Item name="SCALE" sample="0" role="scale">0.5</Item></GDALMetadata>'
)
COLOURS = (np.arange(768) * 83 % 65536).tolist()
TABLE = np.array(COLOURS).reshape(3, 256).T
TRANSPARENT, LOSSY = "is transparent", "compressed as JPEG"
KIND = "colours of another kind than RGB"


def make_page(
    shape: Sequence[int], segments: Sequence[bytes | None], tags: Tags, order: str = "<"
) -> Callable[[Path], Path]:
    """How to write one page of any tags."""
    return lambda folder: write_tiff(folder / "a.tif", tuple(shape), segments, tags, order)


def make_grey(tags: Tags, pixels: np.ndarray = GREY) -> Callable[[Path], Path]:
    return make_page(pixels.shape, [pixels.tobytes()], tags)


def make_ignored(tags: Tags) -> MadeFile:
    """Tags that change neither picture nor mask."""
    return MadeFile(make_grey(tags), GREY, GREY, naive=GREY, others={read_by_tifffile: None, read_by_gdal: None})


def make(pages: Sequence[tuple[np.ndarray, dict[str, Any]]], **options: Any) -> Callable[[Path], Path]:
    """How to write pages with tifffile."""

    def write(folder: Path) -> Path:
        with tifffile.TiffWriter(folder / "a.tif", **options) as file:
            for pixels, chosen in pages:
                kind = "rgb" if pixels.ndim == 3 and pixels.shape[-1] == 3 else "minisblack"
                file.write(pixels, **{"photometric": kind, "metadata": None} | chosen)
        return folder / "a.tif"

    return write


def clear_last_tile(pixels: np.ndarray, *numbers: int) -> np.ndarray:
    """The last tile of 16 x 16 px is not in the file; its pixels."""
    found = pixels.copy()
    found[16:, 32:] = numbers or 0
    return found


def make_incomplete(pixels: np.ndarray, **tags: Any) -> Callable[[Path], Path]:
    """How to write it without its last tile."""
    given = {int(name[1:]): value for name, value in tags.items()}
    tiles = [zlib.compress(tile) for tile in split_tiles(pixels, 16)]
    return make_page(pixels.shape, [*tiles[:-1], None], make_tile_tags(16) | {259: ("H", [8])} | given)


def lay_on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """On white, rounded to the nearest."""
    weight = alpha[..., None].astype(float) / 255
    return np.rint(expand_channels(colours) * weight + 255 * (1 - weight)).astype(np.uint8)


def pack(numbers: np.ndarray, bits: int) -> bytes:
    return np.packbits(
        np.unpackbits(numbers.astype(np.uint8)[..., None], 2)[..., 8 - bits :].reshape(32, -1), 1
    ).tobytes()


BLOCKS = RGB[::8, ::8].repeat(8, 0).repeat(8, 1)  # decoders round alike where a block of JPEG has one colour
JPEG = imagecodecs.jpeg8_encode(BLOCKS, level=95, colorspace="rgb", outcolorspace="ycbcr", subsampling="444")
DECODED, STORED = imagecodecs.jpeg8_decode(JPEG), imagecodecs.jpeg8_decode(JPEG, outcolorspace="ycbcr")
IN_JPEG = {262: ("H", [6]), 259: ("H", [7]), 530: ("H", [1, 1])}
WIDE_RANGE = ("2I", [16, 1, 235, 1, 128, 1, 240, 1, 128, 1, 240, 1])
REC_709 = ("2I", [2126, 10000, 7152, 10000, 722, 10000])
APERIO = "Aperio Image Library v11.2.1 \r\n48x32 [0,0 48x32] (16x16) |AppMag = 20|MPP = 0.4990"
GREYS = np.arange(16, dtype=np.uint8).repeat(96).reshape(32, 48)
LINES = np.diff(RGB, axis=1, prepend=np.zeros((32, 1, 3), np.uint8))
FAX = GREY > 127
MULTIPLIED = np.dstack([np.minimum(RGB, OTHER[..., None]), OTHER])


def write_fax(folder: Path) -> Path:
    Image.fromarray(FAX).save(folder / "a.tif", compression="group4")
    return folder / "a.tif"


def write_with_jpeg_tables(folder: Path) -> Path:
    """As libtiff writes JPEG: the tables that all tiles share lie in a tag."""
    tiles = [imagecodecs.jpeg8_encode(SMOOTH[y : y + 16, x : x + 16], level=95) for y in (0, 16) for x in (0, 16, 32)]
    start = tiles[0].index(b"\xff\xdb")  # the tables of quantisation, before the header of the frame
    stop = tiles[0].index(b"\xff\xc0")
    tables, rest = b"\xff\xd8" + tiles[0][start:stop] + b"\xff\xd9", [tile[:start] + tile[stop:] for tile in tiles]
    tags = make_tile_tags(16) | {259: ("H", [7]), 347: ("B", list(tables))}
    return write_tiff(folder / "a.tif", SMOOTH.shape, rest, tags)


SMOOTH = np.add.outer(np.arange(32), 2 * np.arange(48)).astype(np.uint8)
TILES = np.vstack([
    np.hstack([imagecodecs.jpeg8_decode(imagecodecs.jpeg8_encode(SMOOTH[y : y + 16, x : x + 16], level=95))
               for x in (0, 16, 32)]) for y in (0, 16)
])  # fmt: skip

PLACES = {
    "Orientation": MadeFile(
        make_grey({274: ("H", [6])}), np.rot90(GREY, -1), np.rot90(GREY, -1),
        others={read_by_pillow: None, read_by_gdal: GREY},
    ),
    "Orientation in XMP": make_ignored({700: ("B", list(XMP.encode()))}),
    "PlanarConfiguration": MadeFile(
        make_page(RGB.shape, [RGB[..., k].tobytes() for k in range(3)], {284: ("H", [2]), 278: ("I", [32])}),
        RGB, GREY, naive=np.moveaxis(RGB, -1, 0).reshape(RGB.shape), others=BY_ALL,
        write_mask=make_page(RGB.shape, [GREY.tobytes()] * 3, {284: ("H", [2]), 278: ("I", [32])}),
    ),
    "NewSubfileType: reduced": MadeFile(
        make([(GREY[::2, ::2].copy(), {"subfiletype": 1}), (GREY, {})]), GREY, GREY, naive=None
    ),
    "NewSubfileType: mask": MadeFile(
        make([(GREY, {}), (FAX, {"photometric": "mask", "subfiletype": 4})]),
        GREY, "has no pixel at row 0, column 0", naive=GREY, others={read_by_gdal: None, read_by_pillow: None},
    ),
    "SubIFDs": MadeFile(
        make([(GREY[::2, ::2].copy(), {"subfiletype": 1, "subifds": 1}), (GREY, {})]), GREY, GREY
    ),
    "several pages of one size": MadeFile(make([(GREY, {}), (OTHER, {})]), "a stack", "a stack"),
    "ImageDepth": MadeFile(
        make([(np.zeros((16, 32, 32), np.uint8), {"volumetric": True, "tile": (16, 16, 16)})]),
        "a stack of 16 planes", "no plain numbers",
    ),
    "ImageJ: images": MadeFile(
        make([(np.stack([GREY, OTHER]), {"metadata": {"axes": "TYX"}, "contiguous": True})], imagej=True),
        "a stack", "a stack",
    ),
    "ImageJ: ranges and LUTs": MadeFile(
        make([(GREY, {"metadata": {"Ranges": (10.0, 20.0), "LUTs": [np.zeros((3, 256), np.uint8)]}})], imagej=True),
        GREY, GREY, naive=GREY, others=BY_ALL,
    ),
    "MetaMorph: UIC2Tag": MadeFile(make_grey({33628: ("I", [0, 0]), 33629: ("2I", [0, 1] * 6)}), "a stack", "a stack"),
    "overlapping tiles of Trestle": MadeFile(
        make_page(
            RGB.shape, [zlib.compress(tile) for tile in split_tiles(RGB, 16)],
            make_tile_tags(16) | {259: ("H", [8]), 305: ("s", "MedScan"), 270: ("s", "OverlapsXY= 4 4;")},
        ),
        np.vstack([np.hstack([RGB[y : y + h, x : x + w] for x, w in ((0, 12), (16, 12), (32, 16))])
                   for y, h in ((0, 12), (16, 16))]),
        others={read_by_openslide: None},
    ),
}  # fmt: skip
VOID = np.where(clear_last_tile(GREY, 7) == 7, IGNORED, clear_last_tile(GREY, 7).astype(int))
EMPTY = {
    "empty tiles or strips": MadeFile(
        make_incomplete(GREY), clear_last_tile(GREY), clear_last_tile(GREY), naive=clear_last_tile(GREY, 255),
        others={read_by_tifffile: None, read_by_gdal: None},
    ),
    "GDAL_NODATA": MadeFile(
        make_incomplete(GREY, t42113=("s", "7")), clear_last_tile(GREY, 7), VOID,
        naive=clear_last_tile(GREY), others={read_by_tifffile: None, read_by_gdal: None},
        options={"classes": 256, "ignore": 7},
    ),
    "GDAL_NODATA that no pixel can hold": MadeFile(make_incomplete(GREY, t42113=("s", "-9999")), "-9999", "-9999"),
    "empty tiles of a vendor's slide": MadeFile(
        make_incomplete(RGB, t270=("s", APERIO)), clear_last_tile(RGB, 255, 255, 255), clear_last_tile(GREY),
        naive=clear_last_tile(RGB),
        others={read_by_openslide: None}, write_mask=make_incomplete(GREY, t270=("s", APERIO)),
    ),
}  # fmt: skip
PALETTE = {262: ("H", [3]), 320: ("H", COLOURS)}
HALVED = {262: ("H", [3]), 320: ("H", [colour >> 8 for colour in COLOURS])}
KINDS = {
    "PhotometricInterpretation: white is zero": MadeFile(
        make_grey({262: ("H", [0])}), 255 - GREY, GREY, naive=GREY, others={read_by_pillow: None, read_by_gdal: GREY}
    ),
    "ColorMap": MadeFile(
        make_grey(PALETTE), TABLE[GREY] >> 8, GREY, naive=GREY, others={read_by_pillow: None, read_by_gdal: GREY}
    ),
    "ColorMap of 8-bit colours": MadeFile(
        make_grey(HALVED), TABLE[GREY] >> 8, GREY, naive=np.zeros_like(GREY), others={read_by_gdal: GREY}
    ),
    "Indexed": MadeFile(make_grey({346: ("H", [1])}), "indices into a palette of another kind", GREY),
    "YCbCr in JPEG": MadeFile(make_page(RGB.shape, [JPEG], IN_JPEG), DECODED, LOSSY, naive=STORED, others=BY_ALL),
    "YCbCrCoefficients, ReferenceBlackWhite of JPEG": MadeFile(
        make_page(RGB.shape, [JPEG], IN_JPEG | {529: REC_709, 531: ("H", [2]), 532: WIDE_RANGE}),
        DECODED, LOSSY, naive=DECODED, others=BY_ALL,
    ),
    "YCbCr without JPEG": MadeFile(
        make_page(RGB.shape, [zlib.compress(np.full(RGB.shape, (81, 90, 240), np.uint8).tobytes())],
            {262: ("H", [6]), 530: ("H", [1, 1]), 259: ("H", [8])}),
        np.full(RGB.shape, (238, 14, 14), np.uint8), KIND, others={read_by_pillow: None, read_by_gdal: None},
    ),
    "YCbCrCoefficients without JPEG": MadeFile(
        make_page(RGB.shape, [RGB.tobytes()], {262: ("H", [6]), 530: ("H", [1, 1]), 529: REC_709}), "tags 529", KIND
    ),
    "YCbCrSubSampling without JPEG": MadeFile(
        make_page(RGB.shape, [RGB[:16].tobytes()], {262: ("H", [6])}), "reduced colours", KIND
    ),
    "CMYK, InkSet, DotRange": MadeFile(
        make_page(CLEAR.shape, [CLEAR.tobytes()], {262: ("H", [5]), 332: ("H", [1]), 336: ("H", [0, 200])}),
        r"printing inks \(CMYK\)", KIND,
    ),
    "L*a*b*, Decode": MadeFile(
        make_page(RGB.shape, [RGB.tobytes()], {262: ("H", [10]), 433: ("f", [0.0, 100.0])}), "ITULAB", KIND
    ),
    "LogL, LogLuv": MadeFile(make_page(RGB.shape, [RGB.tobytes()], {262: ("H", [32845])}), "LOGLUV", KIND),
    "CFA, LinearRaw": MadeFile(make_grey({262: ("H", [32803])}), "camera's sensor", KIND),
    "PhotometricInterpretation: mask": MadeFile(
        make([(FAX, {"photometric": "mask"})]), "a transparency mask", FAX.astype(int)
    ),
    "ICC profile": make_ignored(
        {34675: ("B", list(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()))}
    ),
    "TransferFunction, WhitePoint, PrimaryChromaticities": make_ignored(
        {301: ("H", list(range(65535, -1, -257))[:256]), 318: ("2I", [1, 3] * 2), 319: ("2I", [1, 3] * 6)}
    ),
    "GrayResponseCurve": make_ignored({290: ("H", [2]), 291: ("H", list(range(256)))}),
    "MinSampleValue, MaxSampleValue": make_ignored(
        {280: ("H", [10]), 281: ("H", [20]), 340: ("B", [10]), 341: ("B", [20])}
    ),
    "GDAL_METADATA: scale, offset": make_ignored({42112: ("s", SCALE)}),
    "GeoTIFF": make_ignored({33550: ("d", [1.0, -1.0, 0.0]), 33922: ("d", [0.0, 0, 0, 5, 5, 0])}),
}  # fmt: skip
SIGNED = GREY.astype(np.int8) & 127
NUMBERS = {
    "BitsPerSample 1, 2, 4": MadeFile(
        make_page(GREY.shape, [pack(GREYS, 4)], {258: ("H", [4])}), GREYS * 17, GREYS,
        naive=GREYS, others={read_by_pillow: None, read_by_tifffile: GREYS, read_by_gdal: GREYS},
    ),
    "BitsPerSample above 8": MadeFile(make([(GREY.astype(np.uint16), {})]), "16 bits per channel", GREY),
    "SampleFormat": MadeFile(make([(SIGNED, {})]), "signed integers of 8 bits", SIGNED),
    "SampleFormat: undefined": MadeFile(
        make_grey({339: ("H", [4])}), GREY, GREY, others={read_by_tifffile: None, read_by_gdal: None}
    ),
    "ExtraSamples: alpha": MadeFile(
        make_page(CLEAR.shape, [CLEAR.tobytes()], {338: ("H", [2])}), lay_on_white(RGB, OTHER), TRANSPARENT,
        naive=RGB, others={read_by_tifffile: CLEAR, read_by_gdal: CLEAR},
    ),
    "ExtraSamples: premultiplied alpha": MadeFile(
        make_page(CLEAR.shape, [MULTIPLIED.tobytes()], {338: ("H", [1])}),
        MULTIPLIED[..., :3] + (255 - OTHER)[..., None],
        TRANSPARENT, naive=lay_on_white(MULTIPLIED[..., :3], OTHER),
        others={read_by_tifffile: MULTIPLIED, read_by_gdal: MULTIPLIED},
    ),
    "ExtraSamples: alpha after others": MadeFile(
        make_page((32, 48, 5), [np.dstack([RGB, GREY, OTHER]).tobytes()], {338: ("H", [0, 2])}),
        lay_on_white(RGB, OTHER),
        TRANSPARENT, naive=lay_on_white(RGB, GREY),
    ),
    "premultiplied alpha without colours": MadeFile(
        make_page((32, 48, 2), [np.dstack([GREY, OTHER]).tobytes()], {338: ("H", [1]), 262: ("H", [0])}),
        "premultiplied alpha", TRANSPARENT,
    ),
    "ExtraSamples: unspecified": MadeFile(
        make_page(CLEAR.shape, [CLEAR.tobytes()], {338: ("H", [0])}), RGB, "4 channels", naive=RGB,
        others={read_by_pillow: None, read_by_tifffile: CLEAR, read_by_gdal: CLEAR},
    ),
    "FillOrder": MadeFile(
        make_grey({266: ("H", [2])}, imagecodecs.bitorder_encode(GREY)), GREY, GREY,
        naive=imagecodecs.bitorder_encode(GREY), others=BY_ALL,
    ),
    "byte order": MadeFile(
        make_page(RGB.shape, [RGB.tobytes()], {}, ">"), RGB, GREY, others=BY_ALL,
        write_mask=make([(GREY.astype(np.uint16), {})], byteorder=">"),
    ),
    "Predictor": MadeFile(
        make_page(RGB.shape, [zlib.compress(LINES.tobytes())], {317: ("H", [2]), 259: ("H", [8])}), RGB, GREY,
        naive=LINES, others=BY_ALL, write_mask=make([(GREY, {"compression": "zlib", "predictor": True})]),
    ),
    "Predictor without its compression": MadeFile(
        make_grey({317: ("H", [2])}), GREY, GREY, naive=GREY, others={read_by_pillow: None, read_by_gdal: None}
    ),
    "Predictor of other kinds": MadeFile(
        make_page(GREY.shape, [zlib.compress(pack(GREYS, 4))], {258: ("H", [4]), 317: ("H", [2]), 259: ("H", [8])}),
        r"\(Predictor\)", r"\(Predictor\)",
    ),
    "Compression: fax": MadeFile(write_fax, FAX * np.uint8(255), "as a fax is",
                                 others={read_by_pillow: None}),
    "Compression of other kinds": MadeFile(
        make([(RGB, {"compression": "webp", "tile": (16, 16)})]), "compressed by WEBP.*gdal_translate", "50001"
    ),
    "JPEGTables": MadeFile(write_with_jpeg_tables, TILES, LOSSY, others=BY_ALL),
}  # fmt: skip
MADE = PLACES | EMPTY | KINDS | NUMBERS


def test_every_row_has_a_made_file():
    assert list_rows_without_files(SECTIONS["TIFF"], MADE) == []


@pytest.mark.parametrize("row", SECTIONS["TIFF"], ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    check_row(row, MADE[row.name], tmp_path)


def test_a_level_without_a_number_for_blank_tiles_has_that_of_the_full_size(tmp_path):
    """GDAL writes the tag at the full size alone."""
    paths = []
    for name, tags in (("level", {}), ("full", {"t42113": ("s", "7")})):
        (tmp_path / name).mkdir()
        paths.append(make_incomplete(GREY, **tags)(tmp_path / name))
    with tifffile.TiffFile(paths[0]) as level, tifffile.TiffFile(paths[1]) as full:
        found = np.empty((32, 48, 1), np.uint8)
        TiffPageReader(paths[0], level.pages[0], base=full.pages[0]).fill(found, 0, 0)
    assert np.array_equal(found[..., 0], clear_last_tile(GREY, 7))
