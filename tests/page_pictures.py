"""`python -m tests.page_pictures [folder]`: what the page draws, as pictures for README and docs.

`slicer.png` is the slicer on stained tissue. `exchange_forward.png` and `exchange_backward.png` are film strips: halos
on their way to the ranks that read them, and their gradients on the way home. `exchange.webp` is both in motion, the
first layer's halos in the colours of the tissue.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
FRAMES_MS = (570, 250, 500, 1500)  # the time before each: values have come, strips are on their way, land, have landed
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
ANIMATED = {
    "forward": "Forward: each tile borrows the edge of its neighbours.",
    "backward": "Backward: the gradient of each borrowed pixel goes home, and is added.",
}
FRAMES, FRAME_MS, PAUSE_MS = 30, 80, 1500
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
    layers = [nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 9, padding=4), nn.ReLU()]
    with _open_stage(browser, nn.Sequential(*layers, nn.Conv2d(4, 2, 3, padding=1)), 1) as show:
        # The second layer's halos are wide.
        forward = show("forward", 2, FRAMES_MS)
        join_frames(forward, CAPTIONS["forward"]).save(folder / "exchange_forward.png")
        join_frames(show("backward", 1, FRAMES_MS), CAPTIONS["backward"]).save(folder / "exchange_backward.png")


def animate_exchange(browser: Any, folder: Path) -> None:
    """An exchange of tissue forward, then one of gradients backward, as a moving picture of about ten seconds."""
    model = nn.Sequential(nn.Conv2d(3, 4, 9, padding=4), nn.ReLU(), nn.Conv2d(4, 2, 9, padding=4), nn.ReLU())
    waits_ms = [FRAME_MS] * FRAMES
    pictures = []
    with _open_stage(browser, nn.Sequential(*model, nn.Conv2d(2, 2, 3, padding=1)), 1.5) as show:
        for phase in ("forward", "backward"):
            frames = show(phase, 1, waits_ms)
            pictures += [join_frames([frame], [ANIMATED[phase]], 1, 15) for frame in frames]
    pauses_ms = [*[FRAME_MS] * (FRAMES - 1), PAUSE_MS] * 2
    size = {"save_all": True, "quality": 80, "method": 6}
    pictures[0].save(folder / "exchange.webp", append_images=pictures[1:], duration=pauses_ms, loop=0, **size)


@contextmanager
def _open_stage(browser: Any, model: nn.Module, scale: float) -> Iterator[Callable[..., list[bytes]]]:
    """Yield a function that goes to an exchange and returns pictures of the stage in tiles, so many ms apart."""
    torch.manual_seed(0)
    tissue = immunohistochemistry()[100:148, 200:264]
    images = torch.from_numpy(tissue.copy()).permute(2, 0, 1)[None].float() / 255
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        training = Training(model, PLAN, cluster, tuple(images.shape))
        stepper = Stepper(training, images, torch.randint(2, (1, *tissue.shape[:2])))
        harness = PageHarness(browser, stepper.view, (1280, 900), device_scale_factor=scale)
        page = harness.page
        page.add_style_tag(content=".mpi4dl-stage { border-color: transparent !important }")  # half of it is cut off
        page.clock.install()

        def show(phase: str, exchanges: int, waits_ms: Sequence[int]) -> list[bytes]:
            for _ in range(exchanges):
                stepper.stepping.until(kind="halo", phase=phase)
            page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)  # frames at the same moments on any machine
            stepper.refresh()
            frames = []
            for wait_ms in waits_ms:
                page.clock.run_for(wait_ms)
                box = page.locator(".mpi4dl-stage > canvas").bounding_box()  # the left half is the stage in tiles
                half = {"x": box["x"], "y": box["y"], "width": box["width"] / 2, "height": box["height"]}
                frames.append(page.screenshot(clip=half))
            page.clock.resume()
            return frames

        yield show
        stepper.close()
        harness.close()


def join_frames(frames: list[bytes], captions: Sequence[str], columns: int = 2, size: int = 13) -> Image.Image:
    """Put frames beside and below each other, each with its caption above it, numbered if there are several."""
    font = ImageFont.truetype(findfont("DejaVu Sans"), size)
    pictures = []
    for number, (frame, caption) in enumerate(zip(frames, captions, strict=True), 1):
        picture = Image.open(io.BytesIO(frame)).convert("RGB")
        padded = Image.new("RGB", (picture.width + 12, picture.height + 34), "white")
        padded.paste(picture, (0, 26))
        text = f"{number}  {caption}" if len(frames) > 1 else caption
        ImageDraw.Draw(padded).text((8, 6), text, "#1a1a1a", font)
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
        animate_exchange(browser, folder)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
