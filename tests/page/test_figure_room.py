"""A figure in cells of several widths: it is scrolled where its texts would be too small."""

from __future__ import annotations

import pytest

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.widgets.figure_widget import FigureView
from tests.page.cells import measure_places, set_cell_width
from tests.page.harness import PageHarness


@pytest.mark.parametrize(("wide_in", "widths_px"), [(11, (680, 680, 1000)), (3, (300, 300, 300))])
def test_a_figure_is_no_smaller_than_its_texts_allow(chromium: object, wide_in: int, widths_px: tuple[int, ...]):
    view = FigureView()
    view.show(Drawing(figsize=(wide_in, 2)))
    harness = PageHarness(chromium, view)
    harness.page.wait_for_function("() => document.querySelector('.mpi4dl-figure').naturalWidth")
    for cell_px, wide_px in zip((320, 500, 1000), widths_px, strict=True):
        set_cell_width(harness, cell_px)
        image, night, room = measure_places(
            harness, ".mpi4dl-figure", ".mpi4dl-drawing", ".mpi4dl-figure-room"
        ).values()
        assert (image[2], night[2], room[2]) == (wide_px, wide_px, cell_px)
    harness.close()
