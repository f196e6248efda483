"""Label tables: what they may say, and everything that can be wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images import examples, tables
from mpi4dl_nb.engines.images.tables import table_images, write_table

SIZE = (12, 10)
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures a to d and masks of theirs, in folders."""
    for name in "abcd":
        for kind, pixels in (("images", PIXELS), ("masks", PIXELS[..., 0] % 2)):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / kind / f"{name}.png")
    return tmp_path


def make_table(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_with_everything(folder: Path):
    text = """slide,path,mask,label,region,level
s1,images/a.png,masks/a.png,ill,2 3 8 9,0

s1,images/b.png,,well,,
 s2 , images/c.png ,masks/c.png,"ill",-3  -4 10 10,
"""
    images = table_images(make_table(folder, text), SIZE, classes=2)
    assert (images.names, images.classes, len(images)) == (("ill", "well"), 2, 3)
    assert [images.label(index) for index in range(3)] == [0, 1, 0]
    assert [images.slide(index) for index in range(3)] == ["s1", "s1", "s2"]
    assert images.examples[0].region == Tile(Span(2, 10), Span(3, 12))
    assert images.examples[2].region == Tile(Span(-3, 7), Span(-4, 6))
    assert images.examples[1].region is None
    assert images.part(2, Tile.whole(*SIZE)).shape == (3, *SIZE)
    assert images.mask(1, Tile.whole(*SIZE)).unique().tolist() == [1]
    own = table_images(make_table(folder, text), None, classes=2)
    whole = own.mask(0, Tile.whole(8, 9))
    assert np.array_equal(whole, PIXELS[2:10, 3:12, 0] % 2)


def test_numbers_are_classes_and_names_are_sorted(folder: Path):
    numbers = make_table(folder, "path,label\nimages/a.png,2\nimages/b.png,0\n")
    images = table_images(numbers, SIZE)
    assert (images.classes, [images.label(0), images.label(1)]) == (3, [2, 0])
    names = make_table(folder, "path,label\nimages/a.png,b10\nimages/b.png,b9\n")
    images = table_images(names, SIZE)
    assert (images.names, [images.label(0), images.label(1)]) == (("b10", "b9"), [0, 1])


def label_table(folder: Path, labels: Sequence[str], **options) -> list[int]:
    lines = "\n".join(f"images/a.png,{label}" for label in labels)
    images = table_images(make_table(folder, f"path,label\n{lines}\n"), SIZE, **options)
    return [images.label(index) for index in range(len(images))]


def test_class_numbers_are_read_by_value(folder: Path):
    """pandas writes 0.0 ... 11.0 where a column has held a missing value; sorted as text, 2.0 was class 4."""
    assert label_table(folder, [f"{number}.0" for number in range(12)]) == list(range(12))
    assert label_table(folder, ["1e1", " 3 ", "2.", "07", "+1", "0"]) == [10, 3, 2, 7, 1, 0]
    names = tuple(map(str, range(12)))  # of the table that the model was trained on
    assert label_table(folder, ["2.0", "11"], names=names) == [2, 11]


@pytest.mark.parametrize("labels", [("0", "ill", "1"), ("-1", "1"), ("0.5", "1"), ("0", "nan"), ("0", "²")], ids=str)
def test_numbers_that_are_no_classes_need_an_order(labels: tuple[str, ...], folder: Path):
    with pytest.raises(ImageError, match=r"some labels are numbers, but 1 of . different ones .*names=\(\.\.\.\)"):
        label_table(folder, labels)
    assert label_table(folder, labels, names=labels) == list(range(len(labels)))


@pytest.mark.parametrize("label", ["100000", "1e9", "9" * 400])
def test_a_class_number_has_a_limit(label: str, folder: Path):
    with pytest.raises(ImageError, match="is no class number: they go from 0 to 99999"):
        label_table(folder, ["0", label])


def test_held_out_tables_have_the_classes_of_the_model(folder: Path):
    other = make_table(folder, "path,label\nimages/a.png,well\n")
    images = table_images(other, SIZE, names=["ill", "well"])
    assert (images.classes, images.label(0)) == (2, 1)


def test_masks_need_no_labels(folder: Path):
    path = make_table(folder, "path,mask\nimages/a.png,masks/a.png\nimages/b.png,masks/b.png\n")
    assert table_images(path, SIZE, classes=4).classes == 4
    images = table_images(path, None, threshold=0)
    assert images.classes == 2
    assert np.array_equal(images.mask(1, Tile.whole(24, 20)), PIXELS[..., 0] % 2)
    with pytest.raises(ImageError, match=r"table\.csv has masks\. Say how many classes .*\(classes=\).*\(threshold=\)"):
        table_images(path, SIZE)


def test_a_spreadsheets_mark_and_line_ends_are_taken(folder: Path):
    path = folder / "table.csv"
    path.write_bytes(b"\xef\xbb\xbfpath,label\r\nimages/a.png,1\r\nimages/b.png,0\r\n")
    assert len(table_images(path, SIZE)) == 2


def test_paths_are_relative_to_the_table_when_written_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "tables").mkdir()
    monkeypatch.chdir(folder)
    rows = [(Path("images/a.png"), "x"), ((folder / "images" / "b.png"), "y, z")]
    assert write_table(Path("tables/t.csv"), rows) == 2
    assert (folder / "tables" / "t.csv").read_text().splitlines() == [
        "path,label",
        "../images/a.png,x",
        '../images/b.png,"y, z"',
    ]
    monkeypatch.chdir("/")
    images = table_images(folder / "tables" / "t.csv", SIZE, within=folder)
    assert images.names == ("x", "y, z")
    assert images.part(1, Tile.whole(*SIZE)).shape == (3, *SIZE)
    with pytest.raises(ImageError, match=r"none/t\.csv cannot be written: No such file"):
        write_table(folder / "none" / "t.csv", rows)


