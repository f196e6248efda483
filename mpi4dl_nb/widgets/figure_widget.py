"""What every widget here is made of: controls, a line for what is wrong, and a figure that a plain function drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets
from IPython.display import HTML, DisplayHandle, display

from engines.errors import Mpi4dlError
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.controls import ErrorAlert
from mpi4dl_nb.widgets.figure_view import FigureView

__all__ = ["FigureWidget"]

STILL = "mpi4dl-still"  # known to figure_view.css


class FigureWidget(ipywidgets.VBox):
    """Controls above one figure. Where a page cannot run widgets (a saved file), the figure is shown as it was."""

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
        """What is shown now."""
        return self.view.figure

    @contextmanager
    def show_errors(self) -> Iterator[None]:
        """What goes wrong inside is told in words, and the figure stays as it was."""
        try:
            yield
        except Mpi4dlError as error:
            self.trouble.show(str(error))
        else:
            self.trouble.show("")

    def update_snapshot(self) -> None:
        """From now on the page's file has the figure as it is now."""
        if self._still is not None:
            self._still.update(HTML(self._snapshot_html))

    @property
    def _snapshot_html(self) -> str:
        figure = self.figure._repr_html_() if self.figure else ""
        return f'<div class="{STILL}">{figure}</div>'

    def _ipython_display_(self) -> None:
        """Twice: as a widget, and as a figure, which figure_view.css hides wherever the widget is alive.

        Files have both; of one output, nbconvert would take the widget alone, which is dead there.
        """
        live = super()._repr_mimebundle_() | {"text/plain": f"{type(self).__name__}, as it was:"}
        display(live, raw=True)
        self._still = display(HTML(self._snapshot_html), display_id=True)

    def _repr_mimebundle_(self, **keywords: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**keywords)
        return bundle | ({"text/html": self.figure._repr_html_()} if self.figure else {})
