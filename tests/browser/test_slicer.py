"""The slicer in a real page: its slider by keyboard, tiles by click and key, zoom to values, a receptive field."""

from __future__ import annotations

import re

CELLS = [
    """
import torch
from engines.images.sample_data import immunohistochemistry
from engines.models import resnet20_v1
from mpi4dl_nb import Plan, Slicer

slicer = Slicer(immunohistochemistry(), Plan(split_size=2, slice_method="2x2"), resnet20_v1(num_classes=2))
slicer
"""
]


def test_a_seam_is_found_looked_at_and_understood(notebook):
    notebook.open(CELLS)
    page = notebook.page
    figure = page.locator("img.mpi4dl-figure")

    def told(words: str) -> str:
        """The figure's words, once they hold these."""
        page.wait_for_function(
            "words => new RegExp(words).test(document.querySelector('img.mpi4dl-figure')?.alt ?? '')", arg=words
        )
        return figure.get_attribute("alt")

    told("layer stem.0 .*Tile 0 .rank 0. owns 256 × 256 px.*from rank 1: 256 × 1 px, 3.0 KB")
    slider = page.get_by_role("slider", name="layer")
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    told("layer blocks.0.branch.3 .*reads 16 channels")
    notebook.control("layer").fill("0")
    notebook.control("layer").press("Enter")
    told("layer stem.0 ")

    box = figure.bounding_box()
    figure.click(position={"x": box["width"] * 0.45, "y": box["height"] * 0.3})
    told(r"Tile 1 .rank 1. owns 256 × 256")
    page.keyboard.press("ArrowDown")
    told(r"Tile 3 .rank 3. owns 256 × 256")
    assert notebook.control("tile").input_value() == "3"

    for _ in range(3):
        page.keyboard.press("+")
    words = told("Pixel values")
    row, values = re.search(r"row (\d+): ([\d ]+),", words).groups()
    column = re.search(r"from column (\d+) on", words)[1]
    seen = notebook.run_cell(f"print(*immunohistochemistry()[{row}, {column}])")
    assert seen == values
    assert "borrowed" in words

    notebook.control("receptive field").check()
    told(r"Output pixel \(\d+, \d+\) of this layer sees 3 × 3 px of the picture")
    figure.focus()
    page.keyboard.press("ArrowUp")
    assert told(r"sees 3 × 3 px") != words
    notebook.control("fused halos (D2)").check()
    told(r"halos, [\d.]+ KB .D1., against \d+ halos")
    page.get_by_role("button", name="whole").click()
    told("^(?!.*Shown)")
