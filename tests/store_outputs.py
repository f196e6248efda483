"""`python -m tests.store_outputs [01 05 ...]`: runs the tutorials, or those named, and stores their pictures in them.

A reader of the repository sees what each cell draws; of a widget, its still figure. Nothing else is stored: what cells
print differs from run to run, and may name a folder or a host.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image, ImageChops, ImageStat

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PICTURES_OF = "pictures_of"
"""The entry in a notebook's metadata with the hash of the code that has drawn its pictures."""
MOST_BYTES = 300_000
"""Of a notebook's file with its pictures."""
FORMS = ((256, 1100, 80), (64, 1000, 70), (32, 900, 60), (16, 800, 50), (16, 700, 40), (8, 600, 30), (6, 560, 15))
"""Colours of a chart; largest width in pixels, and quality, of an image. The first that is small enough is used."""
MOST_SHIFT = 8
"""Of 256: the root mean square of how far few colours may be from those of a picture."""
CELL_S = 900
IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)"[^>]* src="data:image/png;base64,(?P<data>[^"]*)"')

Picture = tuple[str, Image.Image]
"""The alt text, as in HTML, and the pixels."""


def list_code_cells(book: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def hash_code(book: NotebookNode) -> str:
    """Return a hash of the code cells, in their order."""
    sources = json.dumps([cell.source for cell in list_code_cells(book)])
    return hashlib.sha256(sources.encode()).hexdigest()


def find_pictures(outputs: Sequence[NotebookNode]) -> list[Picture]:
    """Return the pictures in the outputs of a cell, in their order."""
    htmls = [output.get("data", {}).get("text/html", "") for output in outputs]
    images = [match for html in htmls for match in IMAGE.finditer(html)]
    return [(match["alt"], Image.open(BytesIO(base64.b64decode(match["data"])))) for match in images]


def compress(image: Image.Image, colours: int, width_px: int, quality: int) -> bytes:
    """Return the smaller one of two WebP files: in its own size with few colours, or at most so wide with losses.

    The first one is that of charts, whose letters and lines stay sharp: scaled, they would have more colours, and be
    larger. The second one is that of images of tissue, of which few colours are left over: MOST_SHIFT is the limit.
    """
    image = image.convert("RGB")
    chart = image.quantize(colours, dither=Image.Dither.NONE).convert("RGB")
    shift = ImageStat.Stat(ImageChops.difference(image, chart)).rms
    if image.width > width_px:
        image = image.resize((width_px, image.height * width_px // image.width), Image.Resampling.LANCZOS)
    files = BytesIO(), BytesIO()
    image.save(files[0], "WEBP", quality=quality)
    if max(shift) <= MOST_SHIFT:
        chart.save(files[1], "WEBP", lossless=True)
    return min((file.getvalue() for file in files if file.tell()), key=len)


def format_picture(alt: str, data: bytes) -> str:
    return f'<img alt="{alt}" src="data:image/webp;base64,{base64.b64encode(data).decode()}">'


def fit_pictures(book: NotebookNode, pictures: Sequence[Sequence[Picture]]) -> NotebookNode:
    """Return the notebook with the pictures of each code cell, in the best form in which all of them fit.

    Raises ValueError if none is small enough.
    """
    for form in FORMS:
        for cell, drawn in zip(list_code_cells(book), pictures, strict=True):
            htmls = [format_picture(alt, compress(image, *form)) for alt, image in drawn]
            cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": html}) for html in htmls]
        if len(nbformat.writes(book).encode()) < MOST_BYTES:
            return book
    raise ValueError(f"The pictures take more than {MOST_BYTES:,} bytes in each of the forms {FORMS}: draw fewer.")


def store_pictures(path: Path) -> None:
    """Run a notebook, and replace its outputs by the pictures that it has drawn."""
    book = nbformat.read(path, as_version=4)
    pictures: list[Sequence[Picture]] = []

    def keep_pictures(cell: NotebookNode, **_: object) -> None:
        # Now: a later cell that steps a debugger changes the picture of its widget, which is in an earlier cell.
        pictures.append(find_pictures(cell.outputs))

    client = NotebookClient(nbformat.from_dict(book), timeout=CELL_S, kernel_name="python3")
    client.on_cell_executed = keep_pictures
    client.execute()
    stored = fit_pictures(book, pictures)
    stored.metadata[PICTURES_OF] = hash_code(stored)
    nbformat.write(stored, path)


def main(numbers: Sequence[str]) -> None:
    """Store the pictures of the notebooks whose names begin with `numbers`; of all, if there are none."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if path.name.startswith(tuple(numbers) or ""):
            store_pictures(path)
            print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
