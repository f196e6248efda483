"""A training step walked in a real page on a real cluster, and held against one process in a cell."""

from __future__ import annotations

import pytest

from tests.browser.accessible import find_access_faults

CELLS = [
    """
import torch
from torch import nn

from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.geometry.tiles import Tile
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


WORDS = "document.querySelector('.mpi4dl-words').textContent"


@pytest.mark.nightly
def test_a_step_is_walked_forward_and_back(notebook):
    notebook.open(CELLS)
    picture = notebook.page.locator(".mpi4dl-stage")
    send_key(notebook, picture, "n", FORWARD)
    assert notebook.run_cell("print(stepper.stepping.event.number, same('9', False))") == f"{FORWARD} (4, True, True)"
    notebook.find_control("Channel").fill("2")
    notebook.page.keyboard.press("Enter")
    notebook.page.locator(".mpi4dl-words", has_text="channel 2 of 4").wait_for(state="attached")
    notebook.find_control("Stop at kind").select_option("any")
    notebook.find_control("Stop at phase").select_option("backward")
    send_key(notebook, picture, "b", 1)
    send_key(notebook, picture, "n", BACKWARD)
    assert "gradients were sent back" in notebook.page.evaluate(WORDS)
    assert notebook.page.locator(".mpi4dl-strips").get_by_text("gradients were sent back").is_visible()
    assert notebook.run_cell("print(same('5', True))") == "(4, True, True)"
    assert notebook.run_cell(ADDED) == "True"
    before = notebook.run_cell("print(stepper.stepping.event.places)")
    send_key(notebook, picture, "ArrowLeft", 2)
    assert notebook.page.locator(".mpi4dl-badge").inner_text().startswith("recorded: ")
    assert notebook.run_cell("print(stepper.stepping.event.places)") == before
    assert find_access_faults(notebook) == []
    run_action(notebook, lambda: notebook.page.get_by_role("button", name="Restart", exact=True).click())
    assert notebook.page.evaluate(WORDS).startswith("At the start of a training step")
    send_key(notebook, picture, "f", 1)
    assert notebook.page.evaluate(WORDS).startswith("The step is done")
    assert notebook.run_cell("print(stepper.stepping.loss == loss.item(), training.steps)") == "True 1"
    assert notebook.run_cell("stepper.close(); cluster.stop(); print(cluster.state)") == "not started"
    last = notebook.page.locator("img[alt^='The step is done']")
    last.wait_for()  # until it is visible: a closed stepper keeps its last picture


def send_key(notebook, picture, key: str, times: int) -> None:
    """Press a key on the picture so many times, each when the last one has been answered."""
    picture.focus()
    for _ in range(times):
        run_action(notebook, lambda: notebook.page.keyboard.press(key))


def run_action(notebook, action) -> None:
    """Do something, and wait until the picture has changed for it and the ranks have stopped."""
    before = notebook.page.evaluate(WORDS)
    action()
    notebook.page.wait_for_function(f"before => {WORDS} !== before", arg=before, timeout=30000)
    notebook.wait_idle()
