"""The image of a figure that the kernel draws: its alt text, in a real page."""

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
view = FigureView("what it is")
view.show(drawing("the first"))
view
""",
]


@pytest.mark.nightly
def test_a_figure_has_words_and_is_replaced_with_them(notebook):
    notebook.open(CELLS)
    image = notebook.page.get_by_role("img", name="the first")
    assert image.get_attribute("title") == "what it is"
    source = image.get_attribute("src")
    notebook.run_cell("view.show(drawing('the second')); print(1)")
    other = notebook.page.get_by_role("img", name="the second")
    other.wait_for()
    assert other.get_attribute("src") != source
