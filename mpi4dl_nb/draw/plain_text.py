"""Text of figures as it is: names of layers, files and machines may have any characters and any length."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

_LOG_LABEL = "$\\mathdefault{"  # what Matplotlib writes at logarithmic axes, 10 to the power of 2
_LONG_WORD = re.compile(r"\S{61,}")


def is_mathematics(text: str) -> bool:
    """Return whether Matplotlib itself wrote a text as a formula. In any other text, dollar signs are dollar signs.

    >>> is_mathematics("$\\\\mathdefault{10^{2}}$"), is_mathematics("$x^$")
    (True, False)
    """
    return text.startswith(_LOG_LABEL)


def cut_words(facts: Any) -> Any:
    """Return a text with long words cut in the middle; of lists and dicts, with all texts in them.

    >>> cut_words({"title": "layer " + 40 * "abc", "rank": 3})
    {'title': 'layer abcabcabcabcabcabcabcabcabcabcabcabc…abcabcabcabcabcabc', 'rank': 3}
    """
    match facts:
        case str():
            return _LONG_WORD.sub(lambda word: f"{word[0][:36]}…{word[0][-18:]}", facts)
        case dict():
            return {key: cut_words(value) for key, value in facts.items()}
        case list() | tuple():
            return [cut_words(value) for value in facts]
    return facts


def make_drawable(text: str) -> str:
    """Return a text with long words cut, and characters that no font has as their codes.

    >>> make_drawable("a\\x00b")
    'a\\\\x00b'
    """
    text = cut_words(text)
    if text.isascii() and text.isprintable():
        return text
    # A lone surrogate is no character at all: fonts refuse it.
    coded = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return "".join(coded)


@contextmanager
def _ignore_missing_glyphs(text: str) -> Iterator[None]:
    """Draw characters that the font lacks as boxes, without a warning of Matplotlib for each."""
    if text.isascii():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        yield


class PlainRenderer(RendererAgg):
    """Draws and measures text as it is. Texts are measured before they are drawn, so both have the same rules."""

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        with _ignore_missing_glyphs(s):
            super().draw_text(gc, x, y, make_drawable(s), prop, angle, ismath and is_mathematics(s), mtext)

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> Any:
        with _ignore_missing_glyphs(s):
            return super().get_text_width_height_descent(make_drawable(s), prop, ismath and is_mathematics(s))


class PlainCanvas(FigureCanvasAgg):
    """A canvas that draws with `PlainRenderer`."""

    _size: Any = None  # of the renderer, which is kept while the figure keeps its size

    def get_renderer(self) -> PlainRenderer:
        width, height = self.get_width_height(physical=True)
        size = width, height, self.figure.dpi
        if self._size != size:
            self.renderer, self._size = PlainRenderer(*size), size
        return self.renderer
