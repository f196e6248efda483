"""A training step walked in a real page on a real cluster, and held against one process in a cell."""

from __future__ import annotations

import pytest

CELLS = [
    """
import torch
from torch import nn

from engines.graph.model_graph import TensorSpec
from engines.spatial.tiles import Tile
from mpi4dl_nb import Cluster, Plan, Stepper, Training

plan = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(5, 1), precision="float64")
cluster = Cluster(plan.ranks).start()
""",
    """
torch.manual_seed(0)
channels = [3, 4, 4, 4, 4, 4, 2]
layers = [[nn.Conv2d(a, b, 3, padding=1), nn.ReLU()] for a, b in zip(channels, channels[1:])]
model = nn.Sequential(*[part for pair in layers for part in pair][:-1]).double()
for weight in model.parameters():
    weight.data.random_(-1, 2)  # whole numbers add without rounding
images = torch.randint(-3, 4, (2, 3, 24, 40)).double()
wanted = torch.randint(-3, 4, (2, 2, 24, 40)).double()

def weighted(made, wanted):
    return (made * wanted).sum()

made = {}
def keep(name):
    def hook(module, given, out):
        out.retain_grad()
        made[name] = out
    return hook
hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_children()]
loss = weighted(model(images), wanted)
loss.backward()
_ = [hook.remove() for hook in hooks]
""",
    """
def same(of, gradient):
    '''Whether what is shown, and the whole of it, is what one process has.'''
    stepping, plain = stepper.stepping, made[of].grad if gradient else made[of]
    view, equal = stepping.view(stepper.channel.value, stepper.image.value), []
    for panel in view.panels:
        if panel.seen is not None and panel.extent.module == of:
            inside = panel.extent.held & Tile.whole(*panel.extent.size_px)
            mine = panel.seen.pixels[inside.to_slices(panel.extent.held)]
            theirs = plain[stepper.image.value, stepper.channel.value][inside.to_slices(Tile.whole(0, 0))]
            equal.append(torch.equal(mine, theirs) and panel.gradient == gradient)
    return len(equal), all(equal), torch.equal(stepping.tensor(of, gradient=gradient), plain)
""",
    """
spec = TensorSpec(tuple(wanted.shape), "float64")
training = Training(model, plan, cluster, images.shape, loss=weighted, labels=spec)
stepper = Stepper(training, images, wanted)
stepper
""",
]
ADDED = """
landed = [each for _, each in stepper.stepping.view(channel=2).landed]
print(bool(landed) and all(torch.equal(each.before + each.arrived, each.after) for each in landed))
"""
FORWARD, BACKWARD = 10, 5


@pytest.mark.nightly
def test_a_step_is_walked_forward_and_back(notebook):
    notebook.open(CELLS)
    image = notebook.page.locator("img.mpi4dl-figure")
    press(notebook, image, "n", FORWARD)
    assert notebook.run_cell("print(stepper.stepping.event.number, same('9', False))") == f"{FORWARD} (4, True, True)"
    notebook.control("Channel").fill("2")
    notebook.page.keyboard.press("Enter")
    image.and_(notebook.page.get_by_alt_text("channel 2 of 4")).wait_for()
    notebook.control("Stop at kind").select_option("any")
    notebook.control("Stop at phase").select_option("backward")
    image.focus()
    press(notebook, image, "b", 1)
    press(notebook, image, "n", BACKWARD)
    assert "gradients go home" in image.get_attribute("alt")
    assert notebook.run_cell("print(same('5', True))") == "(4, True, True)"
    assert notebook.run_cell(ADDED) == "True"
    act(notebook, image, lambda: notebook.page.get_by_role("button", name="Restart (r)").click())
    assert image.get_attribute("alt").startswith("At the start of a training step")
    image.focus()
    press(notebook, image, "f", 1)
    assert image.get_attribute("alt").startswith("The step is done")
    assert notebook.run_cell("print(stepper.stepping.loss == loss.item(), training.steps)") == "True 1"
    assert notebook.run_cell("stepper.close(); cluster.stop(); print(cluster.state)") == "not started"


def press(notebook, image, key: str, times: int) -> None:
    """Press a key on the figure so many times, each when the last one has been drawn."""
    image.focus()
    for _ in range(times):
        act(notebook, image, lambda: notebook.page.keyboard.press(key))


def act(notebook, image, action) -> None:
    """Do something, and wait until the figure has changed for it."""
    before = image.get_attribute("alt")
    action()
    notebook.page.wait_for_function(
        "before => document.querySelector('img.mpi4dl-figure').alt !== before", arg=before, timeout=30000
    )
