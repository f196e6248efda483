"""A figure on a notebook's page: an image with alt text that reports clicks and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from mpi4dl_nb.draw.figure import Drawing

__all__ = ["FigureView"]


class FigureView(anywidget.AnyWidget):
    """A widget that shows one figure at a time. With `keys`, such as `ArrowLeft`, it can be focused and receives them.

    `on_key(key)` and `on_point(across, down)` handle keys and clicks; `tip` describes the keys.
    """

    _esm = Path(__file__).with_name("figure_view.js")
    _css = Path(__file__).with_name("figure_view.css")
    png = traitlets.Bytes(b"").tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    accepts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    tip = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        keys: Sequence[str] = (),
        on_key: Callable[[str], None] | None = None,
        on_point: Callable[[float, float], None] | None = None,
        tip: str = "",
    ) -> None:
        super().__init__(accepts=list(keys), tip=tip)
        self.figure: Drawing | None = None
        self._handlers = {"key": on_key, "point": on_point and (lambda place: on_point(*place))}
        self.on_msg(self._handle_event)

    def show(self, figure: Drawing) -> None:
        """Show `figure` in place of the current one."""
        self.figure = figure
        with self.hold_sync():  # one message, so that a screen reader never has the text of another figure
            self.png, self.alt = figure.to_png(), figure.alt

    def _handle_event(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        for name, value in content.items():
            if handler := self._handlers.get(name):
                handler(value)
