"""A table of which one row is chosen, by mouse or by the arrow keys."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["ChoiceTable"]


class ChoiceTable(anywidget.AnyWidget):
    """Shows `html`, a table with radio buttons whose values are numbers; `index` is that of the chosen one."""

    _esm = Path(__file__).with_name("choice_table.js")
    _css = Path(__file__).with_name("choice_table.css")
    html = traitlets.Unicode("").tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