GOOD = "path,label\nimages/a.png,0\n"
BAD = {
    "no such file": ("path,label\nimages/a.png,0\nimages/x.png,1\n", r"line 3: the file .*images/x\.png is missing"),
    "many missing": (
        "path,label\n" + "".join(f"images/x{number}.png,1\n" for number in range(9)),
        r"line 2: .*x0\.png is missing; line 3: .*x1\.png .*line 6: .*x4\.png is missing; and 4 more lines\. Mend",
    ),
    "no such mask": ("path,mask\nimages/a.png,masks/x.png\n", r"line 2: the mask .*masks/x\.png is missing"),
    "no path": ("path,label\n,1\n", "line 2: it has no path"),
    "no label": ("path,label\nimages/a.png,1\nimages/b.png, \n", "line 3: it has no label"),
    "no mask": ("path,mask\nimages/a.png,\n", "line 2: it has no mask"),
    "an unknown column": (
        "path,label,weight\na,1,2\n",
        r"line 1: unknown columns 'weight'\. The columns are path, label",
    ),
    "semicolons": ("path;label\nimages/a.png;1\n", "line 1: unknown columns 'path;label'.*between commas"),
    "no header": ("images/a.png,1\n", r"line 1: unknown columns 'images/a\.png', '1'"),
    "one column": ("path\nimages/a.png\n", "line 1: there must be a column `path`, and `label` or `mask`"),
    "a column twice": ("path,label,label\na,1,2\n", "line 1: a column is there twice"),
    "nothing": ("", r"line 1: unknown columns \(none\)"),
    "no lines": ("path,label\n\n", r"table\.csv is empty\. Give it a line for each image"),
    "too many cells": ("path,label\nimages/a.png,1,2\n", "line 2: it has 3 cells, but the header has 2.*quotation"),
    "too few cells": (GOOD + "images/b.png\n", "line 3: it has 1 cells"),
    "a region of three": (
        "path,label,region\nimages/a.png,1,1 2 3\n",
        "line 2: the region '1 2 3' is not y0 x0 height",
    ),
    "a region of words": ("path,label,region\nimages/a.png,1,a b c d\n", "line 2: the region 'a b c d' is not"),
    "a region of fractions": ("path,label,region\nimages/a.png,1,0 0 1.5 2\n", "the region '0 0 1.5 2' is not"),
    "an empty region": ("path,label,region\nimages/a.png,1,0 0 0 5\n", "line 2: the region '0 0 0 5' has no pixels"),
    "a level of words": ("path,label,level\nimages/a.png,1,low\n", "line 2: the level 'low' is not one whole number"),
    "a level below zero": ("path,label,level\nimages/a.png,1,-1\n", "line 2: the level '-1' is not one whole number"),
    "an open quotation": ('path,label\nimages/a.png,"1\n', r"table\.csv is no table of comma-separated UTF-8 text"),
    "zeros": ("path,label\nimages/\x00a.png,1\n", "line 2: the file .*a.png is missing"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_said_with_the_line(text: str, said: str, folder: Path):
    with pytest.raises(ImageError, match=said) as caught:
        table_images(make_table(folder, text), SIZE, classes=2 if "mask" in text else None)
    assert "table.csv" in str(caught.value)


UNFIT = {
    "a damaged picture": ("path,label\nimages/bad.png,1\n", r"line 2: .*images/bad\.png is damaged"),
    "a text": ("path,label\nimages/text.svs,1\n", r"line 2: .*images/text\.svs is not a PNG"),
    "a folder": ("path,label\nimages,1\n", r"line 2: .*images is a folder"),
    "a region beyond": ("path,label,region\nimages/a.png,1,24 0 5 5\n", "line 2: The region of 5 x 5 .* lies outside"),
    "a huge region": (
        "path,label,region\nimages/a.png,1,0 0 1 2000000\n",
        "line 2: The region of 1 x 2000000 .* 64 times as large",
    ),
    "a level": ("path,label,level\nimages/a.png,1,2\n", r"line 2: .*/images/a\.png has no level 2"),
    "a small mask": ("path,mask\nimages/a.png,small.png\n", r"line 2: The mask .*small\.png has 23 x 20 .* 24 x 20"),
    "a mask of text": ("path,mask\nimages/a.png,images/text.svs\n", r"line 2: .*images/text\.svs is not a PNG"),
    "a mask of no array": ("path,mask\nimages/a.png,bad.npy\n", r"line 2: .*bad\.npy is damaged"),
}


@pytest.mark.parametrize(("text", "said"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_said_before_any_image_is_read(text: str, said: str, folder: Path):
    (folder / "images" / "bad.png").write_bytes((folder / "images" / "a.png").read_bytes()[:20])
    (folder / "images" / "text.svs").write_text("not a slide")
    (folder / "bad.npy").write_text("no array")
    Image.fromarray(PIXELS[:23, :, 0]).save(folder / "small.png")
    with pytest.raises(ImageError, match=said) as caught:
        table_images(make_table(folder, text), SIZE, classes=2 if "mask" in text else None)
    assert "table.csv, line 2" in str(caught.value)


def test_bad_images_can_be_left_for_later(folder: Path):
    (folder / "images" / "a.png").write_text("no picture")
    path = make_table(folder, "path,label\nimages/a.png,1\nimages/b.png,0\n")
    images = table_images(path, SIZE, check=False)
    assert images.part(1, Tile.whole(*SIZE)).shape == (3, *SIZE)
    with pytest.raises(ImageError, match=r"images/a\.png is not"):
        images.part(0, Tile.whole(*SIZE))


def test_headers_are_enough_to_check_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "mpi4dl_nb.engines.images.pillow._DECODED._make", lambda path, page: pytest.fail("it was decoded")
    )
    text = "path,label,mask,region\nimages/a.png,1,masks/a.png,2 2 9 9\nimages/b.png,0,,\n"
    assert len(table_images(make_table(folder, text), SIZE, classes=2)) == 2


def test_a_label_that_is_no_class_is_named(folder: Path):
    path = make_table(folder, "path,label\nimages/a.png,well\nimages/b.png,dead\n")
    with pytest.raises(ImageError, match="line 3: the label 'dead' is none of ill, well"):
        table_images(path, SIZE, names=["ill", "well"])


def test_a_class_with_the_name_none_is_no_other_label(folder: Path):
    path = make_table(folder, "path,label\nimages/a.png,None\nimages/b.png,dead\n")
    with pytest.raises(ImageError, match="line 3: the label 'dead' is none of None, ill"):
        table_images(path, SIZE, names=["None", "ill"])


def test_a_class_beside_masks_must_be_one_of_theirs(folder: Path):
    path = make_table(folder, "path,label,mask\nimages/a.png,0,masks/a.png\nimages/b.png,5,\n")
    with pytest.raises(ImageError, match="line 3: it has no mask, and its class 5 is none of the 2 of the masks"):
        table_images(path, SIZE, classes=2)


IDLE: dict[str, tuple[dict[str, object], str]] = {
    "no classes": ({"classes": 0}, "classes=0 must be a whole number from 1 on"),
    "classes below zero": ({"classes": -1}, "classes=-1 must be"),
    "half a class": ({"classes": 2.5}, r"classes=2\.5 must be"),
    "a threshold of text": ({"threshold": "127"}, "threshold='127' must be a number from 0 on"),
    "a threshold that is switched on": ({"threshold": True}, "threshold=True must be"),
    "no threshold": ({"threshold": float("nan")}, "threshold=nan must be"),
    "numbers as names": ({"classes": 2, "names": range(3)}, r"names=range\(0, 3\) must be the names of the classes"),
    "a text as names": ({"classes": 2, "names": "ill"}, "names='ill' must be the names of the classes"),
}


@pytest.mark.parametrize(("options", "said"), IDLE.values(), ids=IDLE)
def test_options_of_masks_are_checked_before_a_mask_is_read(options: dict[str, object], said: str, folder: Path):
    path = make_table(folder, "path,mask\nimages/a.png,masks/a.png\n")
    with pytest.raises(ImageError, match=said):
        table_images(path, SIZE, **options)


@pytest.mark.parametrize("options", [{"classes": 2}, {"threshold": 127}, {"ignore": 0}], ids=str)
def test_options_of_masks_need_masks(options: dict[str, int], folder: Path):
    path = make_table(folder, "path,label\nimages/a.png,0\n")
    with pytest.raises(
        ImageError, match=rf"table\.csv has no masks, without which {next(iter(options))} would have no"
    ):
        table_images(path, SIZE, **options)
    assert len(table_images(path, SIZE, ignore=())) == 1


def test_a_threshold_above_every_number_is_refused(folder: Path):
    path = make_table(folder, "path,mask\nimages/a.png,masks/a.png\nimages/b.png,wide.npy\n")
    np.save(folder / "wide.npy", PIXELS[..., 0].astype(np.uint16) * 4)
    images = table_images(path, None, threshold=300)
    assert images.mask(1, Tile.whole(24, 20)).unique().tolist() == [0, 1]
    with pytest.raises(ImageError, match=r"masks/a\.png holds numbers up to 255, none of which is above threshold=300"):
        images.mask(0, Tile.whole(24, 20))


def test_a_name_that_is_no_text_leaves_no_half_of_a_table(tmp_path: Path):
    rows = [(tmp_path / "a.png", "x"), (tmp_path / "\udce9.png", "y")]
    with pytest.raises(ImageError, match=r"t\.csv cannot be written as UTF-8 text: .*udce9\.png.* is none\. Rename"):
        write_table(tmp_path / "t.csv", rows)
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, r"table .*table\.csv does not exist \(looked for in"),
        (lambda path: path.mkdir(), r"table\.csv cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"path,label\n\xff\xfe,1\n"), r"table\.csv is no table of .*UTF-8"),
        (lambda path: path.write_bytes(bytes(range(256)) * 40), r"table\.csv"),
    ],
    ids=["missing", "a folder", "another encoding", "bytes"],
)
def test_a_table_that_cannot_be_read_is_named(make, said: str, tmp_path: Path):
    make(tmp_path / "table.csv")
    with pytest.raises(ImageError, match=said):
        table_images(tmp_path / "table.csv", SIZE)


# ---- fuzz

SOUND = 'path,label,mask,region,level,slide\nimages/a.png,"x, y",,0 0 5 5,0,s\nimages/b.png,y,masks/b.png,,,\n'
CHANGES = st.lists(
    st.tuples(st.integers(0, len(SOUND) - 1), st.sampled_from(["", *'",\n\r\0 0129-x/\ufeffé²'])),
    min_size=1,
    max_size=8,
)


@pytest.mark.nightly
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES, st.sampled_from(["utf-8", "utf-16", "latin-1"]), st.booleans())
def test_a_spoiled_table_is_read_or_refused(folder: Path, changes, encoding: str, insert: bool):
    text = list(SOUND)
    for place, character in changes:
        text[place] = text[place] + character if insert else character
    (folder / "table.csv").write_bytes("".join(text).encode(encoding, "replace"))
    try:
        images = table_images(folder / "table.csv", SIZE, classes=9)
    except ImageError as error:
        assert "table.csv" in str(error)  # noqa: PT017 (either outcome is right)
    else:
        for index in range(len(images)):
            assert images.part(index, Tile.whole(*SIZE)).shape == (3, *SIZE)


