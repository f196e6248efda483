"""The configurator in a real page, by keyboard alone, with a real MPI cluster."""

from __future__ import annotations

import pytest

from tests.browser.accessible import find_access_faults

CELLS = [
    """
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb import Configurator, Plan

configurator = Configurator(resnet20_v1(), (2, 3, 32, 32), plan=Plan(split_size=2, spatial_size=0))
configurator
""",
]
START_MS = 120_000


@pytest.mark.nightly
def test_a_plan_is_chosen_and_its_cluster_started_by_keyboard(notebook):
    notebook.open(CELLS)
    page, keyboard = notebook.page, notebook.page.keyboard
    view = page.locator(".mpi4dl-plan").first
    assert notebook.run_cell("configurator.wait(); print(configurator.plan)") == "Plan(spatial_size=0)"
    view.get_by_role("application", name="2 stages: 1 rank -> 1 rank; 2 ranks.").wait_for()
    assert page.locator("img.mpi4dl-figure").count() == 0

    start = page.get_by_role("button", name="Start 2 ranks")
    start.focus()
    keyboard.press("Enter")
    page.get_by_role("button", name="2 ranks run").wait_for(timeout=START_MS)

    stages = view.get_by_label("Stages", exact=True)
    stages.focus()
    keyboard.press("ArrowRight")
    view.get_by_role("application", name="3 stages").wait_for()

    spatial = view.get_by_label("Spatial stages, exact")
    for _ in range(3):  # the box of the stages, the slider of the spatial ones, and its box
        keyboard.press("Tab")
    assert spatial.evaluate("control => control === document.activeElement")
    before = page.locator(".mpi4dl-plan-picture").bounding_box()
    for key in ("Control+a", "9", "Enter"):
        keyboard.press(key)
    said = view.locator(".mpi4dl-plan-alert").get_by_text("spatial_size=9 asks for more spatial stages than the")
    said.wait_for()
    assert page.locator(".mpi4dl-plan-picture").bounding_box() == before
    for key in ("Control+a", "0", "Enter"):
        keyboard.press(key)
    said.wait_for(state="detached")

    view.get_by_label("Machine", exact=True).select_option("Summit")
    view.locator(".mpi4dl-plan-verdict").get_by_text("Fits").wait_for()
    assert notebook.run_cell("print(configurator.forecast.plan == configurator.plan)") == "True"

    canvas = view.locator("canvas.mpi4dl-plan-canvas")
    canvas.focus()
    keyboard.press("End")
    view.locator(".mpi4dl-plan-card").get_by_text("rank 2: stage 2").wait_for()

    page.get_by_role("button", name="Resize to 3 ranks").focus()
    keyboard.press("Space")
    page.get_by_role("button", name="3 ranks run").wait_for(timeout=START_MS)
    ranks = "configurator.cluster.call(lambda host: host.world.size)"
    assert notebook.run_cell(f"print(configurator.plan, {ranks})") == "Plan(split_size=3, spatial_size=0) [3, 3, 3]"
    assert find_access_faults(notebook) == []
    assert notebook.run_cell("configurator.cluster.stop(); print(configurator.cluster.state)") == "not started"
