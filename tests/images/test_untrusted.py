"""Files from somebody who means harm: a typed error, and neither code that runs nor memory that runs out."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from made_slides import make_tissue
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images import zarr_chunks
from mpi4dl_nb.engines.images.folder import write_boxes_table
from mpi4dl_nb.engines.images.ome_xml import choose_image, list_planes, parse_ome
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.tables import table_images, write_table

ROOT = Path(__file__).parents[2]
SIZE = (8, 8)
BOMB = (
    "<!DOCTYPE a [<!ENTITY a 'ha'>"
    + "".join(f"<!ENTITY {chr(98 + i)} '{f'&{chr(97 + i)};' * 10}'>" for i in range(9))
    + "]><annotation><object><name>&j;</name></object></annotation>"
)
OUTSIDE = (
    "<!DOCTYPE a [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><annotation><object><name>&a;</name></object></annotation>"
)


# ---- tables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of the user: in the folder of the table, and beside it a secret."""
    for place in ("data", "data/images", "secret", "data2"):
        (tmp_path / place).mkdir()
        Image.fromarray(make_tissue(8, 8)).save(tmp_path / place / "a.png")
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret" / "a.png")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "inner.png").symlink_to("images/a.png")
    return tmp_path / "data"


def make_table(folder: Path, *rows: str, header: str = "path,label") -> Path:
    (folder / "t.csv").write_text("\n".join([header, *rows]))
    return folder / "t.csv"


ELSEWHERE = ["../secret/a.png", "images/../../secret/a.png", "link.png", "linked/a.png", "../data2/a.png"]
ELSEWHERE += ["/etc/passwd", "../secret/none.png", "/dev/zero", "/"]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_table_names_nothing_outside_of_its_folder(folder, path):
    with pytest.raises(ImageError, match=r"t\.csv, line 3: the file .* lies outside of .*within=") as caught:
        table_images(make_table(folder, "images/a.png,0", f"{path},1"), SIZE)
    assert "missing" not in str(caught.value)  # whether it is there is not told either


def test_nor_does_a_mask(folder):
    rows = make_table(folder, "images/a.png,../secret/a.png", header="path,mask")
    with pytest.raises(ImageError, match=r"line 2: the mask '\.\./secret/a\.png' lies outside of"):
        table_images(rows, SIZE, classes=2)


def test_what_is_inside_is_found_by_whatever_way(folder):
    rows = make_table(folder, "images/a.png,0", "./images/../images/a.png,1", f"{folder}/images/a.png,0", "inner.png,1")
    assert len(table_images(rows, SIZE)) == 4


def test_who_trusts_a_table_says_where_its_files_are(folder):
    rows = make_table(folder, "../secret/a.png,0", "link.png,1", "images/a.png,1")
    assert len(table_images(rows, SIZE, within=folder.parent)) == 3
    with pytest.raises(ImageError, match=r"line 2: .* lies outside of .*data2"):
        table_images(rows, SIZE, within=folder.parent / "data2")


def test_a_folder_that_is_a_link_itself_is_followed(folder):
    rows = make_table(folder, "images/a.png,0")
    (folder.parent / "data3").symlink_to(folder)
    assert len(table_images(folder.parent / "data3" / rows.name, SIZE)) == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["images/a.png,999999999999"], r"the label 999999999999 is no class number: they go from 0 to 99999"),
        ([f"images/a.png,{'9' * 5000}"], r"the label 99999999999999999999 is no class number"),
        (["a\0b,1"], r"is missing"),
        ([f"{'x' * 5000},1"], r"is missing"),
        ([f"{'d/' * 3000}a.png,1"], r"is missing"),
        (["loop/a.png,1"], r"is missing"),
        ([f'"{"x" * 200_000}",1'], r"field larger than field limit"),
    ],
    ids=["huge class", "endless class", "null", "long name", "deep path", "loop of links", "huge cell"],
)
def test_hostile_lines_are_named(folder, rows, says):
    (folder / "loop").symlink_to("loop")
    with pytest.raises(ImageError, match=says):
        table_images(make_table(folder, *rows), SIZE)


