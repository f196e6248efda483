"""`python -m tests.page_pictures [folder]`: what the page draws, as pictures for README and docs.

`slicer.png` is the slicer on stained tissue. `exchange_forward.png` and `exchange_backward.png` are film strips: halos
on their way to the ranks that read them, and their gradients on the way home.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import sync_playwright
from torch import nn

from mpi4dl_nb import Cluster, Plan, Slicer, Stepper, Training, immunohistochemistry, resnet20_v1
from tests.browser.pages import FLAGS
from tests.page.harness import PageHarness

FIGURES = Path(__file__).parents[1] / "figures"
FRAMES_MS = (20, 800, 500, 1500)  # the time before each: strips lie still, are on their way, land, have landed
CAPTIONS = {
    "forward": (
        "Each rank holds its own tile; the white windows are empty.",
        "A copy of each edge leaves for the neighbour that needs it.",
        "The copies arrive in the neighbours' windows.",
        "All windows are full: each rank computes its convolution.",
    ),
    "backward": (
        "Gradients of borrowed pixels wait beside each tile.",
        "Each leaves for the rank that owns the pixel.",
        "It arrives on the edge that was lent forward.",
        "It has been added there: the owner's gradient is complete.",
    ),
}
PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 1))


def photograph_slicer(browser: Any, folder: Path) -> None:
    """The whole picture above, and a seam from close by below."""
    slicer = Slicer(immunohistochemistry(), Plan(split_size=2, slice_method="2x2"), resnet20_v1(num_classes=2))
    harness = PageHarness(browser, slicer.view, (1280, 700), device_scale_factor=1.5)
    page = harness.page
    page.wait_for_timeout(1500)  # tissue comes
    page.get_by_role("button", name="zoom to halo").click()
    canvas = page.locator("canvas").bounding_box()
    page.wait_for_timeout(1500)
    page.mouse.move(canvas["x"] + canvas["width"] * 0.508, canvas["y"] + canvas["height"] * 0.3)
    page.wait_for_timeout(300)
    page.locator(".mpi4dl-slicer").screenshot(path=folder / "slicer.png")
    harness.close()


def film_exchange(browser: Any, folder: Path) -> None:
    """Frames of the same exchange forward and backward, below each other."""
    torch.manual_seed(0)
    tissue = immunohistochemistry()[100:148, 200:264]
    images = torch.from_numpy(tissue.copy()).permute(2, 0, 1)[None].float() / 255
    layers = [nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 9, padding=4), nn.ReLU()]
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        model = nn.Sequential(*layers, nn.Conv2d(4, 2, 3, padding=1))
        training = Training(model, PLAN, cluster, tuple(images.shape))
        stepper = Stepper(training, images, torch.randint(2, (1, *tissue.shape[:2])))
        harness = PageHarness(browser, stepper.view, (1280, 900))
        page = harness.page
        page.clock.install()
        for phase, name in (("forward", "exchange_forward"), ("backward", "exchange_backward")):
            for _ in range(2 if phase == "forward" else 1):  # the second layer's halos are wide
                stepper.stepping.until(kind="halo", phase=phase)
            page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)  # frames at the same moments on any machine
            stepper.refresh()
            frames = []
            for wait_ms in FRAMES_MS:
                page.clock.run_for(wait_ms)
                box = page.locator(".mpi4dl-stage > canvas").bounding_box()  # the left half is the stage in tiles
                half = {"x": box["x"], "y": box["y"], "width": box["width"] / 2, "height": box["height"]}
                frames.append(page.screenshot(clip=half))
            page.clock.resume()
            join_frames(frames, CAPTIONS[phase]).save(folder / f"{name}.png")
        stepper.close()
        harness.close()


def join_frames(frames: list[bytes], captions: Sequence[str], columns: int = 2) -> Image.Image:
    """Put frames beside and below each other, each with a numbered caption above it."""
    font = ImageFont.truetype(findfont("DejaVu Sans"), 13)
    pictures = []
    for number, (frame, caption) in enumerate(zip(frames, captions, strict=True), 1):
        picture = Image.open(io.BytesIO(frame)).convert("RGB")
        padded = Image.new("RGB", (picture.width + 12, picture.height + 34), "white")
        padded.paste(picture, (0, 26))
        ImageDraw.Draw(padded).text((8, 6), f"{number}  {caption}", "#1a1a1a", font)
        pictures.append(np.asarray(padded))
    rows = [np.concatenate(pictures[start : start + columns], 1) for start in range(0, len(pictures), columns)]
    return Image.fromarray(np.concatenate(rows))


def main(folder: Path = FIGURES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        photograph_slicer(browser, folder)
        film_exchange(browser, folder)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
