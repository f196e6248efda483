"""The tutorials that have widgets, run in JupyterLab in a real page: no cell fails, and every widget is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpi4dl_nb import Configurator, Monitor, Slicer, Stepper, TimelineView, Tuner, Workbench

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
KINDS = (Configurator, Monitor, Slicer, Stepper, TimelineView, Tuner, Workbench)
WIDGETS = "|".join(kind.__name__ for kind in KINDS)
INTERACTIVE = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if re.search(rf"\b({WIDGETS})\(", path.read_text())]
RUN_S = 400
WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"


def test_there_are_tutorials_with_widgets():
    assert len(INTERACTIVE) >= 5


@pytest.mark.nightly
@pytest.mark.parametrize("path", INTERACTIVE, ids=lambda path: path.stem)
def test_a_tutorial_runs_in_a_page(path: Path, notebook):
    notebook.open_copy(path)
    closing = next(
        (n for n, cell in enumerate(notebook.cells) if ".close()" in cell["source"]), len(notebook.cells) - 1
    )
    notebook.run("all-above", closing, RUN_S)
    widgets = [number for number, cell in enumerate(notebook.cells) if any(map(is_widget, cell.get("outputs", ())))]
    assert widgets
    for number in widgets:
        notebook.await_widget(number)
    notebook.run("all-below", closing, RUN_S)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert all(cell["execution_count"] for cell in code if cell["source"])


def is_widget(output: dict) -> bool:
    return WIDGET_TYPE in output.get("data", {})
