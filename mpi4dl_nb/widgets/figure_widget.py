"""Base of all widgets: a figure drawn by a plain function, below labelled controls and a line for errors.

Every control has a visible name, and can be reached and set by keyboard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets
from IPython.display import HTML, DisplayHandle, display

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import PageRules, PageView
from mpi4dl_nb.widgets.saved_frame import FRAME_PICTURE_BYTES, make_frame
from mpi4dl_nb.widgets.saved_page import PICTURE_BYTES, save_page
from mpi4dl_nb.widgets.saved_view import SavedPart

# A slider with an accessible name, which the slider of ipywidgets lacks for screen readers.


class RangeBar(PageView):
    """A slider for an integer from `min` to `max`. `value` changes on release, or with each arrow key."""

    _esm = join_modules("figure/range_bar.js")
    value = traitlets.Int().tag(sync=True)
    min = traitlets.Int().tag(sync=True)
    max = traitlets.Int().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    tip = traitlets.Unicode().tag(sync=True)  # not `tooltip`: pages expect a description with that

    @property
    def rules(self) -> PageRules:
        """The page may set a value within the limits."""
        return PageRules({"value": lambda value, _: self.min <= value <= self.max})


BOX_STYLE = {"description_width": "initial"}


def _make_layout(width: str | None) -> dict[str, str | None]:
    return {"width": width, "max_width": "100%"}  # of a cell that may be narrower


def make_bounded_int(
    label: str, value: int, low: int, high: int, tip: str = "", width: str | None = None
) -> ipywidgets.BoundedIntText:
    """Create a box for an integer from `low` to `high`, to type or to step with the arrow keys."""
    return ipywidgets.BoundedIntText(
        value, min=low, max=high, description=label, tooltip=tip, style=BOX_STYLE, layout=_make_layout(width)
    )


def make_dropdown(
    label: str, options: Sequence[Any], value: Any, tip: str = "", width: str | None = None
) -> ipywidgets.Dropdown:
    """Create a menu with one of `options` selected."""
    return ipywidgets.Dropdown(
        options=options, value=value, description=label, tooltip=tip, style=BOX_STYLE, layout=_make_layout(width)
    )


def make_checkbox(label: str, value: bool = False, tip: str = "", width: str | None = None) -> ipywidgets.Checkbox:
    """Create a labelled checkbox."""
    return ipywidgets.Checkbox(
        value, description=label, tooltip=tip, indent=False, style=BOX_STYLE, layout=_make_layout(width)
    )


def make_button(label: str, on_click: Callable[[], None], tip: str = "", icon: str = "") -> ipywidgets.Button:
    """Create a button whose click calls `on_click()` in the kernel."""
    button = ipywidgets.Button(description=label, tooltip=tip or label, icon=icon, layout={"width": "max-content"})
    button.on_click(lambda _: on_click())
    return button


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


# A figure on a notebook's page: an image with alt text.


class FigureView(PageView):
    """A widget that shows one figure at a time, drawn by the kernel, with its alt text. `tip` says what it is.

    `paper` is what a dark theme darkens of it.
    """

    _esm = join_modules("figure/figure_view.js")
    _css = read_style("figure/drawing.css", "figure/figure_view.css")
    png = traitlets.Bytes(b"").tag(sync=True)
    paper = traitlets.Unicode("").tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    tip = traitlets.Unicode("").tag(sync=True)

    def __init__(self, tip: str = "") -> None:
        super().__init__(tip=tip)
        self.figure: Drawing | None = None

    def show(self, figure: Drawing) -> None:
        """Show `figure` in place of the current one."""
        self.figure = figure
        with self.hold_sync():  # one message, so that a screen reader never has the text of another figure
            self.png, self.alt = figure.to_png(), figure.alt
            self.paper = figure.outline_paper()


STILL = "mpi4dl-still"  # class name, also in page.css
NOT_SAVED = "The picture is not saved in files: run the cell that made it to see it."

# A reopened notebook without a kernel has one line of text in place of the widget: that no model was found. Its still
# figure stands below. The output of a live widget has elements, and stays.
_HIDE_LINE = (
    f"<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child .{STILL}) > .jp-OutputArea-output:not(:has(*)) "
    "{ display: none }</style>"
)


if TYPE_CHECKING:
    from ipywidgets import DOMWidget as _Widget
else:
    _Widget = object  # whatever the mixin is mixed with


class StillFigure(_Widget):
    """Mixin of a widget with a `figure`: a page without live widgets (a saved file) shows its last snapshot.

    The snapshot is the figure, and over it the widget's page of `save_page` in a frame, if `frame_px` is not 0, the
    widget is complete, and the frame is small enough.
    """

    _still: DisplayHandle | None = None
    save_picture = True
    """Whether files that are saved contain the figure."""
    frame_px = 0
    """Height of the living page that a saved notebook shows in place of the figure; 0 leaves it out."""

    @property
    def figure(self) -> Drawing | None:
        """The figure that stands for the live view in a saved page."""
        raise NotImplementedError

    def update_snapshot(self, kept: bool = False) -> None:
        """Replace the static figure in the page's file by the current one; if `kept`, live pages show it as well."""
        if self._still is not None:
            self._still.update(HTML(self._living_html if kept else self._snapshot_html))

    def save_page(
        self, path: str | PathLike[str], *, title: str = "", text: str = "", picture_bytes: int = PICTURE_BYTES
    ) -> Path:
        """Write a page with this widget that is alive without a kernel, and return its path: see `save_page`."""
        return save_page(self, path, title=title, text=text, picture_bytes=picture_bytes)

    def save_part(self, picture_bytes: int) -> SavedPart:
        """Return this widget as a part of a saved page. Raises PlanError if it is closed."""
        if self.comm is None:
            raise PlanError(
                f"This {type(self).__name__} is closed, and has nothing to show. Save its page before close(), or make "
                "the widget anew."
            )
        return self._make_saved_part(picture_bytes)

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        raise NotImplementedError

    def _make_framed_part(self) -> SavedPart:
        """Return what a saved notebook contains of the widget. Raises PlanError if it is not complete yet."""
        return self._make_saved_part(FRAME_PICTURE_BYTES)

    def close(self) -> None:
        """Close the widget with all its parts: one that stays open would keep the widget, and a cluster, in memory."""
        for part in _find_parts(self):
            part.close()
        super().close()

    @property
    def _saved_html(self) -> str:
        """The figure, or a sentence in its place if it must not be saved."""
        if not self.save_picture:
            return f"<p>{escape(NOT_SAVED)}</p>"
        return self.figure._repr_html_() if self.figure else ""

    @property
    def _living_html(self) -> str:
        """The figure with the living page over it, if there is one."""
        still = self._saved_html
        if not (self.frame_px and self.save_picture) or self.comm is None:
            return still
        try:
            part = self._make_framed_part()
        except Exception:  # a step that is not finished; and a slide that the caller has opened may raise anything
            return still
        return make_frame(part, type(self).__name__, still, self.frame_px)

    @property
    def _snapshot_html(self) -> str:
        return f'{_HIDE_LINE}<div class="{STILL}">{self._living_html}</div>'

    def _ipython_display_(self) -> None:
        """Display two outputs: a widget, and its snapshot that page.css hides where the widget is live.

        A file contains both. From a single output nbconvert would keep the widget only, which is not live there.
        A closed widget displays its figure only.
        """
        if self.comm is None:
            display(HTML(self._saved_html))
            return
        display(self._make_live_bundle() | {"text/plain": f"{type(self).__name__}, as it was:"}, raw=True)
        if self._still is None:
            self._still = display(HTML(self._snapshot_html), display_id=True)
        else:  # displayed once more: an update changes all places of the same identity
            self._still.display(HTML(self._snapshot_html))

    def _repr_mimebundle_(self, **keywords: Any) -> Any:  # of a widget it is a dict, of an anywidget a tuple
        return self._make_live_bundle() | ({"text/html": html} if (html := self._saved_html) else {})

    def _make_live_bundle(self) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_()
        return bundle[0] if isinstance(bundle, tuple) else bundle  # anywidget adds metadata


def _find_parts(widget: object) -> list[ipywidgets.Widget]:
    """Return the widgets inside a box, at any depth, and the layouts and styles of all, which are widgets as well."""
    children = getattr(widget, "children", ())
    looks = [look for name in ("layout", "style") if isinstance(look := getattr(widget, name, None), ipywidgets.Widget)]
    return [*looks, *children, *(inner for child in children for inner in _find_parts(child))]


class PageWidget(StillFigure, ipywidgets.VBox):
    """Controls, a line for errors, and a view below them, which the page draws."""

    children: tuple[ipywidgets.Widget, ...]

    def __init__(self, controls: Sequence[ipywidgets.Widget], view: ipywidgets.DOMWidget) -> None:
        self.view, self.trouble = view, ErrorAlert()
        super().__init__([*controls, self.trouble, self.view])

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        return SavedPart([self.view.save_view()])

    @contextmanager
    def show_errors(self) -> Iterator[None]:
        """Show an error of the body as text; the figure remains unchanged. Clear the text if there is none."""
        try:
            yield
        except Mpi4dlError as error:
            self.trouble.show(str(error))
        else:
            self.trouble.show("")
