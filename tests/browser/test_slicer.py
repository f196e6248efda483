"""The slicer in a real notebook: tissue comes from the kernel, a seam is found, looked at, and understood."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.accessible import find_access_faults

CELLS = [
    """
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb import Plan, Slicer

slicer = Slicer(immunohistochemistry(), Plan(split_size=2, slice_method="2x2"), resnet20_v1(num_classes=2))
slicer
"""
]


def test_a_seam_is_found_looked_at_and_understood(notebook):
    notebook.open(CELLS)
    page = notebook.page
    words, title = page.locator(".mpi4dl-words"), page.locator(".mpi4dl-title")
    expect(title).to_contain_text("layer stem.0")
    expect(words).to_contain_text("Tile 0 (rank 0) owns 256 × 256 px")
    expect(words).to_contain_text("from rank 1: 256 × 1 px, 3.0 KB")
    page.get_by_role("slider", name="layer").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(title).to_contain_text("layer blocks.0.branch.3 (conv2d) reads 16 channels")
    expect(notebook.find_control("layer")).to_have_value("2")
    notebook.find_control("layer").fill("0")
    notebook.find_control("layer").press("Enter")
    expect(title).to_contain_text("layer stem.0 ")

    canvas = page.locator("canvas.mpi4dl-canvas")
    canvas.focus()
    page.keyboard.press("t")
    expect(words).to_contain_text("Tile 1 (rank 1) owns 256 × 256")
    expect(notebook.find_control("tile")).to_have_value("1")
    for key in ("h", "+", "+", "+", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    told = page.locator(".mpi4dl-tooltip")
    expect(told).to_contain_text("red, green, blue")
    row, column = re.search(r"picture: row (\d+), column (\d+)", told.inner_text()).groups()
    values = re.search(r"blue: (\d+), (\d+), (\d+)", told.inner_text()).groups()
    assert notebook.run_cell(f"print(*immunohistochemistry()[{row}, {column}])").split() == [*values]
    page.wait_for_timeout(1000)  # the kernel hears of the view when it has come to rest
    assert "Shown: rows" in notebook.run_cell("print(slicer.figure.alt)")

    notebook.find_control("fused halos (D2)").check()
    expect(words).to_contain_text(re.compile(r"halos, [\d.]+ KB \(D1\), against \d+ halos"))
    assert find_access_faults(notebook) == []
