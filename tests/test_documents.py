"""README and the pages beside it: links lead somewhere, code runs, commands do what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import tifffile
from PIL import Image

import mpi4dl_nb
from mpi4dl_nb import Cluster, Plan, Training, resnet20_v1

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python -m ((?:mpi4dl_nb|tests)[\w.]*)")
GROUP = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data):: (\w+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]{40,})\]\((figures/[^)]+)\)")

# What would take hours here, made small.
SMALLER = {
    "--image-size 1024x1360": "--image-size 64x80", "--num-epochs 8": "--num-epochs 1",
    "--region 0,0,2000,2000": "--region 0,0,200,200",
}  # fmt: skip


def read_text(path: Path) -> str:
    """A page; of a notebook, its words."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.stem)
def test_links_and_modules_are_there(path: Path):
    text = read_text(path)
    for target in LINK.findall(text):
        if not target.startswith(("https://", "#")):
            assert (path.parent / target.partition("#")[0]).exists(), target
    for module in MODULE.findall(text):
        assert importlib.util.find_spec(module.rstrip(".")), module


def test_every_notebook_and_page_has_a_place():
    """README leads to the tutorials and to the index, and the index to each page, in one of its groups."""
    linked = set(LINK.findall(read_text(ROOT / "README.md")))
    assert {"docs/index.md", *(f"notebooks/{path.name}" for path in NOTEBOOKS)} <= linked
    index = ROOT / "docs" / "index.md"
    lines = "\n".join(GROUP.findall(read_text(index))).splitlines()
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines if line and not line.startswith(":")]
    places = [ROOT / name[1:] if name.startswith("/") else index.parent / name for name in names]
    found = [path for place in places for path in sorted(place.parent.glob(f"{place.name}.*"))]
    assert sorted(path for path in found if path.suffix in (".md", ".ipynb")) == sorted({*PAGES, *NOTEBOOKS} - {index})


def test_every_public_name_is_in_the_reference_once():
    named = [name for path in (ROOT / "docs/reference").glob("*.md") for name in DIRECTIVE.findall(read_text(path))]
    assert sorted(named) == sorted(mpi4dl_nb.__all__)


def test_the_front_door_is_short_and_shows_a_picture():
    readme = read_text(ROOT / "README.md")
    lines = readme.splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
    picture = PICTURE.search("\n".join(lines[:20]))
    assert (ROOT / picture[2]).stat().st_size < 1_500_000


def list_blocks(language: str, *pages: str) -> list[str]:
    found = (BLOCK.findall(read_text(ROOT / page)) for page in pages)
    return [code for each in found for name, code in each if name == language]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "code", list_blocks("python", "README.md", "docs/commands.md"), ids=["ten lines", "asynchrony"]
)
def test_code_runs(code: str, tmp_path, capsys):
    script = tmp_path / "cell.py"
    script.write_text(code + "\nassert figure.alt\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout


def test_the_model_that_rescales_its_images_is_trained():
    (rescaled,) = list_blocks("python", "docs/questions.md")
    names: dict[str, Any] = {"__name__": "questions"}
    exec(compile(rescaled, "docs/questions.md", "exec"), names)
    model, plan = names["Rescaled"](resnet20_v1()), Plan(split_size=1, num_spatial_parts=4)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        assert Training(model, plan, cluster, (2, 3, 32, 32)).verify()["ok"]


def list_commands() -> Iterator[str]:
    """All that the pages of commands let a reader type, one after another; `make` and `source` are not run here."""
    for block in list_blocks("bash", "README.md", "docs/checks.md", "docs/commands.md"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith(("make ", "source ")):
                yield line.partition("   # ")[0]


def test_make_targets_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {name for path in PAGES for name in re.findall(r"(?:`|^)make ([a-z-]+)", read_text(path), re.MULTILINE)}
    assert {"demo", "test", "lab", "bench", "notebooks"} <= asked <= targets


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands find the files that they name."""
    made, random = tmp_path_factory.mktemp("typed"), np.random.default_rng(0)
    for kind in ("images", "masks"):
        (made / "brecahad" / kind).mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(0, 256, (80, 96, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels if kind == "images" else 255 * (pixels[..., 0] > 127).astype(np.uint8))
            picture.save(made / "brecahad" / kind / f"{number}.png")
    slide = random.integers(0, 256, (512, 512, 3), dtype=np.uint8)
    tifffile.imwrite(made / "slide.svs", slide, tile=(128, 128), photometric="rgb")
    return made


def test_there_are_commands():
    assert sum("verify" in command for command in list_commands()) >= 10
    assert sum("bench" in command for command in list_commands()) >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("command", list(list_commands()))
def test_a_command_runs_as_typed(command: str, folder: Path):
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    _, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    if "verify" in words:
        assert json.loads(done.stdout.splitlines()[-1])["ok"]
