"""JupyterLab with folders of its own, and one of its notebooks in a page of Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
from playwright.sync_api import Error as PageError

TOKEN = "tests"
START_S, RUN_S = 60, 150
FOLDERS = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR"]
PAGES = 3
PROMPTS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(each => each.textContent)"
TEXTS = "[...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output pre')].map(each => each.textContent.trim())"
SAVED = "window.jupyterapp.shell.currentWidget.context.model.toJSON().cells"
# JupyterLab's own commands, which come back when they are done; a click on its menu tells nothing.
CURRENT = "window.jupyterapp?.shell.currentWidget"
ANSWERED = f"""async () => {{
    const session = {CURRENT}.sessionContext;
    await session.ready;
    await session.session.kernel.info;
}}"""
RUN = (
    "cells => { window.ran = false; "
    "window.jupyterapp.commands.execute(`notebook:run-${cells}`).finally(() => { window.ran = true }) }"
)
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"


@dataclass
class Lab:
    """A JupyterLab server, which reads and writes below `folder` only."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    def start(self) -> Lab:
        """Start it on a free port. Raises TimeoutError with its log where it does not come; then nothing is left."""
        own = {kind: str(self.folder / kind.lower()) for kind in FOLDERS}
        flags = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", f"--IdentityProvider.token={TOKEN}"]
        flags.append("--expose-app-in-browser")
        quiet = ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url="]
        with (self.folder / "lab.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *flags, *quiet, f"--notebook-dir={self.folder}"],
                env=os.environ | own, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self.url:
            self.url = self._find_server(Path(own["JUPYTER_RUNTIME_DIR"]))
            time.sleep(0.1)
        if not self.url:
            self.stop()
            raise TimeoutError((self.folder / "lab.log").read_text())
        return self

    def _find_server(self, runtime: Path) -> str:
        for file in runtime.glob("jpserver-*.json"):
            try:
                url = json.loads(file.read_text())["url"]
                urllib.request.urlopen(f"{url}api?token={TOKEN}", timeout=2)
            except (OSError, json.JSONDecodeError):  # it does not listen yet, or has not written all of the file
                return ""
            return url
        return ""

    def list_descendants(self) -> list[psutil.Process]:
        """The kernels, and all that they have started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End it with its kernels."""
        rest = self.list_descendants()
        self.process.terminate()
        self.process.wait(30)
        for each in rest:
            if each.is_running():
                each.kill()


@dataclass
class NotebookPage:
    """A notebook that is open in a page; `errors` are what the page's console called errors."""

    lab: Lab
    page: object
    errors: list[str] = field(default_factory=list)
    opened: int = 0
    failures: list[str] = field(default_factory=list)

    def open(self, cells: Sequence[str], dark: bool = False) -> None:
        """Store a notebook of these cells, open it, and run all of them. A page that fails at that is opened anew.

        Raises TimeoutError with what the page shows where no page runs them.
        """
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        for _ in range(PAGES):
            self.errors.clear()
            try:
                self._show(self._store_notebook(cells))
                if dark:
                    self.choose_in_menu("Settings", "Theme", "JupyterLab Dark")
                self._run("all-cells", RUN_S)
                if self._has_run(len(cells)):
                    return
                self.failures.append(self._describe_page())
                self.end_kernel()
            except PageError as error:
                self.failures.append(str(error))
        raise TimeoutError("JupyterLab did not run all cells:\n" + "\n".join(self.failures))

    def open_copy(self, path: Path) -> None:
        """Open a copy of a stored notebook."""
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        shutil.copy(path, self.lab.folder)
        self._show(path.name)

    @property
    def cells(self) -> list[dict[str, object]]:
        """Those of the notebook, as they would be saved now."""
        return self.page.evaluate(f"() => {SAVED}")

    def run(self, cells: str, at: int, within_s: float) -> None:
        """Run `all-above` a cell, or `all-below` from it on."""
        self.page.evaluate(f"number => {{ const notebook = {CURRENT}.content; notebook.activeCellIndex = number }}", at)
        self._run(cells, within_s)

    def await_widget(self, cell: int, within_s: float = START_S) -> None:
        """Wait until a cell shows a widget. Those out of sight are not made, and pictures that come move all others."""
        self.page.wait_for_function(
            f"""number => {{
                {CURRENT}.content.scrollToItem(number, 'start');
                return {CURRENT}.content.widgets[number].node.querySelector('.jupyter-widgets, .mpi4dl-page');
            }}""",
            arg=cell,
            timeout=within_s * 1000,
            polling=200,
        )

    def _run(self, cells: str, within_s: float) -> None:
        self.page.evaluate(RUN, cells)
        self.page.wait_for_function("() => window.ran", timeout=within_s * 1000)
        self.wait_idle()

    def _store_notebook(self, cells: Sequence[str]) -> str:
        """The name of a new notebook of these cells."""
        self.opened += 1
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        name = f"tried{self.opened}.ipynb"
        nbformat.write(book, self.lab.folder / name)
        return name

    def _show(self, name: str) -> None:
        """The page of a notebook, whose kernel has answered."""
        self.page.goto(f"{self.lab.url}lab/tree/{name}?token={TOKEN}&reset")
        self.page.wait_for_function(f"() => ({CURRENT})?.context.path === '{name}'", timeout=START_S * 1000)
        self.page.evaluate(ANSWERED)
        self.page.wait_for_selector(IDLE, timeout=START_S * 1000)

    def choose_in_menu(self, *path: str) -> None:
        """Choose from the menu bar."""
        self.page.click(f'.lm-MenuBar-itemLabel:text-is("{path[0]}")')
        for entry in path[1:]:
            self.page.click(f'.lm-Menu-itemLabel:text-is("{entry}")')

    def _has_run(self, cells: int) -> bool:
        """Whether all cells have, and no widget is a text: a page that does not know widgets yet shows that."""
        done = f"{PROMPTS}.filter(text => /\\d/.test(text)).length === {cells}"
        a_widget = "/^(<mpi4dl_nb.* object at|\\w+\\(children=)/"
        return bool(self.page.evaluate(f"() => {done} && !{TEXTS}.some(text => {a_widget}.test(text))"))

    def _describe_page(self) -> str:
        """The prompts, the outputs' texts and the dialogs of the page, for a failure's message."""
        dialogs = [dialog.inner_text() for dialog in self.page.locator("dialog.jp-Dialog").all()]
        return (
            f"{self.page.evaluate(f'() => {PROMPTS}')} {self.page.evaluate(f'() => {TEXTS}')} {dialogs} {self.errors}"
        )

    def wait_idle(self, within_s: float = RUN_S) -> None:
        """Wait until no cell runs or waits to run."""
        self.page.wait_for_function(
            f"() => !{PROMPTS}.some(text => text.includes('*')) && document.querySelector('{IDLE}')",
            timeout=within_s * 1000,
        )

    def start_cell(self, source: str) -> object:
        """Add a cell at the end and run it; the cell, which may run for long."""
        cells = self.page.locator(".jp-Notebook .jp-CodeCell")
        count = cells.count()
        self.page.click(".jp-Notebook-footer")
        self.page.wait_for_function(f"() => document.querySelectorAll('.jp-Notebook .jp-CodeCell').length > {count}")
        cells.nth(count).locator(".cm-content").click()
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        return cells.nth(count)

    def run_cell(self, source: str) -> str:
        """Add a cell at the end, run it, and what it printed."""
        cell = self.start_cell(source)
        self.page.wait_for_function(f"() => /\\d/.test({PROMPTS}.at(-1))", timeout=RUN_S * 1000)
        return cell.locator(".jp-OutputArea-output").first.inner_text().strip()

    def end_kernel(self) -> None:
        """End the notebook's kernel, as closing it for good does."""
        self.page.evaluate(f"async () => {{ await {CURRENT}.sessionContext.shutdown() }}")
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=unknown]", timeout=START_S * 1000)

    def find_control(self, label: str) -> object:
        """The control with this label; of a slider, the box beside it."""
        return self.page.get_by_label(label, exact=True).first
