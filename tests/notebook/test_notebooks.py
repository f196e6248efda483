"""The tutorials: cells of a few lines, and they run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
EVERY_TIME = "01"


def list_code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def list_printed(book):
    """What the cells said before one failed: it may be of what went wrong earlier."""
    outputs = [output for cell in list_code_cells(book) for output in cell.outputs]
    return [output.text for output in outputs if output.output_type == "stream"]


def is_red(output) -> bool:
    """Whether a page shows an output in red: what went wrong, or looks as if it had.

    A busy machine is no fault of a tutorial, which goes on: that forecasts may be far off is rightly said in red.
    """
    if output.get("name") == "stderr":
        return not re.match(r"[^\n]*UserWarning: This calibration (was quick|is noisy)", output.text)
    return output.output_type == "error"


def has_text(output) -> bool:
    """Whether an output has a text of its own. A line of what a cell waited for is empty once the cell has ended."""
    if output.output_type == "stream":
        return bool(output.text.strip())
    ended_line = output.data.get("text/html") == output.data.get("text/plain") == ""
    return ended_line or bool(output.data.get("text/plain", "").strip())


def test_there_are_tutorials():
    assert PATHS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_tutorial_is_clean(path: Path):
    code = list_code_cells(nbformat.read(path, as_version=4))
    assert not any(cell.execution_count for cell in code), "run `make outputs` before committing"
    assert max(len(cell.source.splitlines()) for cell in code) <= 12, "move code into mpi4dl_nb"
    assert ".stop()" in code[-1].source, "the last cell stops the cluster"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name.startswith(EVERY_TIME) else pytest.mark.nightly) for path in PATHS],
    ids=lambda path: path.stem,
)
def test_tutorial_runs(path: Path):
    book = nbformat.read(path, as_version=4)
    try:
        NotebookClient(book, timeout=300, kernel_name="python3").execute()
    except CellExecutionError as error:
        error.add_note("All that the cells had printed:\n" + "".join(list_printed(book)))
        raise
    shown = [output for cell in list_code_cells(book) for output in cell.outputs]
    assert [output for output in shown if is_red(output) or not has_text(output)] == []
    pictures = [html for output in shown if "<img" in (html := output.get("data", {}).get("text/html", ""))]
    assert pictures, "no figure was shown"
    assert all(re.search(r'alt="[^"]{40,}"', html) for html in pictures), "a figure has no alt text"
