"""One knob of a plan: its control, and beside it what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from engines.knobs import CHOICES, HELP, WRITTEN, text_of, value_of
from mpi4dl_nb.widgets.controls import Trouble, check, choice, whole, written

__all__ = ["Knob"]

LABEL = "9.8em"  # wide enough for the longest name: boxes stand below each other


class Knob(ipywidgets.VBox):
    """`value` is what `Plan` takes, in whatever form the control has it."""

    def __init__(self, name: str, value: Any, on_change: Callable[[str], None]) -> None:
        self.name, self.control, self.trouble = name, _control(name, value), Trouble()
        self.control.layout.width = "98%"  # of all of it, the frame on the right would be cut off
        if not isinstance(self.control, ipywidgets.Checkbox):
            self.control.style.description_width = LABEL
        super().__init__([self.control])
        self.control.observe(lambda _: on_change(name), "value")

    @property
    def value(self) -> Any:
        """What is set now."""
        if self.name not in WRITTEN:
            return self.control.value
        return value_of(self.control.value) if self.control.value.strip() else None

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = text_of(value) if self.name in WRITTEN else value

    def tell(self, text: str) -> None:
        """Show what is wrong with it, or nothing."""
        self.trouble.tell(text)
        self.children = [self.control, self.trouble] if text else [self.control]


def _control(name: str, value: Any) -> ipywidgets.Widget:
    if isinstance(value, bool):
        return check(name, value, HELP[name])
    if name in CHOICES:
        return choice(name, CHOICES[name], value, HELP[name])
    if name in WRITTEN:
        return written(name, text_of(value), WRITTEN[name], HELP[name])
    return whole(name, value, HELP[name])
