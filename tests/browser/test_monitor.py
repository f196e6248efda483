"""A training on a real cluster, watched and stopped in a page."""

from __future__ import annotations

import re

import pytest

from tests.browser.accessible import find_access_faults

CELLS = [
    """
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb import Cluster, Monitor, Plan, Training

plan = Plan(split_size=2, spatial_size=1, slice_method="1x2")
cluster = Cluster(plan.ranks).start()
training = Training(resnet20_v1(), plan, cluster, image_shape=(2, 3, 32, 48))
images = SyntheticImages(40, (32, 48), 10)
""",
    "monitor = Monitor(training)\nmonitor",
]
STEP = re.compile(r"step (\d+) of 2000")


@pytest.mark.nightly
def test_a_training_is_watched_and_stopped(notebook):
    page = notebook.page
    notebook.open(CELLS)
    page.get_by_role("img", name="0 steps done").wait_for()
    assert find_access_faults(notebook) == []
    notebook.start_cell("history = training.fit(images, epochs=100, save='checkpoints')")
    numbers = page.get_by_text(STEP)
    numbers.wait_for()
    first = STEP.search(numbers.inner_text()).group(1)
    page.wait_for_function(
        "first => Number(document.body.innerText.match(/step (\\d+) of 2000/)[1]) > Number(first)", arg=first
    )
    page.get_by_role(
        "img", name=re.compile(r"A training, running: [1-9]\d* of 2000 steps done.*rank 2.* waits")
    ).wait_for()
    stop = page.get_by_role("button", name="Stop after this step")
    stop.focus()
    page.keyboard.press("Enter")
    notebook.wait_idle()
    page.get_by_role("img", name=re.compile(r"A training, stopped after \d+ steps")).wait_for()
    assert find_access_faults(notebook) == []
    told = "print(history.stopped, 0 < len(history.losses) < 2000, training.load('checkpoints') == len(history.losses))"
    assert notebook.run_cell(told) == "True True True"
    assert notebook.run_cell("cluster.stop(); print(cluster.state)") == "not started"
