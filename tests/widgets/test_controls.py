"""The parts of all widgets, without a browser."""

from __future__ import annotations

import re

import pytest

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.widgets.figure_widget import Slider
from mpi4dl_nb.widgets.monitor import Monitor
from mpi4dl_nb.widgets.page_modules import FOLDER

SCRIPTS = [*sorted(FOLDER.joinpath("figure").glob("*.js")), FOLDER / "tuning" / "choice_table.js"]


def make_drawing(alt: str) -> Drawing:
    figure = Drawing(figsize=(1, 1))
    figure.alt = alt
    return figure


def test_a_slider_and_its_box_are_one_value():
    slider, seen = Slider("layer", 2, 0, 5), []
    slider.observe(lambda change: seen.append(change.new), "value")
    slider.children[0].value = 4
    slider.children[1].value = 1
    assert (slider.value, seen) == (1, [4, 1])


def test_a_slider_moves_its_value_into_a_new_span():
    slider = Slider("layer", 2, 0, 5)
    slider.set_range(7, 9)
    assert slider.value == 7
    slider.set_range(0, 3)
    assert (slider.value, slider.children[0].value) == (3, 3)


def test_an_error_is_said_in_words_and_goes_with_the_next_success():
    instrument = Monitor()
    instrument.view.show(make_drawing("a first figure"))
    with instrument.show_errors():
        raise PlanError("parts=<3> cannot be")
    assert instrument.trouble.text == "parts=<3> cannot be"
    assert 'role="alert"' in instrument.trouble.value
    assert "&lt;3&gt;" in instrument.trouble.value
    assert instrument.figure.alt == "a first figure"
    with instrument.show_errors():
        pass
    assert instrument.trouble.value == ""


def test_a_page_that_cannot_run_widgets_gets_the_figure_with_its_words():
    instrument = Monitor()
    instrument.view.show(make_drawing("a picture of nothing"))
    bundle = instrument._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert 'alt="a picture of nothing"' in bundle["text/html"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_shows_every_change_of_what_it_reads(script):
    """A change of any value that a script reads, even of that value alone, has a handler that is removed at the end."""
    text = script.read_text()
    read = set(re.findall(r'model\.get\("(\w+)"\)', text))
    followed = re.search(r"followModel\(model, \{(.*?)\}, signal\)", text, re.DOTALL)
    events = set(re.findall(r"\bchange(?::\w+)?", followed[1]))
    assert "change" in events or {f"change:{name}" for name in read} == events
