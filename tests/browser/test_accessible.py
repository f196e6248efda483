"""The parts of all widgets can be used by keyboard and with a screen reader, and what cannot is found."""

from __future__ import annotations

import pytest

from tests.browser.accessible import compute_contrast, find_access_faults

OURS = """
import ipywidgets
from IPython.display import HTML
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.figure_widget import Slider, make_bounded_int, make_button, make_checkbox, make_dropdown
from mpi4dl_nb.widgets.figure_widget import FigureView, PageWidget

class Tried(PageWidget):
    figure = property(lambda self: self.view.figure)

tried = Tried([
    make_bounded_int("stages", 2, 1, 9), make_dropdown("schedule", ["1f1b", "gems"], "gems"),
    make_checkbox("both ways"),
    make_button("begin", print), Slider("layer", 3, 0, 9),
], FigureView())
tried.trouble.show("split_size=99 is too many")
figure = Drawing(figsize=(2, 1))
figure.alt = "a figure"
tried.view.show(figure)
tried
"""
BAD = """
wordless = FigureView()
wordless.show(Drawing(figsize=(1, 1)))
display(ipywidgets.IntSlider(), wordless, HTML(
    '<p style="color:#999;background:white">too pale</p>'
    '<button></button>'
    '<div onkeydown="event.preventDefault()"><button>a trap</button></div><button>behind it</button>'
))
"""
WRONG = [
    "a slider has no name", "a picture has no words", "a button has no name", "'too pale' has a contrast of 2.8",
    "Tab does not reach 'behind it'",
]  # fmt: skip


@pytest.mark.nightly
def test_our_parts_can_be_used_by_everybody_and_others_are_found(notebook):
    notebook.open([OURS])
    assert find_access_faults(notebook) == []
    bar = notebook.page.get_by_role("slider", name="layer")
    bar.focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.keyboard.press("ArrowRight")
    assert notebook.run_cell("print(tried.children[4].value)") == "5"
    assert notebook.page.get_by_role("spinbutton", name="layer").input_value() == "5"
    notebook.choose_in_menu("Settings", "Theme", "JupyterLab Dark")
    notebook.page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    assert find_access_faults(notebook) == []
    notebook.choose_in_menu("Settings", "Theme", "JupyterLab Light")
    notebook.start_cell(BAD)
    notebook.page.get_by_text("too pale").last.wait_for()
    missing = WRONG
    for _ in range(20):  # a control comes to the screen reader's tree a little after the page
        found = "\n".join(find_access_faults(notebook))
        missing = [what for what in WRONG if what not in found]
        if not missing:
            break
        notebook.page.wait_for_timeout(250)
    assert not missing, found


def test_contrast_is_that_of_what_is_seen():
    assert compute_contrast("rgb(118, 118, 118)", ["rgb(255, 255, 255)"]) == pytest.approx(4.54, abs=0.01)
    half = compute_contrast("rgba(0, 0, 0, 0.5)", ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"])
    assert half == pytest.approx(compute_contrast("rgb(127.5, 127.5, 127.5)", ["rgb(255, 255, 255)"]))
    assert compute_contrast("rgb(255, 255, 255)", ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]) == 1