def test_each_file_of_a_long_table_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    calls: dict[str, int] = {}

    def count(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            calls[name] = calls.get(name, 0) + 1
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    count(examples, "read_shape")
    count(examples, "read_mask_shape")
    count(tables.os.path, "realpath")
    count(tables.os, "lstat")
    lines = [f"images/{'abcd'[place % 4]}.png,{place % 2},masks/a.png,{place % 7} 0 8 8" for place in range(2000)]
    images = table_images(make_table(folder, "\n".join(["path,label,mask,region", *lines])), SIZE, classes=2)
    assert len(images) == 2000
    assert (calls["read_shape"], calls["read_mask_shape"]) == (4, 1)
    assert calls["realpath"] < 10
    assert calls["lstat"] < 100
    calls.clear()
    finder = tables.FileFinder(folder, folder)
    assert [finder.find(f"images/{name}.png", "file").stem for name in "abcd" * 100] == list("abcd" * 100)
    assert calls["realpath"] == 2, "of the folder of the table, and of that of the pictures"


def test_a_damaged_file_in_many_lines_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []
    real = examples.read_shape
    monkeypatch.setattr(examples, "read_shape", lambda *given: [opened.append(given), real(*given)][1])
    (folder / "images" / "a.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match="and 95 more lines"):
        table_images(make_table(folder, "path,label\n" + "images/a.png,1\n" * 100), SIZE)
    assert len(opened) == 1
