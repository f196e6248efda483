"""The how-to pages: the Python of each runs from top to bottom, in a folder with a user's files.

A block of Python that cannot run here stands below a line `<!-- not run: REASON -->`, which no page shows. Commands and
output are blocks of `bash` and `text`, which are not run. The folder has `slide.svs` (512 x 512 px), the pictures
`images/0.png` to `images/3.png` (80 x 96 px) with masks of 0 and 255 in `masks/`, and `classes/benign/0.png` to
`classes/tumour/3.png`. On a slow machine, MPI4DL_NB_HOW_TO_S gives the seconds that a page may take.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "how-to"
PAGES = sorted(FOLDER.glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"  # no page shows a comment of HTML
    r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
KINDS = {"python", "bash", "text"}
LIMIT_S = float(os.environ.get("MPI4DL_NB_HOW_TO_S", "600"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def join_code(text: str) -> str:
    """Return the Python blocks of a page that run here, each at its own line of the page, as one script."""
    lines = [""] * len(text.splitlines())
    for block in BLOCK.finditer(text):
        if block["kind"] == "python" and not block["reason"]:
            start = text.count("\n", 0, block.start("code"))
            code = block["code"].splitlines()
            lines[start : start + len(code)] = code
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the pages name."""
    random = np.random.default_rng(0)
    for name in ("images", "masks", "classes/benign", "classes/tumour"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(4):
        pixels = random.integers(0, 256, (80, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{number}.png")
        Image.fromarray(pixels).save(tmp_path / "classes" / ("benign", "tumour")[number // 2] / f"{number}.png")
        Image.fromarray(255 * (pixels[..., 0] > 127).astype(np.uint8)).save(tmp_path / f"masks/{number}.png")
    slide = random.integers(0, 256, (512, 512, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "slide.svs", slide, tile=(128, 128), photometric="rgb")
    return tmp_path


@pytest.mark.sampled(3)
@each_page
def test_the_code_of_a_page_runs(page: Path, folder: Path):
    script = folder / "page.py"
    script.write_text(join_code(page.read_text(encoding="utf-8")), encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}, by its lines:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@each_page
def test_a_page_is_short_and_its_blocks_run_or_say_why_not(page: Path):
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    prose = BLOCK.sub("", text)
    assert lines[0].startswith("# ")
    assert len(re.findall("^# ", prose, re.MULTILINE)) == 1
    assert 20 <= len(lines) <= 100
    assert [line for line in lines if len(line) > 160 and not line.startswith("|")] == []
    assert {block["kind"] for block in BLOCK.finditer(text)} <= KINDS
    assert "```" not in prose, "a block that is not closed, or indented"
    assert "<!-- not run" not in prose, "a reason that stands above no block"
    assert re.search(r"\]\(\S+\.(md|ipynb)", prose), "a page links to what it builds on"


def test_there_are_pages():
    assert len(PAGES) >= 5


def test_a_script_has_the_blocks_of_its_page_at_their_lines():
    page = """# A page
```python
a = 1
```
<!-- not run: needs two hosts -->
```python
connect()
```
<!-- not run: needs a GPU -->

```python
a = 2
```
```bash
ls
```
```python
assert a == 1
```
"""
    code = join_code(page).splitlines()
    assert [(number, line) for number, line in enumerate(code, 1) if line] == [(3, "a = 1"), (18, "assert a == 1")]
    assert all(line == page.splitlines()[number] for number, line in enumerate(code) if line)
