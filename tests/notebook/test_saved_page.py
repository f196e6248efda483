"""A notebook that is executed and saved as a page, where no widget lives: its figures are there, with their words."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

CELLS = [
    """
import torch
from torch import nn
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb import Cluster, Monitor, Plan, Training

cluster = Cluster(2, backend="loopback").start()
model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
training = Training(model, Plan(split_size=1, slice_method="1x2"), cluster, (2, 3, 8, 8))
""",
    "Monitor(training)",
    "training.fit(SyntheticImages(6, (8, 8), 2), monitor=training.monitor);",
    "training.timeline()",
]


@pytest.mark.nightly
def test_a_saved_page_shows_what_widgets_showed():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    page, _ = HTMLExporter().from_notebook_node(book)
    assert page.count('<img alt="A training, done: 3 of 3 steps done, loss from') == 1
    assert page.count("One training step:") == 1
    assert "3 of 3" in page
    assert "application/vnd.jupyter.widget-state+json" in page, "for pages that can load what shows widgets"
