"""One option of a plan: its control and its error message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from engines.plan_options import CHOICES, HELP, WRITTEN, format_value, parse_value
from mpi4dl_nb.widgets.controls import ErrorAlert, make_checkbox, make_combobox, make_dropdown, make_int

__all__ = ["OptionControl"]

LABEL = "9.8em"  # wide enough for the longest name, so that boxes are aligned


class OptionControl(ipywidgets.VBox):
    """The control of one option. `value` is what `Plan` takes, whatever form the control shows."""

    def __init__(self, name: str, value: Any, on_change: Callable[[str], None]) -> None:
        self.name, self.control, self.trouble = name, _make_control(name, value), ErrorAlert()
        self.control.layout.width = "98%"  # at 100 % the frame on the right would be cut off
        if not isinstance(self.control, ipywidgets.Checkbox):
            self.control.style.description_width = LABEL
        super().__init__([self.control])
        self.control.observe(lambda _: on_change(name), "value")

    @property
    def value(self) -> Any:
        """The current value, as `Plan` takes it."""
        if self.name not in WRITTEN:  # options that may be a number or a word, such as `auto`, are written as text
            return self.control.value
        return parse_value(self.control.value) if self.control.value.strip() else None

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = format_value(value) if self.name in WRITTEN else value

    def show_error(self, text: str) -> None:
        """Show an error message below the control, or nothing if it is empty."""
        self.trouble.show(text)
        self.children = [self.control, self.trouble] if text else [self.control]


def _make_control(name: str, value: Any) -> ipywidgets.Widget:
    if isinstance(value, bool):
        return make_checkbox(name, value, HELP[name])
    if name in CHOICES:
        return make_dropdown(name, CHOICES[name], value, HELP[name])
    if name in WRITTEN:
        return make_combobox(name, format_value(value), WRITTEN[name], HELP[name])
    return make_int(name, value, HELP[name])
