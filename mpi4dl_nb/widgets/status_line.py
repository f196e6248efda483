"""A status line for the time that a cell waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

from IPython import get_ipython
from IPython.display import HTML, display

__all__ = ["show_status"]


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show a line below the cell while the body runs. Outside a notebook nothing is shown."""
    handle = display(HTML(f'<div role="status">{escape(text)}</div>'), display_id=True) if get_ipython() else None
    try:
        yield
    finally:
        if handle:
            handle.update(HTML(""))
