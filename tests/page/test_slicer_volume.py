"""The slicer of a volume in a page: three linked views, a slider for each axis, and the same keys as on a picture."""

from __future__ import annotations

import pytest
import torch
from playwright.sync_api import expect
from torch import nn

from mpi4dl_nb import Slicer
from mpi4dl_nb.draw import volume as volumes
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.page.harness import PageHarness

SIZES = (8, 16, 24)
PLAN = Plan(split_size=1, slice_method="2x2x2")
NUMBERS = torch.arange(8 * 16 * 24, dtype=torch.float32).reshape(1, *SIZES)


@pytest.fixture(scope="module")
def slicer() -> Slicer:
    layers = [nn.Conv3d(1, 2, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(2, 2, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2))
    return Slicer(NUMBERS, PLAN, prepare(net, PLAN, (1, 1, *SIZES)))


@pytest.fixture
def harness(chromium, slicer):
    view = slicer.view
    view.layer = view.tile = view.large = 0
    view.place, view.position = [], [3, 7, 11]
    harness = PageHarness(chromium, view)
    harness.advance()
    yield harness
    assert harness.errors == []
    harness.close()


def press(harness: PageHarness, *keys: str) -> None:
    harness.page.locator("canvas").first.focus()
    for key in keys:
        harness.page.keyboard.press(key)
    harness.page.wait_for_timeout(150)
    harness.advance()


def move_pointer(harness: PageHarness, view: int, row: float, col: float) -> str:
    """Point at a place of one view, in fractions of its sides; what is said of it."""
    box = harness.page.locator("canvas").nth(view).bounding_box()
    high, wide = [(16, 24), (8, 24), (8, 16)][view]
    scale = min((box["width"] - 16) / wide, (box["height"] - 16) / high)
    left, top = box["x"] + (box["width"] - wide * scale) / 2, box["y"] + (box["height"] - high * scale) / 2
    harness.page.mouse.move(left + col * wide * scale, top + row * high * scale)
    return harness.page.locator(".mpi4dl-tooltip").nth(view).inner_text()


def test_each_view_explains_its_pixels(harness):
    told = move_pointer(harness, 0, 8.5 / 16, 3.5 / 24)
    assert "volume: plane 3, row 8, column 3" in told
    number = float(NUMBERS[0, 3, 8, 3])
    about = float(next(line for line in told.splitlines() if line.startswith("number")).split()[-1])
    assert about == pytest.approx(number, abs=3072 / 255)
    assert "owner: tile 2, rank 2" in told
    assert "borrowed by ranks 0, 4, 6: 4 bytes each" in told
    told = move_pointer(harness, 1, 4.5 / 8, 3.5 / 24)
    assert "volume: plane 4, row 7, column 3" in told
    assert "owner: tile 4, rank 4" in told


def test_sliders_move_all_views_and_are_reached_by_tab(harness, slicer):
    sliders = harness.page.get_by_role("slider")
    plane = harness.page.get_by_role("slider", name="plane")
    plane.focus()
    harness.page.keyboard.press("ArrowRight")
    harness.page.wait_for_timeout(150)
    harness.advance()
    assert slicer.view.position == [4, 7, 11]
    expect(plane).to_have_attribute("aria-valuetext", "plane 4 of 0 to 7")
    assert sliders.count() == 4  # with the strip of the layers
    assert "volume: plane 4, row 0, column 0" in move_pointer(harness, 0, 0.01, 0.01)


def test_keys_are_those_of_a_picture_and_those_of_planes(harness, slicer):
    press(harness, "PageDown", "PageDown", "PageUp", "t", "]")
    assert (slicer.view.position, slicer.view.tile, slicer.view.layer) == ([4, 7, 11], 1, 1)
    press(harness, "v")
    assert slicer.view.large == 1
    expect(harness.page.get_by_role("button", name="along rows")).to_have_attribute("aria-pressed", "true")
    assert "at row 3" in slicer.figure.axes[0].get_xlabel()
    assert slicer.figure.axes[0].get_ylabel().startswith("plane")


def test_a_click_moves_the_other_views_there(harness, slicer):
    move_pointer(harness, 0, 12.5 / 16, 20.5 / 24)
    harness.page.mouse.down()
    harness.page.mouse.up()
    harness.page.wait_for_timeout(150)
    harness.advance()
    assert (slicer.view.position, slicer.view.tile) == ([3, 12, 20], 3)
    assert slicer.view.picked == [3, 12, 20, 3, 12, 20]


def test_the_exact_sections_of_a_large_volume_come_from_the_kernel(chromium, monkeypatch):
    monkeypatch.setattr(volumes, "MOST_GREY", 100)
    slicer = Slicer(NUMBERS, PLAN)
    harness = PageHarness(chromium, slicer.view)
    for _ in range(3):
        harness.page.wait_for_timeout(100)
        harness.advance()
    exact = harness.page.locator("canvas").first.screenshot()
    monkeypatch.undo()
    other = PageHarness(chromium, Slicer(NUMBERS, PLAN).view)
    other.page.wait_for_timeout(300)
    other.advance()
    assert other.page.locator("canvas").first.screenshot() == exact
    harness.close()
    other.close()


def test_a_signal_has_the_keys_of_a_picture(chromium):
    slicer = Slicer(torch.linspace(0, 1, 50)[None], Plan(split_size=1, slice_method="2"))
    harness = PageHarness(chromium, slicer.view)
    harness.advance()
    position = list(slicer.view.position)
    press(harness, "PageDown", "v", "t")
    assert (slicer.view.position, slicer.view.large, slicer.view.tile) == (position, 0, 1)
    expect(harness.page.get_by_role("slider")).to_have_count(0)
    box = harness.page.locator("canvas").bounding_box()
    harness.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    expect(harness.page.locator(".mpi4dl-tooltip")).to_contain_text("owner: tile 0, rank 0")
    assert harness.errors == []
    harness.close()
