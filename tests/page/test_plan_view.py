"""The configurator in a bare page: knobs, the picture of the ranks, gauges, and what stands where when it is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from torch import nn

from mpi4dl_nb import Configurator
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machines import MACHINES
from tests.page.harness import PageHarness

SMALL = replace(MACHINES["Summit"], name="small", memory_bytes=1 << 20)
PLAN = Plan(split_size=2, slice_method="2x2")
CANVAS = "canvas.mpi4dl-plan-canvas"


class Bench:
    """A configurator and its page."""

    def __init__(self, browser: object, configurator: Configurator, plan: Plan = PLAN, **options: object) -> None:
        self.configurator = configurator
        configurator.machine.value, configurator.plan = SMALL.name, plan
        assert configurator.wait()
        self.harness = PageHarness(browser, self.configurator.view, **options)
        self.page = self.harness.page
        self.harness.advance()

    def wait_until(self, done: Callable[[], bool], within_s: float = 30.0) -> None:
        """Let the page go on until it shows something."""
        end_s = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end_s
            self.harness.advance(1)

    def wait(self) -> None:
        """Let the page go on until the configurator is done: a handler that speaks with the page holds its lock."""
        self.harness.advance(3)
        self.wait_until(lambda: self.configurator.wait(0.01))
        self.harness.advance()

    def read(self, name: str) -> str:
        """The text of a part of the view."""
        return self.page.locator(f".mpi4dl-plan-{name}").first.inner_text()


@pytest.fixture(scope="module")
def configurator() -> Configurator:
    return Configurator(resnet20_v1(), (4, 3, 64, 64), plan=PLAN, machine=SMALL)


@pytest.fixture
def bench(chromium, configurator) -> Iterator[Bench]:
    made = Bench(chromium, configurator)
    yield made
    made.wait()
    made.harness.close()


def measure_places(page: object) -> dict[str, dict[str, float]]:
    parts = ("picture", "alert", "verdict", "start", "legend", "more")
    return {part: page.locator(f".mpi4dl-plan-{part}").bounding_box() for part in parts}


def test_a_slider_is_turned_by_keyboard_and_its_counts_come_before_the_predictions(bench):
    facts = bench.read("facts").replace("\n", " ").split()
    assert " ".join(facts) == "5 ranks 4 tiles of 32 × 32 px 2 stages 1 micro-batch of 4 images"
    slider = bench.page.get_by_label("Stages", exact=True)
    slider.focus()
    bench.page.keyboard.press("ArrowRight")
    bench.wait_until(lambda: bench.read("facts").startswith("6"))
    assert "of the plan before" in bench.read("change")
    assert bench.read("doing")
    bench.wait()
    bench.wait_until(lambda: "of the plan before" not in bench.read("change"))
    assert "than the plan before" in bench.read("change")
    assert bench.configurator.plan.split_size == 3
    assert bench.page.get_by_role("button", name="Start 6 ranks").is_enabled()


def test_all_six_controls_are_in_view_without_scrolling(bench):
    for label in (
        "Image, rows of px",
        "Images in a batch",
        "Stages",
        "Spatial stages",
        "Grid of tiles, rows",
        "Machine",
    ):
        box = bench.page.get_by_label(label, exact=True).first.bounding_box()
        assert 0 < box["y"] < 400
    assert bench.page.evaluate("() => document.documentElement.scrollHeight <= innerHeight")
    names = bench.page.locator("code").all_inner_texts()
    assert {"image_size", "split_size", "spatial_size", "num_spatial_parts"} <= set(names)


def test_an_error_is_said_in_its_place_and_nothing_moves(bench):
    before = measure_places(bench.page)
    start = bench.page.get_by_role("button", name="Start 5 ranks")
    start.focus()
    bench.configurator.knobs["split_size"].value = 40
    bench.wait_until(lambda: "the model has only" in bench.read("alert"))
    assert measure_places(bench.page) == before
    assert bench.page.get_by_label("Stages", exact=True).get_attribute("aria-invalid") == "true"
    assert start.is_disabled()
    assert start.evaluate("(button) => button === document.activeElement")
    assert "cannot be started" in bench.read("reason")
    assert bench.read("verdict").split("\n") == ["No valid plan", "the numbers are of the plan before"]
    assert bench.page.locator(".mpi4dl-plan-gauge.mpi4dl-plan-stale").count() == 3
    bench.page.get_by_label("Stages, exact", exact=True).fill("2")
    bench.page.keyboard.press("Enter")
    bench.wait_until(lambda: not bench.read("alert"))
    bench.wait()
    assert bench.configurator.plan.split_size == 2
    bench.wait_until(lambda: bench.read("verdict").startswith("Does not fit"))


def test_what_does_not_fit_is_said_in_words_shape_and_texture(bench):
    assert bench.read("verdict").startswith("Does not fit")
    assert "times what a rank has" in bench.read("verdict")
    assert bench.read("legend").startswith("does not fit: 5 ranks")
    bench.page.get_by_label("Machine", exact=True).select_option("DGX H100")
    bench.wait()
    bench.wait_until(lambda: bench.read("verdict").startswith("Fits"))
    assert bench.read("legend").startswith("under half full: 5 ranks")


def test_ranks_are_reached_by_keyboard_and_described(bench):
    bench.page.locator(CANVAS).focus()
    bench.harness.advance()
    assert "rank 0: stage 0, tile 0" in bench.read("card")
    for key, wanted in (("ArrowRight", "rank 1"), ("ArrowDown", "rank 3"), ("PageDown", "rank 4"), ("Home", "rank 0")):
        bench.page.keyboard.press(key)
        bench.harness.advance()
        assert bench.read("card").startswith(wanted)
    lines = bench.page.locator(".mpi4dl-plan-status").text_content()
    for word in ("weights", "activations", "halos", "memory", "messages", "stage 0, tile 0"):
        assert word in lines
    assert bench.page.locator(CANVAS).get_attribute("aria-label").startswith("2 stages: 2x2 tiles")


def test_the_pointer_finds_every_rank_and_asks_the_kernel_nothing(bench):
    asked = []
    bench.page.expose_function("told", lambda said: asked.extend([said]))
    bench.page.evaluate("() => { window.pageSent = () => told(1); }")
    box, seen = bench.page.locator(CANVAS).bounding_box(), set()
    for across in range(8, 96, 8):
        for down in range(8, 96, 8):
            bench.page.mouse.move(box["x"] + box["width"] * across / 100, box["y"] + box["height"] * down / 100)
            seen.add(bench.read("card").split(":")[0])
    assert {f"rank {rank}" for rank in range(5)} <= seen
    assert asked == []


def test_options_are_folded_into_groups_and_set_there(bench):
    summary = bench.page.get_by_text("Pipeline", exact=True)
    assert not bench.page.get_by_label("parts", exact=True).is_visible()
    summary.focus()
    bench.page.keyboard.press("Enter")
    box = bench.page.get_by_label("parts", exact=True)
    box.fill("2")
    bench.page.keyboard.press("Tab")
    bench.wait_until(lambda: "2 micro-batches of 2 images" in bench.read("facts"))
    box.fill("3")
    bench.page.keyboard.press("Tab")
    bench.wait_until(lambda: "cannot be cut into parts=3" in bench.read("alert"))
    assert bench.page.get_by_text("Pipeline ⚠").is_visible()


def test_the_grid_of_tiles_is_two_sliders(bench):
    bench.page.get_by_label("Grid of tiles, columns").focus()
    bench.page.keyboard.press("ArrowRight")
    bench.wait_until(lambda: bench.read("facts").startswith("7"))
    bench.wait()
    assert bench.configurator.plan.slice_method == "2x3"
    assert bench.page.locator(".mpi4dl-plan-of-grid output").inner_text() == "2 × 3"


def test_a_volume_has_a_slider_for_each_axis(chromium):
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2))
    plan = Plan(split_size=1, slice_method="2x1x2")
    volumes = Bench(chromium, Configurator(model, (2, 1, 16, 32, 64), plan=plan, machine=SMALL), plan)
    names = [f"Grid of tiles, {axis}" for axis in ("planes", "rows", "columns")]
    assert [volumes.page.get_by_label(name).input_value() for name in names] == ["2", "1", "2"]
    volumes.page.get_by_label(names[1]).focus()
    volumes.page.keyboard.press("ArrowRight")
    volumes.wait_until(lambda: volumes.read("facts").startswith("8"))
    volumes.wait()
    assert volumes.configurator.plan.slice_method == "2x2x2"
    assert volumes.page.locator(".mpi4dl-plan-of-grid output").inner_text() == "2 × 2 × 2"
    # The second plane of tiles stands below the first: tile 5 is below tile 3, which is below tile 1.
    volumes.page.locator(CANVAS).focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        volumes.page.keyboard.press(key)
    assert "tile 5" in volumes.read("card")
    assert "planes 8 to 15, rows 0 to 15, columns 32 to 63 of the image" in volumes.read("card")
    volumes.harness.close()
    volumes.configurator.close()


def test_the_picture_follows_the_theme(bench):
    pixels = f"() => document.querySelector('{CANVAS}').toDataURL()"
    light = bench.page.evaluate(pixels)
    bench.harness.switch_to_dark()
    assert bench.page.evaluate(pixels) != light


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [760, 900, 1280, 1920])
def test_nothing_is_wider_than_the_page(chromium, configurator, width):
    made = Bench(chromium, configurator, size=(width, 900))
    assert made.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    for part, box in measure_places(made.page).items():
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= width, part
    made.harness.close()