@pytest.mark.parametrize("region", ["0 0 9 99999999999999999999", f"0 0 {'9' * 5000} 9", "nan 0 1 1", "1e3 0 1 1"])
def test_hostile_regions_are_named(folder, region):
    with pytest.raises(ImageError, match="line 2"):
        table_images(make_table(folder, f"images/a.png,0,{region}", header="path,label,region"), SIZE)


def test_tables_of_our_own_say_where_their_files_are(folder):
    (folder.parent / "tables").mkdir()
    made = folder.parent / "tables" / "t.csv"
    write_table(made, [(folder / "images" / "a.png", "x")])
    with pytest.raises(ImageError, match="outside"):
        table_images(made, SIZE)
    assert len(table_images(made, SIZE, within=folder)) == 1


# ---- XML


@pytest.mark.parametrize("text", [BOMB, OUTSIDE], ids=["a bomb of entities", "an entity that is a file"])
def test_xml_defines_nothing(tmp_path, text):
    with pytest.raises(ImageError, match="document type"):
        write_boxes_table(write_voc(tmp_path, text), "train", tmp_path / "t.csv")
    with pytest.raises(ImageError, match="document type"):
        parse_ome(tmp_path / "a.tif", text)


def write_voc(folder: Path, annotation: str) -> Path:
    for place in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / place).mkdir(parents=True)
    Image.fromarray(make_tissue(8, 8)).save(folder / "JPEGImages" / "a.jpg")
    (folder / "ImageSets/Main/train.txt").write_text("a\n")
    (folder / "Annotations/a.xml").write_text(annotation)
    return folder


@pytest.mark.parametrize("number", ["nan", "inf", "1e999", "9" * 5000, "0x10", ""])
def test_boxes_have_numbers(tmp_path, number):
    box = f"<bndbox><ymin>{number}</ymin><ymax>2</ymax><xmin>1</xmin><xmax>2</xmax></bndbox>"
    text = f"<annotation><object><name>x</name>{box}</object></annotation>"
    with pytest.raises(ImageError, match=r"a\.xml"):
        write_boxes_table(write_voc(tmp_path, text), "train", tmp_path / "t.csv")


@pytest.mark.parametrize("text", ["<a>" * 100_000, "<a>" * 100_000 + "</a>" * 100_000, "", "\0", "<a b=1>"])
def test_xml_that_is_none_or_nested_without_end(tmp_path, text):
    with pytest.raises(ImageError):
        choose_image(tmp_path / "a.tif", parse_ome(tmp_path / "a.tif", text).images)


@pytest.mark.parametrize("number", ["9" * 5000, "1e9", "nan", "-1", "99999999999999999999"])
def test_ome_with_hostile_numbers(tmp_path, number):
    sizes = f'SizeZ="1" SizeT="1" SizeX="4" SizeY="4" SizeC="{number}"'
    text = f'<OME><Image><Pixels {sizes}><TiffData IFD="{number}" FirstC="{number}"/></Pixels></Image></OME>'
    with pytest.raises(ImageError):
        list_planes(tmp_path / "a.tif", choose_image(tmp_path, parse_ome(tmp_path, text).images), alone=True)
    with pytest.raises(ImageError):
        choose_image(tmp_path, parse_ome(tmp_path, text.replace("Image", "Picture")).images)


# ---- Zarr


def write_array(path: Path, shape=(64, 64), chunks=(32, 32), **options: object) -> Path:
    array = zarr.create_array(path, shape=shape, chunks=chunks, dtype="uint8", **options)
    array[:32, :32] = 7
    return path


