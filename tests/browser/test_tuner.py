"""The tuner in a real page, over ranks of a real cluster: measured and chosen by keyboard alone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

CELLS = [
    """
import torch
from torch import nn
from mpi4dl_nb import Cluster, Tuner

torch.manual_seed(0)
layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
cluster = Cluster(2).start()
""",
    "tuner = Tuner(model, (2, 3, 32, 32), cluster)\ntuner",
]
MEASURED = "document.querySelector('tbody tr td:nth-of-type(7)').textContent"


@pytest.mark.nightly
def test_plans_are_measured_and_one_is_chosen_by_keyboard(notebook):
    notebook.open(CELLS)
    page = notebook.page
    chart = page.get_by_role("application", name="plans by memory of the fullest rank")
    chart.wait_for(timeout=60_000)  # the cluster starts, and is calibrated
    table = page.get_by_role("table")
    assert not table.is_visible()
    fold = page.get_by_text("plans as a table")
    fold.focus()
    page.keyboard.press("Enter")
    table.wait_for()
    count = table.locator("tbody tr").count()
    assert count > 5
    assert table.get_by_role("columnheader", name="images/s predicted").count() == 1
    why = page.get_by_role("listitem").filter(has_text="The best for 2 ranks, as predicted, is")
    assert "images/s in steps of" in why.inner_text()
    assert page.get_by_role("listitem").filter(has_text="data parallelism").count() == 1
    steps = notebook.find_control("steps of each")
    steps.fill("1")
    steps.press("Tab")
    page.keyboard.press("Enter")  # the next control is the button that measures the best
    page.wait_for_function(f"() => /\\d/.test({MEASURED})", timeout=60_000)
    chosen = page.get_by_role("region", name="the chosen plan")
    chosen.get_by_text("of what was predicted").wait_for()
    page.get_by_role("radio", checked=True).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    third = page.get_by_role("radio").nth(2)
    expect(third).to_be_checked()  # the kernel echoes the second on the way
    assert third.get_attribute("aria-label").startswith("plan 3: ")
    expect(chosen.get_by_role("heading")).to_have_text(re.compile(r"^3\. "))
    asked = "tuner.plan == tuner.candidates[2].plan, sum(bool(each.measured) for each in tuner.candidates)"
    said = notebook.run_cell(f"print({asked})")
    assert said == "True 3"
    # By time, and by memory: which plans are next to each other is chance, as they were measured.
    numbers = []
    for key in ("Home", "End", "ArrowDown"):
        chart.focus()
        page.keyboard.press(key)
        numbers.append(notebook.run_cell("print(1 + tuner.candidates.index(tuner.chosen))"))
        expect(chosen.get_by_role("heading")).to_have_text(re.compile(rf"^{numbers[-1]}\. "))
    assert len(set(numbers)) == 3
    shown = "tuner.plan.summary, tuner.explanation.best.best.plan.summary"
    assert " ranks" in notebook.run_cell(f"print({shown})")
    assert notebook.run_cell("cluster.stop(); print(cluster.state)") == "not started"
