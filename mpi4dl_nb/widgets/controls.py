"""Labelled controls. Every control has a visible name, and can be reached and set by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython import get_ipython
from IPython.display import HTML, display

from engines.cli.plan_options import format_value, parse_value
from engines.plan import OPTIONS

__all__ = [
    "ErrorAlert",
    "OptionControl",
    "RangeBar",
    "Slider",
    "make_bounded_int",
    "make_button",
    "make_checkbox",
    "make_dropdown",
    "show_status",
]

# A slider with an accessible name, which the slider of ipywidgets lacks for screen readers.


class RangeBar(anywidget.AnyWidget):
    """A slider for an integer from `min` to `max`. `value` changes on release, or with each arrow key."""

    _esm = Path(__file__).with_name("range_bar.js")
    value = traitlets.Int().tag(sync=True)
    min = traitlets.Int().tag(sync=True)
    max = traitlets.Int().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    tip = traitlets.Unicode().tag(sync=True)  # not `tooltip`: pages expect a description with that
    disabled = traitlets.Bool(False).tag(sync=True)


_STYLE = {"description_width": "initial"}


def make_bounded_int(
    label: str, value: int, low: int, high: int, tip: str = "", width: str | None = None
) -> ipywidgets.BoundedIntText:
    """Create a box for an integer from `low` to `high`, to type or to step with the arrow keys."""
    return ipywidgets.BoundedIntText(
        value, min=low, max=high, description=label, tooltip=tip, style=_STYLE, layout={"width": width}
    )


def make_dropdown(
    label: str, options: Sequence[Any], value: Any, tip: str = "", width: str | None = None
) -> ipywidgets.Dropdown:
    """Create a menu with one of `options` selected."""
    return ipywidgets.Dropdown(
        options=options, value=value, description=label, tooltip=tip, style=_STYLE, layout={"width": width}
    )


def make_checkbox(label: str, value: bool = False, tip: str = "", width: str | None = None) -> ipywidgets.Checkbox:
    """Create a labelled checkbox."""
    return ipywidgets.Checkbox(
        value, description=label, tooltip=tip, indent=False, style=_STYLE, layout={"width": width}
    )


def make_button(label: str, on_click: Callable[[], None], tip: str = "", icon: str = "") -> ipywidgets.Button:
    """Create a button whose click calls `on_click()` in the kernel."""
    made = ipywidgets.Button(description=label, tooltip=tip or label, icon=icon, layout={"width": "max-content"})
    made.on_click(lambda _: on_click())
    return made


class Slider(ipywidgets.HBox):
    """A slider and a box with the same integer. `box_width` is the width of the box, such as `8em`."""

    value = traitlets.Int()

    def __init__(
        self, label: str, value: int, low: int, high: int, tip: str = "", box_width: str | None = None
    ) -> None:
        self._slider = RangeBar(value=value, min=low, max=high, label=label, tip=tip or label)
        self._box = make_bounded_int(label, value, low, high, tip, box_width)
        super().__init__([self._box, self._slider], layout={"align_items": "center"})
        self.value = value
        # Both parts are linked to the value of this object, so that its observers are called once per change.
        ipywidgets.link((self, "value"), (self._slider, "value"))
        ipywidgets.link((self, "value"), (self._box, "value"))

    @property
    def most(self) -> int:
        """The upper limit of the value."""
        return self._slider.max

    def set_range(self, low: int, high: int) -> None:
        """Set the limits of the value, both included. A value outside is moved to the nearest limit."""
        for part in (self._slider, self._box):
            if low > part.max:  # ipywidgets rejects min > max, even for a moment
                part.max, part.min = high, low
            else:
                part.min, part.max = low, high


class ErrorAlert(ipywidgets.HTML):
    """An error message that screen readers announce when it appears. Empty if there is no error."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def show(self, text: str) -> None:
        """Show an error message, or nothing if it is empty."""
        self.text = text
        style = "color: var(--jp-error-color1, #b71c1c); max-width: 60em; line-height: 1.4"
        self.value = f'<div role="alert" style="{style}">⚠ {escape(text)}</div>' if text else ""


# One option of a plan: its control and its error message.


LABEL = "9.8em"  # wide enough for the longest name, so that boxes are aligned


class OptionControl(ipywidgets.VBox):
    """The control of one option. `value` is what `Plan` takes, whatever form the control shows."""

    def __init__(self, name: str, value: Any, on_change: Callable[[str], None]) -> None:
        self.name, self.trouble, option = name, ErrorAlert(), OPTIONS[name]
        look = {"description": name, "tooltip": option.help, "style": _STYLE}
        if isinstance(value, bool):
            self.control = make_checkbox(name, value, option.help)
        elif option.choices:
            self.control = make_dropdown(name, tuple(option.choices), value, option.help)
        elif option.proposals is None:
            self.control = ipywidgets.IntText(value, **look)  # any integer: an invalid one is reported, not replaced
        else:  # its value changes on Enter, or when the box loses the focus
            look |= {"options": list(option.proposals), "continuous_update": False}
            self.control = ipywidgets.Combobox(value=format_value(value), **look)
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


# A status line for the time that a cell waits.


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show a line below the cell while the body runs. Outside a notebook nothing is shown."""
    handle = display(HTML(f'<div role="status">{escape(text)}</div>'), display_id=True) if get_ipython() else None
    try:
        yield
    finally:
        if handle:
            handle.update(HTML(""))