def test_a_chunk_that_is_too_large_to_unpack_is_not_unpacked(tmp_path):
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(1 << 17, 1 << 17), chunks=(1 << 17, 1 << 17), dtype="uint8")
    with pytest.raises(ImageError, match=r"131072 x 131072, 16\.0 GB each, .* 1\.0 GB is the most"):
        open_image(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("codec", ["zstd", "gzip", "blosc"])
def test_a_chunk_that_holds_more_than_it_should_is_not_unpacked(tmp_path, monkeypatch, version, codec):
    path = write_array(tmp_path / "a.zarr", zarr_format=version)
    chunk = path / ("0.0" if version == 2 else "c/0/0")
    good = open_image(path).read(0, 0, 4, 4)
    bomb = {"zstd": numcodecs.Zstd(), "gzip": numcodecs.GZip(), "blosc": numcodecs.Blosc()}[codec]
    chunk.write_bytes(bomb.encode(np.zeros(64 << 20, np.uint8)))
    monkeypatch.setattr(zarr_chunks, "_SLACK_BYTES", 1 << 10)
    with pytest.raises(ImageError, match=r"damaged: its chunk .* unpacks to \d+ bytes or more, where 1024 are due"):
        open_image(path).read(0, 0, 4, 4)
    assert (open_image(path).read(40, 40, 4, 4) == 0).all()  # blank chunks are not stored
    assert (good == 7).all()


def test_chunks_that_hardly_shrink_are_read(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (100, 70, 3), dtype=np.uint8)
    for name, options in {
        "plain": {"compressors": None},
        "packed": {},
        "shards": {"shards": (64, 64, 3)},
        "old": {"zarr_format": 2},
    }.items():
        zarr.create_array(tmp_path / name, data=noise, chunks=(32, 32, 3), **options)
        assert np.array_equal(open_image(tmp_path / name).read(3, 5, 90, 60), noise[3:93, 5:65])


@pytest.mark.parametrize("fields", [{"shape": [1 << 62, 1 << 62]}, {"shape": [-1, 4]}, {"shape": "x"}, {"shape": [[]]}])
def test_zarr_with_hostile_sizes(tmp_path, fields):
    path = write_array(tmp_path / "a.zarr")
    told = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps(told | fields))
    with pytest.raises(ImageError):
        open_image(path).read(0, 0, 1 << 31, 1 << 31)


def test_zarr_nested_without_end(tmp_path):
    path = write_array(tmp_path / "a.zarr")
    (path / "zarr.json").write_text('{"a":' * 100_000)
    with pytest.raises(ImageError):
        open_image(path)


# ---- the whole tree


KNOWN = {
    "engines/server/rank_server.py": {"cloudpickle.loads"},  # the notebook's own calls, over its keys
    "mpi4dl_nb/cluster/remote_call.py": {"pickle.loads"},  # the ranks' answers, over the same
    "engines/comm/world.py": {"pickle.loads"},  # what ranks of one job send each other, once it is known to be whole
    "engines/images/picture.py": {"cloudpickle.loads"},  # a slide of somebody's own class, on its way to a rank
    "engines/images/mask_file.py": {"np.load"},  # with allow_pickle=False
    "engines/images/sample_data.py": {"pickle.Unpickler"},  # one that makes arrays, and calls nothing else
    "engines/images/regular_file.py": {"ET.fromstring"},  # without document types
}
RUNS = {"pickle", "cloudpickle", "marshal", "shelve", "yaml", "dill", "joblib", "ET", "ElementTree", "minidom"}


def find_loaders(path: Path) -> set[str]:
    """What a file uses that could run, unpickle or expand what it reads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            reads = name.startswith(("load", "parse", "fromstring", "Unpickl", "iterparse", "open"))
            if (owner in RUNS and reads) or (owner in ("torch", "np", "numpy") and name == "load"):
                found.add(f"{owner}.{name}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.add(node.func.id)
    return found - {"pickle.UnpicklingError"}


def test_nothing_that_could_run_reads_files():
    files = [file for room in ("engines", "mpi4dl_nb") for file in sorted((ROOT / room).rglob("*.py"))]
    assert {str(file.relative_to(ROOT)): found for file in files if (found := find_loaders(file))} == KNOWN


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "m.npy", np.array([[Trap()]], object), allow_pickle=True)
    Image.fromarray(make_tissue(1, 1)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("path,mask\na.png,m.npy\n")
    with pytest.raises(ImageError):
        table_images(tmp_path / "t.csv", None, classes=2)
    assert not (tmp_path / "sprung").exists()
