"""Figures on a dark page: their paper is dark and their words are light, tissue and values stay as they are."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.figure_widget import FigureView
from tests.page.harness import PageHarness

DARK = "() => document.body.setAttribute('data-jp-theme-light', 'false')"


@pytest.fixture
def figure() -> Drawing:
    """Red values in the left half, an empty right half, and a black line across the top."""
    figure = Drawing(figsize=(4, 2), facecolor="white")
    values = figure.add_axes((0.05, 0.1, 0.4, 0.7))
    values.imshow(np.full((2, 2, 3), (200, 30, 40), np.uint8), aspect="auto")
    values.axis("off")
    figure.add_axes((0.0, 0.92, 1.0, 0.08), facecolor="black").set(xticks=[], yticks=[])
    figure.alt = "Red values, and a black line."
    return figure


def capture_picture(page: object) -> NDArray[np.uint8]:
    picture = page.locator("img").screenshot()
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))


def check(light: NDArray[np.uint8], dark: NDArray[np.uint8]) -> None:
    high, wide = light.shape[:2]
    places = {"values": (high // 2, wide // 4), "paper": (high // 2, 3 * wide // 4), "line": (high // 25, wide // 2)}
    read = {name: (light[place].astype(int), dark[place].astype(int)) for name, place in places.items()}
    assert np.array_equal(*read["values"])
    assert read["values"][0].tolist() == [200, 30, 40]
    assert read["paper"][0].min() > 240
    assert read["paper"][1].max() < 40
    assert read["line"][0].max() < 10
    assert read["line"][1].min() > 220


def test_the_figure_of_a_cell_follows_the_theme(chromium: object, figure: Drawing):
    page = chromium.new_page()
    page.set_content(f"<body>{figure._repr_html_()}</body>")
    light = capture_picture(page)
    page.evaluate(DARK)
    check(light, capture_picture(page))
    page.close()


def test_the_figure_of_a_widget_follows_the_theme(chromium: object, figure: Drawing):
    view = FigureView()
    view.show(figure)
    harness = PageHarness(chromium, view)
    harness.page.wait_for_timeout(200)
    light = capture_picture(harness.page)
    harness.page.evaluate(DARK)
    check(light, capture_picture(harness.page))
    harness.close()
