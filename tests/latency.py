"""`python -m tests.latency [name ...] [--write]`: what a hand on the widgets feels, in Chromium, as lines of JSON.

Frames while something is dragged, zoomed or scrubbed; milliseconds of a hover, with a kernel that is busy; and the time
from a control to its answer on the page. `--write` puts the figures into BENCHMARKS.md, below its other studies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.networks.nets import UNet
from playwright.sync_api import sync_playwright

from mpi4dl_nb import (
    Cluster,
    Configurator,
    Plan,
    Slicer,
    Stepper,
    TimelineView,
    Training,
    forecast,
    immunohistochemistry,
    resnet20_v1,
    resnet110_v2,
    resnet_v1,
)
from tests.browser.pages import FLAGS
from tests.page.harness import PageHarness
from tests.page.measures import measure_frames
from tests.widgets.test_slicer_widget import Net, Plasma

TILES = Plan(split_size=2, spatial_size=1, num_spatial_parts=4)
GRID = Plan(split_size=1, slice_method="3x3")
TITLE = "## Widgets"
SAYS = (
    "What a hand feels on the page (`python -m tests.latency`, Chromium without a GPU): frames a second and the "
    "slowest frame while something moves, what the page computes for one event, and the time from a control to its "
    "answer."
)
Line = dict[str, Any]


def measure_moves(browser: Any, view: Any, selector: str, kinds: Sequence[str]) -> Iterator[tuple[str, Line]]:
    """Move things on the page of a widget whose kernel answers nothing."""
    harness = PageHarness(browser, view)
    harness.advance(5)
    harness.page.wait_for_timeout(1500)  # tissue comes
    harness.is_busy = True
    for kind in kinds:
        yield kind, measure_frames(harness.page, selector, kind)
    harness.page.context.close()


def measure_slicer(browser: Any) -> Iterator[tuple[str, Line]]:
    """A region of 2,967 x 2,220 px, a pyramid of 100,000 px a side, and the layers of a ResNet-62."""
    tissue = np.tile(immunohistochemistry(), (6, 5, 1))[:2967, :2220]
    moves = ("hover", "drag", "zoom")
    for what, source, plan in (("2,967 x 2,220 px", tissue, GRID), ("100,000 px a side", Plasma(100_000), GRID)):
        made = Slicer(source, plan, Net())
        for kind, line in measure_moves(browser, made.view, "canvas.mpi4dl-canvas", moves):
            yield f"slicer, {what}: {kind}", line
    deep = Slicer(immunohistochemistry(), Plan(split_size=1, num_spatial_parts=4), resnet_v1(62))
    for _, line in measure_moves(browser, deep.view, ".mpi4dl-strip", ("scrub",)):
        yield f"slicer, {len(deep.points)} layers: scrub", line


def measure_timeline(browser: Any) -> Iterator[tuple[str, Line]]:
    """A step of ResNet-110 in 16 micro-batches on 5 ranks, as predicted."""
    plan = Plan(split_size=2, num_spatial_parts=4, parts=16)
    made = TimelineView(forecast(resnet110_v2(), plan, (16, 3, 256, 256), "Summit").timeline, plan)
    count = f"{len(made.timeline.events):,} events"
    for kind, line in measure_moves(browser, made, ".mpi4dl-timeline-rows", ("hover", "drag", "zoom")):
        yield f"timeline, {count}: {kind}", line


def measure_configurator(browser: Any) -> Iterator[tuple[str, Line]]:
    """From a knob to the counts on the page."""
    unet = UNet(2, 3, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2)
    cases = (
        ("ResNet-110, 512 px", resnet110_v2(), 512, TILES),
        ("MONAI UNet, 2,048 px, 64 tiles", unet, 2048, Plan(split_size=1, num_spatial_parts=64)),
    )
    for what, model, side, plan in cases:
        made = Configurator(model, (1, 3, side, side), machine="Summit", plan=plan)
        made.wait()
        harness = PageHarness(browser, made.view)
        harness.advance(5)
        found = [time_counts(harness, key) for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft") * 3]
        yield f"configurator, {what}: knob to counts", make_line(found)
        harness.page.context.close()


def time_counts(harness: PageHarness, key: str) -> float:
    """Press an arrow on the slider of columns, and return the milliseconds until the counts have changed."""
    harness.page.locator(".mpi4dl-plan-of-grid input").first.focus()
    harness.page.evaluate(
        """() => {
            window.shown = 0;
            new MutationObserver((_, observer) => { window.shown = performance.now(); observer.disconnect(); }).observe(
                document.querySelector('.mpi4dl-plan-facts'), { childList: true, subtree: true });
            const begin = () => { window.begun = performance.now(); };
            document.addEventListener('input', begin, { capture: true, once: true });
        }"""
    )
    harness.page.keyboard.press(key)
    wait_until(harness, "() => window.shown")
    return harness.page.evaluate("() => window.shown - window.begun")


def measure_stepper(browser: Any) -> Iterator[tuple[str, Line]]:
    """From the key of an instruction to its picture, on 5 ranks; then the film of a halo exchange."""
    with Cluster(TILES.ranks, backend="loopback") as cluster:
        images = torch.randn(2, 3, 64, 64)
        training = Training(resnet20_v1(), TILES, cluster, images.shape)
        made = Stepper(training, images, torch.tensor([3, 7]))
        harness = PageHarness(browser, made.view, reduced_motion="reduce")
        harness.advance(5)
        yield "stepper, 5 ranks: instruction", make_line([time_instruction(harness) for _ in range(12)])
        made.close()
        harness.page.context.close()


def time_instruction(harness: PageHarness) -> float:
    """Press the key of one instruction, and return the milliseconds until the page shows that it has run."""
    badge = "document.querySelector('.mpi4dl-stepper [role=slider]').getAttribute('aria-valuemax')"
    before = harness.page.evaluate(f"() => {badge}")
    harness.page.locator(".mpi4dl-stage").focus()
    start_s = time.perf_counter()
    harness.page.keyboard.press("n")
    wait_until(harness, f"() => {badge} !== '{before}'")
    return (time.perf_counter() - start_s) * 1000


def wait_until(harness: PageHarness, condition: str) -> None:
    """Let the page go on, frame by frame, until a condition holds."""
    deadline = time.monotonic() + 20
    while not harness.page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        harness.advance(1)


def make_line(milliseconds: Sequence[float]) -> Line:
    return {
        "answer_ms": round(statistics.median(milliseconds), 1),
        "slowest_ms": round(max(milliseconds), 1),
        "answers": len(milliseconds),
    }


STUDIES: dict[str, Callable[[Any], Iterator[tuple[str, Line]]]] = {
    "slicer": measure_slicer,
    "timeline": measure_timeline,
    "configurator": measure_configurator,
    "stepper": measure_stepper,
}


def write_table(lines: Sequence[Line], page: Path) -> None:
    """Put the figures into a page of benchmarks, in place of those that it had."""
    columns = {
        "what": "", "frames_per_s": "frames/s", "lost": "lost frames", "slowest_ms": "slowest, ms",
        "handler_ms": "one event, ms", "slowest_handler_ms": "slowest event, ms", "answer_ms": "answer, ms",
    }  # fmt: skip
    rows = [" | ".join(str(line.get(name, "")) for name in columns) for line in lines]
    table = [" | ".join(columns.values()), "---|---:|---:|---:|---:|---:|---:", *rows]
    text = "\n".join(f"| {row} |" if "---" not in row else f"|{row}|" for row in table)
    before = re.split(rf"\n{TITLE}\n", page.read_text(encoding="utf-8"))[0].rstrip()
    page.write_text(f"{before}\n\n{TITLE}\n\n{SAYS}\n\n{text}\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    names = [each for each in arguments if not each.startswith("-")]
    lines = []
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        for name in names or STUDIES:
            for what, line in STUDIES[name](browser):
                lines.append({"what": what, **line, "load": round(os.getloadavg()[0], 1)})
                print(json.dumps(lines[-1]), flush=True)
        browser.close()
    if "--write" in arguments:
        write_table(lines, Path(__file__).parents[1] / "BENCHMARKS.md")


if __name__ == "__main__":
    main(sys.argv[1:])
