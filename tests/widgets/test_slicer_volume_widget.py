"""The slicer of a volume without a page: what the page may set and ask for, its figure, and what is saved of it."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from unpacking import unpack_tables

from mpi4dl_nb import Slicer
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.plan import Plan

SIZES = (9, 14, 17)
VOLUME = torch.linspace(-1, 2, 9 * 14 * 17).reshape(1, *SIZES)
PLAN = Plan(split_size=1, slice_method="2x1x3")


@pytest.fixture(scope="module")
def slicer() -> Slicer:
    return Slicer(VOLUME, PLAN)


@pytest.mark.parametrize("position", [[9, 0, 0], [0, 0], [-1, 0, 0], [0, 0, 0, 0], [0.5, 0, 0]], ids=str)
def test_a_position_outside_is_refused(slicer, position):
    before = list(slicer.view.position)
    slicer.view.set_state({"position": position})
    assert slicer.view.position == before


def test_a_section_that_is_asked_for_has_the_grey_of_its_numbers(slicer):
    sent = []
    slicer.view.send = lambda content, buffers=(): sent.append((content, list(buffers)))
    for asked in ([[1, 13]], [[3, 0]], [[0, 9]], [[0]]):
        slicer.view._handle_custom_msg({"tiles": asked}, [])
    (content, (png,)), *refused = sent
    assert content == {"tiles": [[1, 13]], "trouble": ""}
    expected = np.rint((VOLUME[0, :, 13].numpy().astype(float) + 1) / 3 * 255)
    assert np.array_equal(np.array(Image.open(io.BytesIO(png))), expected)
    assert [list(content) for content, _ in refused] == [["refused"]] * 3


def test_the_figure_shows_the_views_of_the_page(slicer):
    slicer.view.set_state({"position": [2, 5, 16], "large": 2, "tile": 5})
    main, *small = slicer.figure.axes
    assert main.get_xlabel() == "row, px · at column 16"
    assert [axes.get_xlabel() for axes in small] == ["column, px · at plane 2", "column, px · at row 5"]
    slicer.view.set_state({"place": [4, 7, 6]})
    assert "Shown: planes 1 to 6, rows 4 to 9" in slicer.figure.alt
    slicer.view.set_state({"place": [], "large": 0})


def test_pages_get_all_of_a_small_volume(slicer):
    packed = unpack_tables(slicer.view.preview)
    grey = np.frombuffer(zlib.decompress(bytes(packed["grey"])), np.uint8).reshape(packed["sizes"])
    assert grey.shape == SIZES
    part = slicer.save_part(300)
    assert part.remarks == ["The page has one pixel for 2 × 2 × 2 of the volume; the others are left out."]
    assert slicer.save_part(10**6).remarks == []
    saved = unpack_tables(part.views[0].values["preview"])
    assert np.prod(saved["sizes"]) < grey.size
    assert len(bytes(saved["grey"])) <= 300


def test_nothing_is_saved_where_nothing_may_be():
    slicer = Slicer(VOLUME, PLAN, save_picture=False)
    assert not slicer.view.preview
    assert not slicer.save_part(10**6).views[0].values["preview"]


def test_a_signal_has_one_view():
    slicer = Slicer(torch.linspace(0, 1, 50)[None], Plan(split_size=1, slice_method="3"))
    (section,) = slicer.view.facts["sections"]
    assert (section["axes"], section["across"], section["scene"]) == ([0], [], [12.5, 50])
    slicer.pick(20)
    assert slicer.view.tile == 1
    assert "Tile 1 (rank 1) owns 17 px" in slicer.figure.alt


def test_what_a_volume_has_not_is_refused():
    with pytest.raises(PlanError, match="A predicted map lies over a picture"):
        Slicer(VOLUME, PLAN, prediction=np.zeros((4, 4), int))
    with pytest.raises(ImageError, match="cuts along 2 axes"):
        Slicer(VOLUME, Plan(split_size=1, slice_method="2x2"))


def test_a_number_of_tiles_alone_is_shown_in_the_grid_that_runs():
    assert Slicer(torch.zeros(1, 8, 8, 64), Plan(split_size=1, num_spatial_parts=4)).plan.slice_method == "1x1x4"
