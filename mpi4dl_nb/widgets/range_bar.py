"""A slider with an accessible name, which the slider of ipywidgets lacks for screen readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

__all__ = ["RangeBar"]


class RangeBar(anywidget.AnyWidget):
    """A slider for an integer from `min` to `max`. `value` changes on release, or with each arrow key."""

    _esm = Path(__file__).with_name("range_bar.js")
    value = traitlets.Int().tag(sync=True)
    min = traitlets.Int().tag(sync=True)
    max = traitlets.Int().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    tip = traitlets.Unicode().tag(sync=True)  # not `tooltip`: pages expect a description with that
    disabled = traitlets.Bool(False).tag(sync=True)

    def __init__(self, value: int, **traits: Any) -> None:
        super().__init__(value=value, **traits)
