"""The pictures that the tutorials contain: of the code of today, small, with alt text, and without anybody's name."""

from __future__ import annotations

import base64
import getpass
import re
import socket
from html import unescape
from io import BytesIO
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from tests import store_outputs
from tests.store_outputs import MOST_BYTES, NOTEBOOKS, PICTURES_OF, hash_code, list_code_cells

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
STORED = re.compile(r'<img alt="(?P<alt>[^"<>]{40,})" src="data:image/webp;base64,(?P<data>[\w+/=]+)">')
FOLDERS = re.compile(r"(?<![\w.])/\w+/\w|\b[A-Z]:\\|\bfile:")


def list_outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in list_code_cells(nbformat.read(path, as_version=4)) for output in cell.outputs]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_pictures_are_of_the_code_of_today(path: Path):
    book = nbformat.read(path, as_version=4)
    assert book.metadata.get(PICTURES_OF) == hash_code(book), f"run `make outputs ONLY={path.name[:2]}`"
    assert set(book.metadata) == {"kernelspec", "language_info", PICTURES_OF}
    assert path.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_only_pictures_with_words_are_stored(path: Path):
    outputs = list_outputs(path)
    assert outputs
    for output in outputs:
        assert list(output.data) == ["text/html"]
        picture = STORED.fullmatch(output.data["text/html"])
        assert picture, output.data["text/html"][:200]
        image = Image.open(BytesIO(base64.b64decode(picture["data"])))
        assert image.width >= 200  # the smallest one is the thumbnail of a slide
        assert len(np.unique(np.asarray(image.convert("L")))) > 3, "nothing is drawn"
        names = [str(Path.home()), socket.gethostname(), getpass.getuser()]
        assert not FOLDERS.search(unescape(picture["alt"]))
        assert [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", picture["alt"])] == []


CELLS = [
    "from mpi4dl_nb import Drawing\nfigure = Drawing(figsize=(14, 2))\nfigure.alt = 'A <line> that rises.'",
    "line = figure.subplots().plot([1, 2, 3])\nprint('/home/jane')\nshown = display(figure, display_id=True)",
    "shown.update(Drawing(figsize=(3, 2)))",
]


def test_a_notebook_gets_the_pictures_of_its_cells(tmp_path: Path):
    """As they are after the cell, whatever a later cell changes in them."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    path = tmp_path / "01.ipynb"
    nbformat.write(book, path)
    store_outputs.store_pictures(path)
    stored = nbformat.read(path, as_version=4)
    assert [cell.source for cell in stored.cells] == CELLS
    (output,) = list_outputs(path)
    html = output.data["text/html"]
    assert "jane" not in html
    assert html.startswith('<img alt="A &lt;line&gt; that rises." src="data:image/webp;base64,')
    assert Image.open(BytesIO(base64.b64decode(html.split("base64,")[1][:-2]))).size == (1400, 200)
    assert stored.metadata[PICTURES_OF] == hash_code(stored)
    stored.cells[0].source += " "
    assert stored.metadata[PICTURES_OF] != hash_code(stored)


def test_pictures_that_do_not_fit_are_made_smaller(monkeypatch: pytest.MonkeyPatch):
    noise = np.random.default_rng(0).integers(0, 256, (300, 1200, 3), np.uint8)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    drawn = [[("Noise.", Image.fromarray(noise))]]
    whole = len(nbformat.writes(store_outputs.fit_pictures(book, drawn)))
    monkeypatch.setattr(store_outputs, "MOST_BYTES", whole // 2)
    assert len(nbformat.writes(store_outputs.fit_pictures(book, drawn))) < whole // 2
    monkeypatch.setattr(store_outputs, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="take more than 1,000 bytes"):
        store_outputs.fit_pictures(book, drawn)
