"""A line below a cell that says what the cell waits for, and that is gone afterwards."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from html import escape
from threading import Event, Lock, Thread
from typing import Any, ParamSpec, TypeVar

from IPython import get_ipython
from IPython.display import display
from tqdm import tqdm

P = ParamSpec("P")
R = TypeVar("R")

ProgressCallback = Callable[[int, int], None]
"""Called with the number that is done, and the total."""

LATER_S = 1.0
"""What may be over sooner shows no line: many lines that come and go would be read by nobody."""


def _is_notebook() -> bool:
    return hasattr(get_ipython(), "kernel")


class StatusLine:
    """The line of one wait: displayed by `show`, after which `update` changes its text; `clear` ends it for good."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._handle: Any = None  # of IPython, once the line is displayed
        self._over, self._lock = Event(), Lock()

    def show(self) -> None:
        """Display the line, unless it is cleared already. Outside a notebook nothing is shown."""
        with self._lock:
            if not self._over.is_set() and self._handle is None and _is_notebook():
                self._handle = display(self._make_bundle(), raw=True, display_id=True)

    def show_later(self, after_s: float) -> None:
        """Display the line once `after_s` seconds have passed, unless it is cleared before."""

        def wait() -> None:
            if not self._over.wait(after_s):
                self.show()

        # The kernel finds the cell to which an output belongs in the context of the thread.
        if _is_notebook():
            Thread(target=copy_context().run, args=(wait,), name="status line", daemon=True).start()

    def update(self, text: str) -> None:
        """Change the text."""
        with self._lock:
            self.text = text
            if self._handle is not None:
                self._handle.update(self._make_bundle(), raw=True)

    def tell(self, text: str) -> None:
        """Display the line with this text. Outside a notebook, print the text to the error stream."""
        if not _is_notebook():
            print(text, file=sys.stderr, flush=True)
            return
        self.update(text)
        self.show()

    def make_counter(self, text: str) -> ProgressCallback:
        """Return a callback after each call of which the line says how many are done."""
        return lambda done, of: self.update(f"{text}: {done:,} of {of:,} ...")

    def clear(self) -> None:
        """Remove the text, and the line with it."""
        self._over.set()
        self.update("")

    def _make_bundle(self) -> dict[str, str]:
        page = f'<div role="status">{escape(self.text)}</div>' if self.text else ""
        return {"text/plain": self.text, "text/html": page}


@contextmanager
def show_status(text: str, after_s: float = 0.0) -> Iterator[StatusLine]:
    """Show a line below the cell while the body runs, from `after_s` seconds on; it is gone however the body ends.

    >>> with show_status("Waiting for all ranks ...") as line:
    ...     line.update("Waiting for 2 ranks ...")
    """
    line = StatusLine(text)
    if after_s:
        line.show_later(after_s)
    else:
        line.show()
    try:
        yield line
    finally:
        line.clear()


@contextmanager
def show_counts(text: str, shown: bool = True) -> Iterator[ProgressCallback]:
    """Show while the body runs how many are done, a line in a notebook or a bar in a terminal; the callback updates it.

    >>> with show_counts("Counting", shown=False) as report:
    ...     report(1, 2)
    """
    # In a notebook, a bar would be a widget, and one that is closed leaves an empty place on the page.
    if shown and _is_notebook():
        with show_status(f"{text} ...") as line:
            yield line.make_counter(text)
        return
    with tqdm(desc=text, disable=None if shown else True, leave=False) as bar:  # None: unless it is a terminal

        def report(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield report


def with_status(text: str, counts: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: while the function runs, a line says `text`.

    `counts` is the name of the function's argument that is called with the number done and the total, if it has one:
    the line then says these, too.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*arguments: P.args, **keywords: P.kwargs) -> R:
            with show_status(f"{text} ...", LATER_S) as line:
                if counts and counts not in keywords:
                    keywords[counts] = line.make_counter(text)
                return function(*arguments, **keywords)

        return run

    return wrap
