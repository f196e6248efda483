"""One option of a plan: its control and its error message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from engines.plan import OPTIONS
from engines.plan_options import format_value, parse_value
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
        # Options that may be a number or a word, such as `auto`, are written as text.
        if OPTIONS[self.name].proposals is None:
            return self.control.value
        return parse_value(self.control.value) if self.control.value.strip() else None

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = value if OPTIONS[self.name].proposals is None else format_value(value)

    def show_error(self, text: str) -> None:
        """Show an error message below the control, or nothing if it is empty."""
        self.trouble.show(text)
        self.children = [self.control, self.trouble] if text else [self.control]


def _make_control(name: str, value: Any) -> ipywidgets.Widget:
    option = OPTIONS[name]
    if isinstance(value, bool):
        return make_checkbox(name, value, option.help)
    if option.choices:
        return make_dropdown(name, tuple(option.choices), value, option.help)
    if option.proposals is not None:
        return make_combobox(name, format_value(value), option.proposals, option.help)
    return make_int(name, value, option.help)
