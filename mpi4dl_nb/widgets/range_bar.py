"""A bar to slide on, with a name: that of ipywidgets has none that a screen reader could tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

__all__ = ["RangeBar"]


class RangeBar(anywidget.AnyWidget):
    """A whole number between two, both included; it changes when the bar is let go, or with each arrow key."""

    _esm = Path(__file__).with_name("range_bar.js")
    value = traitlets.Int().tag(sync=True)
    min = traitlets.Int().tag(sync=True)
    max = traitlets.Int().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    tip = traitlets.Unicode().tag(sync=True)  # `tooltip` is taken: pages expect a description beside it
    disabled = traitlets.Bool(False).tag(sync=True)

    def __init__(self, value: int, **traits: Any) -> None:
        super().__init__(value=value, **traits)
