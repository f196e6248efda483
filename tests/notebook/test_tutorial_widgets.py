"""What a reader meets of the widgets in the tutorials: one comes soon, and the stepper stays after Run All."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
WIDGETS = r"^(Slicer|Stepper|Configurator|TimelineView|Tuner|Workbench)\("


def read_cells(name: str) -> list[str]:
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return [cell.source if cell.cell_type == "code" else "" for cell in book.cells]


def test_the_first_tutorial_has_a_widget_within_ten_cells():
    last_lines = [source.splitlines()[-1] for source in read_cells("01_first_steps")[:10] if source]
    assert any(re.match(WIDGETS, line) for line in last_lines)


def test_the_stepper_of_tutorial_05_stays_open_with_a_record_of_its_step():
    code = "\n".join(read_cells("05_spatial_parallelism"))
    assert "stepper.close()" not in code
    assert "stepper.record_step()" in code
