"""A notebook that was run and saved shows its widgets alive, without a kernel: as a page of nbconvert, and reopened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.lab import CURRENT, START_S

CELLS = [
    """
import torch
from torch import nn
from mpi4dl_nb import Cluster, Plan, Slicer, Stepper, Training, immunohistochemistry

plan = Plan(split_size=1, slice_method="2x2")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
tissue = immunohistochemistry()[:64, :64]
""",
    "Slicer(tissue, plan, model)",
    """
cluster = Cluster(4, backend="loopback").start()
training = Training(model, plan, cluster, (1, 3, 64, 64))
stepper = Stepper(training, torch.from_numpy(tissue.copy()).permute(2, 0, 1)[None] / 255, torch.tensor([1]))
stepper
""",
    "stepper.record_step()",
    "Slicer(tissue, plan, model, save_picture=False)",
    "small = Slicer(tissue, plan, model)\nsmall.frame_px = 0\nsmall",
]
FRAMES = ["Slicer, alive without a kernel", "Stepper, alive without a kernel"]
IN_FRONT = """frame => {
  const box = frame.getBoundingClientRect();
  return document.elementFromPoint(box.x + box.width / 2, box.y + Math.min(box.height, innerHeight) / 2) === frame;
}"""
HIDDEN_FRAMES = "[...document.querySelectorAll('iframe')].map(each => each.offsetHeight)"


@pytest.fixture(scope="module")
def book() -> NotebookNode:
    """A notebook that nbclient ran: no page was there to say that it rests."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    return NotebookClient(book, timeout=300, kernel_name="python3").execute()


@pytest.fixture(scope="module")
def path(book: NotebookNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    html, _ = HTMLExporter().from_notebook_node(book)
    path = tmp_path_factory.mktemp("converted") / "book.html"
    path.write_text(html, encoding="utf-8")
    return path


class ConvertedPage:
    """A page that nbconvert made. What it loads itself is answered with nothing; `asked` is what frames ask for."""

    def __init__(self, browser: object, path: Path, **options: object) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.context.route(re.compile("^https?:"), lambda route: route.fulfill(content_type="text/javascript", body=""))
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._record_request)
        self.page.goto(path.as_uri())

    def _record_request(self, request: object) -> None:
        if request.frame != self.page.main_frame and not request.url.startswith(("about:", "blob:", "data:")):
            self.asked.append(request.url)


@pytest.fixture
def open_page(chromium, path) -> Iterator[object]:
    opened: list[ConvertedPage] = []

    def open_file(**options: object) -> ConvertedPage:
        opened.append(ConvertedPage(chromium, path, **options))
        return opened[-1]

    yield open_file
    for page in opened:
        page.context.close()


def list_snapshots(book: NotebookNode) -> list[str]:
    htmls = [output.get("data", {}).get("text/html", "") for cell in book.cells for output in cell.outputs]
    return [html for html in htmls if "mpi4dl-still" in html]


@pytest.mark.nightly
def test_a_frame_is_small_and_can_be_left_out(book):
    slicer, stepper, nameless, small = list_snapshots(book)
    assert "<iframe" in slicer
    assert "<iframe" in stepper
    assert len(slicer) < 1_000_000
    assert len(stepper) < 3_000_000
    assert "<iframe" not in nameless + small
    assert "<img" in small
    assert "<img" not in nameless


@pytest.mark.nightly
def test_a_converted_notebook_is_alive(open_page):
    opened = open_page()
    page = opened.page
    assert [frame.get_attribute("title") for frame in page.locator("iframe").all()] == FRAMES
    assert {frame.get_attribute("sandbox") for frame in page.locator("iframe").all()} == {"allow-scripts"}
    slicer, stepper = (page.frame_locator(f'iframe[title="{title}"]') for title in FRAMES)
    words = slicer.locator(".mpi4dl-words p").first
    before = words.inner_text()
    slicer.locator(".mpi4dl-stage canvas").focus()
    page.keyboard.press("t")
    expect(words).not_to_have_text(before)
    for title in FRAMES:  # off the screen, none is drawn
        frame = page.locator(f'iframe[title="{title}"]')
        frame.evaluate("frame => frame.scrollIntoView()")
        assert frame.evaluate(IN_FRONT), f"the still picture lies over the frame of {title}"
    badge = stepper.locator(".mpi4dl-badge")
    expect(badge).to_contain_text(re.compile(r"recorded: 1 of \d+"))
    stepper.get_by_role("button", name="Forward").click()
    expect(badge).to_contain_text(re.compile(r"recorded: 2 of \d+"))
    assert opened.errors == []
    assert opened.asked == []


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_without_scripts_the_still_picture_shows(open_page, scheme: str):
    opened = open_page(java_script_enabled=False, color_scheme=scheme)
    shown = Image.open(BytesIO(opened.page.locator("iframe").first.screenshot()))
    assert len(set(shown.convert("RGB").get_flattened_data())) > 1000, "the frame covers the picture"


@pytest.mark.nightly
def test_a_live_notebook_shows_each_widget_once_and_a_reopened_one_its_page(notebook):
    notebook.open(CELLS[:2])
    page = notebook.page
    page.wait_for_selector(".mpi4dl-slicer")
    assert page.locator(".mpi4dl-slicer").count() == 1
    assert page.evaluate(HIDDEN_FRAMES) == [0], "the frame stays hidden beside a live widget"
    page.evaluate(f"async () => {{ await {CURRENT}.context.save() }}")
    name = page.evaluate(f"() => {CURRENT}.context.path")
    notebook.end_kernel()
    notebook._show(name)  # with a new kernel, which knows no widget
    frame = page.frame_locator(f'iframe[title="{FRAMES[0]}"]')
    expect(frame.locator(".mpi4dl-slicer")).to_be_visible(timeout=START_S * 1000)
    line = page.get_by_text("Error displaying widget")
    expect(line).to_have_count(1, timeout=START_S * 1000)
    expect(line).to_be_hidden()
    # JupyterLab tells the console, too, that there is no such model.
    notebook.errors.clear()
