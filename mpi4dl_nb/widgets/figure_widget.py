"""Base of all widgets: controls, a line for errors, and a figure drawn by a plain function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import HTML, DisplayHandle, display

from engines.errors import Mpi4dlError
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.controls import ErrorAlert

__all__ = ["FigureView", "FigureWidget"]

# A figure on a notebook's page: an image with alt text that reports clicks and keys.


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


STILL = "mpi4dl-still"  # class name, also in figure_view.css


class FigureWidget(ipywidgets.VBox):
    """Controls above one figure. A page without live widgets (a saved file) shows the figure's last snapshot."""

    def __init__(
        self,
        controls: Sequence[ipywidgets.Widget],
        keys: Sequence[str] = (),
        on_key: Callable[[str], None] | None = None,
        on_point: Callable[[float, float], None] | None = None,
        tip: str = "",
    ) -> None:
        self._still: DisplayHandle | None = None
        self.view, self.trouble = FigureView(keys, on_key, on_point, tip), ErrorAlert()
        super().__init__([*controls, self.trouble, self.view])

    @property
    def figure(self) -> Drawing | None:
        """The figure that is shown now."""
        return self.view.figure

    @contextmanager
    def show_errors(self) -> Iterator[None]:
        """Show an error of the body as text; the figure remains unchanged. Clear the text if there is none."""
        try:
            yield
        except Mpi4dlError as error:
            self.trouble.show(str(error))
        else:
            self.trouble.show("")

    def update_snapshot(self) -> None:
        """Replace the static figure in the page's file by the current one."""
        if self._still is not None:
            self._still.update(HTML(self._snapshot_html))

    @property
    def _snapshot_html(self) -> str:
        figure = self.figure._repr_html_() if self.figure else ""
        return f'<div class="{STILL}">{figure}</div>'

    def _ipython_display_(self) -> None:
        """Display two outputs: a widget, and a static figure that figure_view.css hides where the widget is live.

        A file contains both. From a single output nbconvert would keep the widget only, which is not live there.
        """
        live = super()._repr_mimebundle_() | {"text/plain": f"{type(self).__name__}, as it was:"}
        display(live, raw=True)
        self._still = display(HTML(self._snapshot_html), display_id=True)

    def _repr_mimebundle_(self, **keywords: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**keywords)
        return bundle | ({"text/html": self.figure._repr_html_()} if self.figure else {})
