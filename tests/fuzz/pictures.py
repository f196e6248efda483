"""Pictures: one small file of each kind, damaged, and OME-XML that names files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tifffile
from PIL import Image

from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import Picture
from tests.fuzz.damage import DAMAGES, make_damaged_bytes, replace_tag, update_png_sums
from tests.fuzz.judge import Case, Outside, Random
from tests.images.made_slides import make_tissue, write_ome, write_pages, write_svs

MOST_PX = 1 << 20  # that are read of a picture at once


@cache
def make_files() -> dict[str, bytes]:
    """One small file of each kind, by name."""
    small = make_tissue(96, 130)
    clear = np.dstack([small, small[..., 0]])
    with TemporaryDirectory() as place:
        folder = Path(place)
        Image.fromarray(small).save(folder / "a.png")
        Image.fromarray(clear).save(folder / "alpha.png")
        Image.fromarray(small).quantize(16).save(folder / "palette.png")
        Image.fromarray(small).save(folder / "a.jpg")
        Image.fromarray(small).save(folder / "progressive.jpg", progressive=True)
        Image.fromarray(small).convert("1").save(folder / "fax.tif", compression="group4")
        tifffile.imwrite(folder / "plain.tif", small, photometric="rgb", rowsperstrip=16)
        for name in ("lzw", "jpeg", "jpeg2000", "zstd", "packbits"):
            tifffile.imwrite(folder / f"{name}.tif", small, photometric="rgb", tile=(32, 32), compression=name)
        tifffile.imwrite(folder / "predicted.tif", small, photometric="rgb", compression="deflate", predictor=True)
        tifffile.imwrite(folder / "big.tif", small, photometric="rgb", tile=(32, 32), bigtiff=True, byteorder=">")
        write_pages(folder / "pages.tif", small, tile=(32, 32))
        write_ome(folder / "a.ome.tif", small, tile=(32, 32))
        write_svs(folder / "a.svs", make_tissue(192, 256), tile=32)
        write_svs(folder / "plain.svs", small, tile=32, compression=None)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_odd_picture(outside: Outside) -> Path:
    """A picture that was not given, of a colour that no tissue has."""
    held = BytesIO()
    Image.new("RGB", (130, 96), (1, 254, 2)).save(held, "TIFF")
    return outside.write_file("odd.tif", held.getvalue())


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Each file as it was made."""
    for name, data in make_files().items():
        yield _write_case(folder / name, data, name)


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """Bytes, fields of TIFF directories, and now and then what OME-XML says."""
    name = list(make_files())[number % len(make_files())]
    if name == "a.ome.tif" and random.integers(3) == 0:
        told, data = _replace_xml(make_files()[name], random, write_odd_picture(outside))
    else:
        told, data = make_damaged_bytes(make_files()[name], random, (*DAMAGES, replace_tag))
    if name.endswith(".png") and random.integers(2):
        repaired = bytearray(data)
        update_png_sums(repaired)
        data = bytes(repaired)
    return _write_case(folder / name, data, f"{name}, {told}")


def _replace_xml(data: bytes, random: Random, odd: Path) -> tuple[str, bytes]:
    """An OME-TIFF file whose XML leads to another file, by the ways that the standard and XML have."""
    start, stop = data.index(b"<OME"), data.index(b"</OME>") + 6
    entity = f'<!DOCTYPE OME [<!ENTITY odd SYSTEM "{odd.as_uri()}">]><OME>&odd;'.encode()
    companion = f'<OME><BinaryOnly MetadataFile="{odd}" UUID="urn:uuid:0"/>'.encode()
    uuid = f'<TiffData IFD="0"><UUID FileName="{odd}">urn:uuid:0</UUID></TiffData></Pixels>'.encode()
    ways = (
        ("entity", entity + data[start + 4 : stop]),
        ("companion", companion + data[start + 4 : stop]),
        ("uuid", data[start:stop].replace(b"</Pixels>", uuid)),
    )
    told, xml = ways[int(random.integers(len(ways)))]
    # The XML is put behind the file, and its tag (270) made to point there.
    changed = bytearray(data + xml + b"\0")
    tag = changed.index(b"\x0e\x01\x02\x00")
    changed[tag + 4 : tag + 12] = (len(xml) + 1).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return told, bytes(changed)


def _write_case(path: Path, data: bytes, told: str) -> Case:
    path.write_bytes(data)
    return Case(told, path, lambda: look(open_image(path)))


def look(picture: Picture) -> None:
    """Read as a training and a drawing would."""
    for level, size in enumerate(picture.levels):
        rows, cols = min(size.height, MOST_PX // min(size.width, 1024)), min(size.width, 1024)
        picture.read(0, 0, rows, cols, level)
        picture.read(size.height - 5, size.width - 5, 9, 9, level)
    picture.thumbnail(40)
