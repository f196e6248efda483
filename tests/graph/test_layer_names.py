"""Layers may have any name: a model is traced, trained, saved and drawn whatever its layers are called."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mpi4dl_nb import Cluster, Plan, Slicer, Stepper, TimelineView, TraceError, Training, forecast, show_timeline
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.step_frame import pack_frame
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent

PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2", precision="float64")
NAMES = [
    "class",
    "<script>alert(1)</script>", "$x^$", "\\frac{", "a" * 5000, "模型 🧠", "two\nlines\t", "nul\0", "quote'\"`{x}",
    "\u202eback", "1st", "self", "weight:saved",
]  # fmt: skip
SHAPE = (2, 3, 16, 16)


def make_model(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(name, nn.Conv2d(3, 4, 3, padding=1))
    model.add_module(f"{name}norm", nn.BatchNorm2d(4))
    model.add_module(f"{name}next", nn.Conv2d(4, 4, 3, padding=1))
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    model.add_module(f"head {name}", nn.Linear(4, 2))
    return model.double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_layer_of_any_name_is_trained_saved_and_drawn(tmp_path, name):
    model, images, labels = make_model(name), torch.randn(*SHAPE).double(), torch.tensor([0, 1])
    plain = copy.deepcopy(model)
    wanted = nn.functional.cross_entropy(plain(images), labels)
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        training = Training(model, PLAN, cluster, SHAPE)
        assert training.step(images, labels) == pytest.approx(wanted.item(), rel=1e-12)
        assert training.load(training.save(tmp_path)) == 1
        assert list(training.state_dict()) == list(plain.state_dict())
        training.step(images, labels)
        # No glyph is missing, no formula is parsed, and no room is used up: warnings are errors here.
        assert show_timeline(training.timeline(), PLAN).to_png()
        stepper = Stepper(training, images, labels)
        stepper._handle_key("l")
        assert stepper.figure.to_png()
        longest = max(
            (word for text in list_texts(pack_frame(stepper._shown, "1").meta) for word in text.split()), key=len
        )
        assert len(longest) <= 60
        stepper.close()
    slicer = Slicer(np.full((16, 16, 3), 200, np.uint8), PLAN, model.float())
    assert slicer.figure.to_png()
    assert max(len(word) for text in list_texts(slicer.view.facts) for word in text.split()) <= 60
    slicer.close()


def list_texts(facts: object) -> list[str]:
    """Return all texts in facts for a page."""
    if isinstance(facts, dict):
        return [text for value in facts.values() for text in list_texts(value)]
    if isinstance(facts, list | tuple):
        return [text for value in facts for text in list_texts(value)]
    return [facts] if isinstance(facts, str) else []


def test_a_name_that_is_no_text_is_refused_while_tracing():
    with pytest.raises(TraceError, match=r"The name of the layer '\\ud800' is no text"):
        forecast(make_model("\ud800"), Plan(split_size=1), SHAPE, "Summit")


def test_pytorch_writes_names_as_before_once_a_trace_has_ended():
    before = torch.fx.graph._format_target
    forecast(make_model("class"), PLAN, SHAPE, "Summit")
    with pytest.raises(TraceError):
        forecast(make_model("class"), PLAN, (2, 5, 16, 16), "Summit")
    assert torch.fx.graph._format_target is before


def draw_text(text: str) -> np.ndarray:
    """Return the pixels of a figure with a text as its title, and as a tick label."""
    figure = Drawing(figsize=(6, 2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(text, loc="left")
    axes.set_yticks([0], [text[:30]])
    return np.asarray(Image.open(io.BytesIO(figure.to_png())).convert("L"))


def test_dollars_in_a_text_are_dollars():
    assert not np.array_equal(draw_text("$x$"), draw_text("x")), "no formula"
    assert np.array_equal(draw_text("a\0b"), draw_text("a\\x00b"))
    assert np.array_equal(draw_text("b" * 500), draw_text("b" * 36 + "…" + "b" * 18))


def test_labels_of_logarithmic_axes_are_formulas_as_ever():
    figure = Drawing()
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(1, 1e6))
    figure.draw_without_rendering()
    label = axes.get_xticklabels()[2]
    width = label.get_window_extent().width
    assert label.get_text().startswith("$\\mathdefault{10^")
    assert width < 30, "a power of ten, not its source"


@pytest.mark.parametrize("ending", ["pdf", "svg"])
def test_a_figure_with_dollars_is_saved_in_other_formats(ending):
    figure = Drawing()
    figure.subplots().set_title("$x^$")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fonts, which these formats embed
        figure.savefig(buffer := io.BytesIO(), format=ending)
    assert len(buffer.getvalue()) > 1000


@pytest.mark.parametrize("name", ["<img src=x onerror=document.title='hit'>", "a" * 3000], ids=["html", "long"])
def test_a_name_is_text_on_a_page_and_no_wider_than_it(chromium, name):
    from tests.page.harness import PageHarness

    events = (TimelineEvent(0, "first", "compute", "forward", 0, 0.0, 1.0, 0),)
    view = TimelineView(Timeline(events), layers={"first": name})
    harness = PageHarness(chromium, view)
    view.selected = 0
    harness.advance(4)
    page = harness.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.images.length") == 0
    assert page.title() != "hit"
    assert name[:30] in page.inner_text("body")
    assert page.evaluate("document.documentElement.scrollHeight") < 900
    harness.close()
