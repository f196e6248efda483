"""The configurator in a real page, by keyboard alone, with a real MPI cluster."""

from __future__ import annotations

CELLS = [
    """
from engines.models import resnet20_v1
from mpi4dl_nb import Configurator, Plan

configurator = Configurator(resnet20_v1(), (2, 3, 32, 32), plan=Plan(split_size=2, spatial_size=0))
configurator
""",
]
START_MS = 120_000


def tab_to(notebook, label: str) -> None:
    """Go on with the Tab key until this control has the focus."""
    for _ in range(8):
        notebook.page.keyboard.press("Tab")
        if notebook.control(label).evaluate("control => control === document.activeElement"):
            return
    raise AssertionError(f"{label} cannot be reached")


def test_a_plan_is_chosen_and_its_cluster_started_by_keyboard(notebook):
    notebook.open(CELLS)
    page, keyboard = notebook.page, notebook.page.keyboard
    image = page.locator("img.mpi4dl-figure")
    assert notebook.run_cell("configurator.wait(); print(configurator.plan)") == "Plan(spatial_size=0)"
    source, words = image.get_attribute("src"), image.get_attribute("alt")
    assert words.startswith("2 stages: 1 rank -> 1 rank; 2 ranks.")

    start = page.get_by_role("button", name="Start 2 ranks")
    start.focus()
    keyboard.press("Enter")
    page.get_by_role("button", name="2 ranks run").wait_for(timeout=START_MS)

    notebook.control("split_size").focus()
    keyboard.press("ArrowUp")
    page.get_by_role("img", name="3 stages").wait_for()
    assert image.get_attribute("src") != source

    tab_to(notebook, "spatial_size")
    for key in ("Control+a", "9", "Enter"):
        keyboard.press(key)
    said = page.get_by_text("spatial_size=9 asks for more spatial stages than the split_size=3 stages there are")
    said.wait_for()
    below_px = said.bounding_box()["y"] - notebook.control("spatial_size").bounding_box()["y"]
    assert 0 < below_px < 60
    for key in ("Control+a", "0", "Enter"):
        keyboard.press(key)
    said.wait_for(state="detached")

    notebook.control("machine").select_option("Summit")
    page.get_by_role("img", name="Predicted on Summit").wait_for()
    assert notebook.run_cell("print(configurator.forecast.plan == configurator.plan)") == "True"

    page.get_by_role("button", name="Resize to 3 ranks").focus()
    keyboard.press("Space")
    page.get_by_role("button", name="3 ranks run").wait_for(timeout=START_MS)
    ranks = "configurator.cluster.call(lambda host: host.world.size)"
    assert notebook.run_cell(f"print(configurator.plan, {ranks})") == "Plan(split_size=3, spatial_size=0) [3, 3, 3]"
    assert notebook.run_cell("configurator.cluster.stop(); print(configurator.cluster.state)") == "not started"
