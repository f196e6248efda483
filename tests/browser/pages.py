"""Chromium, and JupyterLab with a notebook in it; where there is no Chromium, these tests are left out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import psutil
import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import Lab, NotebookPage

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)
GONE_S = 10


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab")).start()
    yield lab
    lab.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        pytest.skip("there is no Chromium here: install it (Debian: apt install chromium) to try the widgets in a page")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def notebook(chromium, lab) -> Iterator[NotebookPage]:
    """A page that opens notebooks. At the end its console has told no error, and no process is left."""
    before = set(lab.list_descendants())
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    found = NotebookPage(lab, context.new_page())
    yield found
    found.end_kernel()
    context.close()
    assert found.errors == []
    assert find_left_processes(lab, before) == []


def find_left_processes(lab: Lab, before: set[psutil.Process]) -> list[psutil.Process]:
    """The processes that are still there after the time in which all have to end."""
    deadline = time.monotonic() + GONE_S
    while (left := [each for each in lab.list_descendants() if each not in before]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
