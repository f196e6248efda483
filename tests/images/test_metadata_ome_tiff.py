"""A made file for each row of the section OME-TIFF of the table of metadata, and sets of several files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
from made_files import (
    SECTIONS,
    MadeFile,
    check_refused,
    check_row,
    list_rows_without_files,
    read_by_tifffile,
    read_picture,
)

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.picture import open_image

RGB = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
GREY, SMALL = RGB[..., 0].copy(), RGB[:20, :20, 1].copy()
HEAD = 'xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"'
SINGLE = '<Channel ID="Channel:0:{0}" SamplesPerPixel="1"{1}/>'
UUIDS = [f"urn:uuid:00000000-0000-0000-0000-00000000000{number}" for number in range(4)]


def make_image(
    content: str, shape: Sequence[int] = (32, 48), channels: int = 3, name: str = "", **pixels: object
) -> str:
    """An Image element of one plane; `content` is that of its Pixels."""
    sizes = {"SizeX": shape[1], "SizeY": shape[0], "SizeC": channels, "SizeZ": 1, "SizeT": 1} | pixels
    order = {"DimensionOrder": "XYCZT", "Type": "uint8"} | sizes
    listed = " ".join(f'{key}="{value}"' for key, value in order.items())
    return f'<Image ID="Image:{name}" Name="{name}"><Pixels ID="Pixels:0" {listed}>{content}</Pixels></Image>'


def make_ome(*content: str, uuid: str = "") -> str:
    own = f' UUID="{uuid}"' if uuid else ""
    return f"<OME {HEAD}{own}>{''.join(content)}</OME>"


def make_channels(*colours: int) -> str:
    listed = colours or (None,) * 3
    return "".join(SINGLE.format(k, "" if c is None else f' Color="{c}"') for k, c in enumerate(listed))


def make_data(*elements: dict[str, object]) -> str:
    return "".join(
        "<TiffData" + "".join(f' {key}="{value}"' for key, value in each.items()) + "/>" for each in elements
    )


def make(text: str, *pages: np.ndarray, name: str = "a.ome.tif") -> Callable[[Path], Path]:
    """How to write pages with a text."""

    def write(folder: Path) -> Path:
        with tifffile.TiffWriter(folder / name, ome=False) as file:
            for number, page in enumerate(pages):
                kind = "rgb" if page.ndim == 3 else "minisblack"
                file.write(page, photometric=kind, metadata=None, description=text if not number else None)
        return folder / name

    return write


def split(pixels: np.ndarray) -> list[np.ndarray]:
    return [pixels[..., number].copy() for number in range(pixels.shape[2])]


def make_grey(text: str) -> Callable[[Path], Path]:
    """One grey page with a text."""
    return make(text, GREY)


def make_equal(text: str) -> Callable[[Path], Path]:
    """Three equal channels, as a grey mask that was saved as colours."""
    return make(text, GREY, GREY, GREY)


def make_set(
    *, companion: bool = False, keep: int = 3, file: int = 0, pixels: np.ndarray = RGB, second: str = "c1.ome.tif"
) -> Callable[[Path], Path]:
    """How to write a set of three files, one for each channel; only the first `keep` are kept."""
    names = ("c0.ome.tif", second, "c2.ome.tif")

    def write(folder: Path) -> Path:
        planes = "".join(
            f'<TiffData FirstC="{k}" IFD="0" PlaneCount="1"><UUID FileName="{names[k]}">{UUIDS[k]}</UUID></TiffData>'
            for k in range(3)
        )
        whole = make_image(make_channels() + planes)
        for number, channel in enumerate(split(pixels)[:keep]):
            short = f'<BinaryOnly MetadataFile="x.companion.ome" UUID="{UUIDS[3]}"/>'
            make(make_ome(short if companion else whole, uuid=UUIDS[number]), channel, name=f"c{number}.ome.tif")(
                folder
            )
        if companion and keep == 3:
            (folder / "x.companion.ome").write_text(make_ome(whole, uuid=UUIDS[3]), encoding="utf-8")
        return folder / f"c{file}.ome.tif"

    return write


def write_set_of_another(folder: Path) -> Path:
    """One of the files is that of another set."""
    path = make_set()(folder)
    make(make_ome(make_image(make_channels()), uuid=UUIDS[3]), GREY, name="c1.ome.tif")(folder)
    return path


GREYS = np.dstack([GREY] * 3)
RED, GREEN, BLUE = -16776961, 16711935, 65535
LABEL = make_image(make_data({"IFD": 0}), SMALL.shape, 1, "label image")
SCAN = make_image(make_data({"IFD": 1}), (32, 48), 1, "slide")
THREE = make_channels()
MISSING = r"is in 'c2\.ome\.tif', which is not in .*Copy it there"
MADE = {
    "several Image elements": MadeFile(make(make_ome(LABEL, SCAN), SMALL, GREY), GREY, GREY),
    "several scans": MadeFile(
        make(
            make_ome(
                make_image(make_data({"IFD": 0}), SMALL.shape, 1, "1"),
                make_image(make_data({"IFD": 1}), (32, 48), 1, "2"),
            ),
            SMALL, GREY,
        ),
        "holds 2 pictures, and its OME-XML does not say which of them is the scan: 1: 20 x 20 px; 2: 32 x 48",
        "holds 2 pictures",
    ),
    "TiffData: FirstC": MadeFile(
        make(
            make_ome(make_image(THREE + make_data(*({"FirstC": c, "IFD": p} for c, p in ((2, 0), (0, 1), (1, 2)))))),
            *split(RGB),
        ),
        RGB[..., [1, 2, 0]], GREY, naive=RGB,
        write_mask=make_equal(
            make_ome(make_image(THREE + make_data(*({"FirstC": c, "IFD": 2 - c} for c in range(3)))))
        ),
    ),
    "TiffData: IFD, PlaneCount": MadeFile(
        make(make_ome(make_image(THREE + make_data({"IFD": 1, "PlaneCount": 3}))), GREY, *split(RGB)), RGB, GREY,
        naive=np.dstack([GREY, RGB[..., 0], RGB[..., 1]]),
        write_mask=make_equal(make_ome(make_image(THREE + make_data({})))),
    ),
    "TiffData that is incomplete": MadeFile(
        make(make_ome(make_image(THREE + make_data({"IFD": 0}, {"IFD": 1, "FirstC": 1}))), *split(RGB)),
        "gives no page for channel 2", "gives no page for channel 2",
    ),
    "UUID: FileName": MadeFile(
        make_set(file=1), RGB, GREY, write_mask=make_set(pixels=GREYS), others={read_by_tifffile: None}
    ),
    "UUID: FileName that is missing": MadeFile(make_set(keep=2), MISSING, MISSING),
    "UUID of another file": MadeFile(write_set_of_another, "its UUID is urn:uuid:.*3, and not", "Copy the whole set"),
    "BinaryOnly: MetadataFile": MadeFile(
        make_set(companion=True, file=2), RGB, GREY, write_mask=make_set(companion=True, pixels=GREYS)
    ),
    "BinaryOnly: MetadataFile that is missing": MadeFile(
        make_set(companion=True, keep=2), r"its metadata \(BinaryOnly\) is in 'x.companion.ome', which is not in",
        "which is not in",
    ),
    "SizeX, SizeY": MadeFile(
        make_grey(make_ome(make_image(make_data({}), (32, 50), 1))),
        "has 32 x 50 px, and it has 32 x 48", "text of another file",
    ),
    "SizeZ, SizeT": MadeFile(
        make(make_ome(make_image(make_data({}), channels=1, SizeZ=3)), *split(RGB)),
        "a stack: 3 focal planes", "a stack",
    ),
    "DimensionOrder": MadeFile(
        make(make_ome(make_image(THREE + make_data({}), DimensionOrder="XYTZC")), *split(RGB)), RGB, GREY, naive=RGB,
        write_mask=make_equal(make_ome(make_image(THREE + make_data({}), DimensionOrder="XYTZC"))),
    ),
    "Channel: SamplesPerPixel": MadeFile(
        make(make_ome(make_image('<Channel ID="Channel:0:0" SamplesPerPixel="3"/>' + make_data({}))), RGB), RGB, GREY,
        write_mask=make(make_ome(make_image('<Channel ID="Channel:0:0" SamplesPerPixel="3"/>' + make_data({}))), GREYS),
    ),
    "Channel: Color": MadeFile(
        make(make_ome(make_image(make_channels(BLUE, GREEN, RED) + make_data({}))), *split(RGB)),
        RGB[..., ::-1], GREY, naive=RGB,
        write_mask=make_equal(make_ome(make_image(make_channels(BLUE, GREEN, RED) + make_data({})))),
    ),
    "Channel: Color of other kinds": MadeFile(
        make(make_ome(make_image(make_channels(BLUE, GREEN, GREEN) + make_data({}))), *split(RGB)),
        "no red, green and blue", "no red, green and blue",
    ),
    "BigEndian, Interleaved, SignificantBits": MadeFile(
        make_grey(
            make_ome(make_image(make_data({}), channels=1, BigEndian="true", Interleaved="true", SignificantBits=4))
        ),
        GREY, GREY, naive=GREY, others={read_by_tifffile: None},
    ),
}  # fmt: skip


def test_every_row_has_a_made_file():
    assert list_rows_without_files(SECTIONS["OME-TIFF"], MADE) == []


@pytest.mark.parametrize("row", SECTIONS["OME-TIFF"], ids=lambda row: row.name)
def test_a_made_file_is_read_as_the_table_says(tmp_path: Path, row):
    check_row(row, MADE[row.name], tmp_path)


def test_a_refusal_has_no_circle_of_causes(tmp_path: Path):
    path = make(make_ome(make_image(THREE + make_data({"IFD": 0}, {"IFD": 1}))), *split(RGB))(tmp_path)
    with pytest.raises(ImageError, match="two pages for channel 0") as refused:
        open_image(path)
    causes = [refused.value]
    while (cause := causes[-1].__cause__) is not None:
        assert cause not in causes
        causes.append(cause)


# ---- which image is the scan


def pair(*described: tuple[str, dict[str, object]]) -> Callable[[Path], Path]:
    """A small image, then a large one, with names and attributes."""
    arrays = (SMALL, GREY)
    listed = [
        make_image(make_data({"IFD": number}), pixels.shape, 1, name, **more)
        for number, (pixels, (name, more)) in enumerate(zip(arrays, described, strict=True))
    ]
    return make(make_ome(*listed), *arrays)


WIDTH = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
COARSE = {"PhysicalSizeX": 8, "PhysicalSizeY": 8}


@pytest.mark.parametrize("name", ["macro", "Overview", "label image", "THUMBNAIL", "Series 1: preview"])
def test_an_image_is_no_scan_by_its_name(tmp_path: Path, name: str):
    assert np.array_equal(read_picture(pair((name, {}), ("", {}))(tmp_path))[..., 0], GREY)


def test_an_image_is_no_scan_by_the_size_of_its_pixels(tmp_path: Path):
    assert np.array_equal(read_picture(pair(("a", COARSE), ("b", WIDTH))(tmp_path))[..., 0], GREY)


def test_two_scans_of_one_resolution_are_refused(tmp_path: Path):
    check_refused(lambda: read_picture(pair(("a", WIDTH), ("b", WIDTH))(tmp_path)), "which of them is the scan")


def test_a_macro_image_alone_is_the_picture(tmp_path: Path):
    path = make(make_ome(make_image(make_data({}), channels=1, name="macro")), GREY)(tmp_path)
    assert np.array_equal(read_picture(path)[..., 0], GREY)


def test_the_scan_has_levels_of_its_own(tmp_path: Path):
    """As Bio-Formats annotates a pyramid."""
    text = make_image(make_data({"IFD": 1}), (32, 48), 1, "b").replace(
        "</Image>", '<AnnotationRef ID="Annotation:Resolution:0"/></Image>'
    )
    path = make(make_ome(make_image(make_data({"IFD": 0}), SMALL.shape, 1, "a"), text), SMALL, GREY)(tmp_path)
    assert np.array_equal(read_picture(path)[..., 0], GREY)


# ---- sets of several files


@pytest.mark.parametrize("name", ["../c1.ome.tif", "/etc/passwd", "b/c1.ome.tif", "..", ""])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    path = make_set(second=name)(tmp_path)
    check_refused(lambda: open_image(path), "Only files of its own folder are read")


def test_no_link_leads_out_of_the_folder(tmp_path: Path):
    (tmp_path / "set").mkdir()
    path = make_set()(tmp_path / "set")
    (tmp_path / "set" / "c1.ome.tif").rename(tmp_path / "c1.ome.tif")
    (tmp_path / "set" / "c1.ome.tif").symlink_to(tmp_path / "c1.ome.tif")
    check_refused(lambda: open_image(path), r"c1\.ome\.tif.* is a link that leads out of")


def test_a_file_with_a_new_name_is_known_by_its_uuid(tmp_path: Path):
    path = make_set()(tmp_path).rename(tmp_path / "renamed.ome.tif")
    assert np.array_equal(read_picture(path), RGB)


def test_a_companion_of_many_megabytes_or_with_entities_is_refused(tmp_path: Path):
    path = make_set(companion=True)(tmp_path)
    companion = tmp_path / "x.companion.ome"
    companion.write_text("<!DOCTYPE a [<!ENTITY b 'c'>]>" + companion.read_text(encoding="utf-8"), encoding="utf-8")
    check_refused(lambda: open_image(path), "damaged.*document type")
    with companion.open("r+b") as file:
        file.truncate(1 << 27)
    check_refused(lambda: open_image(path), "larger than 67,108,864 bytes.*damaged")


def test_a_part_of_a_set_that_is_no_tiff_is_named(tmp_path: Path):
    path = make_set()(tmp_path)
    (tmp_path / "c2.ome.tif").write_bytes(b"nothing")
    check_refused(lambda: open_image(path), r"c2\.ome\.tif, which the OME-XML of .*c0\.ome\.tif names, is no TIFF file")


def test_a_set_is_read_after_it_was_sent_and_has_levels(tmp_path: Path):
    import pickle

    opened = pickle.loads(pickle.dumps(open_image(make_set()(tmp_path))))
    assert np.array_equal(opened.read(3, 5, 7, 9), RGB[3:10, 5:14])
