"""Labelled controls. Everything that can be set has its name beside it, and can be reached and set by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets

from mpi4dl_nb.widgets.range_bar import RangeBar

__all__ = [
    "ErrorAlert",
    "Slider",
    "make_bounded_int",
    "make_button",
    "make_checkbox",
    "make_combobox",
    "make_dropdown",
    "make_int",
]

_STYLE = {"description_width": "initial"}


def make_bounded_int(label: str, value: int, low: int, high: int, tip: str = "") -> ipywidgets.BoundedIntText:
    """A whole number to type or to step with the arrow keys."""
    return ipywidgets.BoundedIntText(value, min=low, max=high, description=label, tooltip=tip, style=_STYLE)


def make_int(label: str, value: int, tip: str = "") -> ipywidgets.IntText:
    """Any whole number: whether it is a good one is said beside it, rather than another one put in its place."""
    return ipywidgets.IntText(value, description=label, tooltip=tip, style=_STYLE)


def make_combobox(label: str, value: str, proposed: Sequence[str] = (), tip: str = "") -> ipywidgets.Combobox:
    """Any words; some are proposed. They count when Enter is pressed, or the next control is gone to."""
    return ipywidgets.Combobox(
        value=value, options=list(proposed), description=label, tooltip=tip, continuous_update=False, style=_STYLE
    )


def make_dropdown(label: str, options: Sequence[Any], value: Any, tip: str = "") -> ipywidgets.Dropdown:
    """One of several."""
    return ipywidgets.Dropdown(options=options, value=value, description=label, tooltip=tip, style=_STYLE)


def make_checkbox(label: str, value: bool = False, tip: str = "") -> ipywidgets.Checkbox:
    """Yes or no."""
    return ipywidgets.Checkbox(value, description=label, tooltip=tip, indent=False, style=_STYLE)


def make_button(label: str, on_click: Callable[[], None], tip: str = "", icon: str = "") -> ipywidgets.Button:
    """`on_click()` is called in the kernel."""
    made = ipywidgets.Button(description=label, tooltip=tip or label, icon=icon, layout={"width": "max-content"})
    made.on_click(lambda _: on_click())
    return made


class Slider(ipywidgets.HBox):
    """A bar to slide on beside a box with its number."""

    value = traitlets.Int()

    def __init__(self, label: str, value: int, low: int, high: int, tip: str = "") -> None:
        self._slider = RangeBar(value, min=low, max=high, label=label, tip=tip or label)
        self._box = make_bounded_int(label, value, low, high, tip)
        super().__init__([self._box, self._slider], layout={"align_items": "center"})
        self.value = value
        ipywidgets.link((self, "value"), (self._slider, "value"))
        ipywidgets.link((self, "value"), (self._box, "value"))

    @property
    def most(self) -> int:
        """The largest value that can be chosen."""
        return self._slider.max

    def set_range(self, low: int, high: int) -> None:
        """From now on the value lies within these, both included; it is moved there."""
        for part in (self._slider, self._box):
            if low > part.max:
                part.max, part.min = high, low
            else:
                part.min, part.max = low, high


class ErrorAlert(ipywidgets.HTML):
    """What is wrong, in words; screen readers tell it when it comes. Empty where all is well."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def show(self, text: str) -> None:
        """Show this, or nothing."""
        self.text = text
        style = "color: var(--jp-error-color1, #b71c1c); max-width: 60em; line-height: 1.4"
        self.value = f'<div role="alert" style="{style}">⚠ {escape(text)}</div>' if text else ""
