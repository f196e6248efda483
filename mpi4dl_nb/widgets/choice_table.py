"""A table in which one row is selected, by mouse or by the arrow keys."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["ChoiceTable"]


class ChoiceTable(anywidget.AnyWidget):
    """A widget showing `html`, a table of radio buttons with numbers as values; `index` is the selected value."""

    _esm = Path(__file__).with_name("choice_table.js")
    _css = Path(__file__).with_name("choice_table.css")
    html = traitlets.Unicode("").tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
