"""The image that all widgets show: alt text, clicks and keys, in a real page."""

from __future__ import annotations

import pytest

CELLS = [
    """
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.figure_widget import FigureView

def drawing(words):
    figure = Drawing(figsize=(3, 2))
    figure.add_subplot().set_title(words)
    figure.alt = words
    return figure
""",
    """
heard = []
view = FigureView(["ArrowRight", "+"], heard.append, lambda x, y: heard.append((round(x, 1), round(y, 1))))
view.show(drawing("the first"))
view
""",
]


@pytest.mark.nightly
def test_a_figure_has_words_and_takes_clicks_and_keys(notebook):
    notebook.open(CELLS)
    image = notebook.page.get_by_role("img", name="the first")
    box = image.bounding_box()
    image.click(position={"x": box["width"] * 0.7, "y": box["height"] * 0.2})
    image.focus()
    for key in ("ArrowRight", "x", "+"):
        notebook.page.keyboard.press(key)
    assert notebook.run_cell("print(heard)") == "[(0.7, 0.2), 'ArrowRight', '+']"
    source = image.get_attribute("src")
    notebook.run_cell("view.show(drawing('the second')); print(1)")
    other = notebook.page.get_by_role("img", name="the second")
    other.wait_for()
    assert other.get_attribute("src") != source
