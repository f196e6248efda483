"""The site with the stored outputs: from a disk, each page opens without an error and fits into its window."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

ROOT = Path(__file__).parents[2]
BUILD_S = 1200
WIDTHS = (1400, 400)

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    build = subprocess.run(
        [sys.executable, str(ROOT / "docs/site/build.py"), str(folder)],
        env=os.environ | {"EXECUTE": "off"}, capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    return folder


@pytest.fixture
def open_window(chromium) -> Iterator[Callable[[int], tuple[Page, list[str]]]]:
    """`open_window(width)` returns a page, and a list of what goes wrong in it: errors, and requests to a network."""
    contexts = []

    def open_context(width: int) -> tuple[Page, list[str]]:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, offline=True))
        page, problems = contexts[-1].new_page(), []
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: re.match("https?:|wss?:", request.url) and problems.append(request.url))
        return page, problems

    yield open_context
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_from_a_disk(site: Path, open_window, width: int):
    page, problems = open_window(width)
    wrong = {}
    paths = sorted(site.rglob("*.html"))
    assert len(paths) > 40
    for path in paths:
        page.goto(path.as_uri())
        for frame in page.locator("iframe").all():  # a frame is loaded when it comes into view
            frame.scroll_into_view_if_needed()
        page.wait_for_load_state("networkidle")
        if (content := page.evaluate("document.documentElement.scrollWidth")) > width:
            problems.append(f"{content} px wide in a window of {width} px")
        if problems:
            wrong[str(path.relative_to(site))] = list(problems)
        problems.clear()
    assert wrong == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_start_page_begins_with_a_living_stepper(site: Path, open_window, width: int):
    page, problems = open_window(width)
    page.goto((site / "index.html").as_uri())
    page.wait_for_url(re.compile(r"docs/index\.html$"))
    stepper = page.frame_locator("iframe").first
    expect(stepper.locator("body[data-shown]")).to_be_attached(timeout=30_000)
    assert page.locator("iframe").first.bounding_box()["y"] < 450, "it is on the first screen"
    badge = stepper.locator(".mpi4dl-badge")
    expect(badge).to_contain_text("recorded: 1 of")
    stepper.locator(".mpi4dl-stage").press("ArrowRight")
    expect(badge).to_contain_text("recorded: 2 of")
    expect(stepper.locator(".mpi4dl-step-title")).to_contain_text("forward halo")
    assert problems == []


def test_a_search_finds_halos(site: Path, open_window):
    page, problems = open_window(WIDTHS[0])
    page.goto((site / "search.html").as_uri() + "?q=halo")
    results = page.locator("#search-results li")
    expect(results.filter(has_text="Glossary")).to_be_visible(timeout=30_000)
    assert results.count() > 10
    results.filter(has_text="Glossary").get_by_role("link").click()
    page.wait_for_url(re.compile("glossary"))
    assert problems == []


def test_the_start_page_and_the_next_one_have_different_names(site: Path, open_window):
    page, problems = open_window(WIDTHS[0])
    page.goto((site / "docs/index.html").as_uri())
    expect(page.locator("a.next-page")).to_contain_text("Install and train")
    page.locator("a.next-page").click()
    page.wait_for_url(re.compile(r"README\.html$"))
    assert page.title() == "Install and train - mpi4dl_nb"
    assert problems == []
