"""CONTRIBUTING.md: its recipes run and end in what they promise; what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from mpi4dl_nb.engines.compiler import operator_table
from mpi4dl_nb.engines.images import folder, picture
from mpi4dl_nb.engines.plan import schedule
from mpi4dl_nb.engines.predict import machines
from mpi4dl_nb.engines.program import kernels

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = {
    title: "\n".join(re.findall(r"^```python run\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    for title, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
}
TABLES = (
    (operator_table, "_TABLE"),
    (kernels, "_KERNELS"),
)
NAMES = ((picture, "_open_file"), (folder, "ENDINGS"))


@pytest.fixture(autouse=True)
def _leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    for module, name in TABLES:
        monkeypatch.setattr(module, name, getattr(module, name).copy())
    for module, name in NAMES:
        monkeypatch.setattr(module, name, getattr(module, name))
    with patch.dict(schedule.SCHEDULES), patch.dict(machines.MACHINES):
        yield


def list_code_lines(code: str) -> list[str]:
    """Without what is imported, and without empty lines."""
    return [line for line in code.splitlines() if line and not line.startswith(("import ", "from "))]


def test_there_are_four_recipes():
    assert len(RECIPES) == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs(title: str, tmp_path: Path):
    """In a namespace of its own, as in a cell; `path` is an empty folder."""
    names = {"__name__": "recipe", "path": tmp_path}
    exec(compile(RECIPES[title], f"CONTRIBUTING.md, {title}", "exec"), names)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_short_and_checks_itself(title: str):
    lines = list_code_lines(RECIPES[title])
    assert len(lines) < 20
    assert lines[-1].lstrip().startswith("assert"), "a recipe ends in what shows that it works"


@pytest.mark.parametrize("title", RECIPES)
def test_what_a_recipe_adds_is_not_there_yet(title: str):
    """Otherwise the recipe would hold without what it shows."""
    code = RECIPES[title]
    kinds = (
        r'@register_rule\("(.+?)"',
        r'SCHEDULES\["(.+?)"\]',
        r'MACHINES\["(.+?)"\] =',
        r'\*folder.ENDINGS, "(.+?)"',
    )
    added = re.findall("|".join(kinds), code)
    assert added
    known = {*operator_table.get_rules(), *schedule.SCHEDULES, *machines.MACHINES, *folder.ENDINGS}
    assert not known & {name for names in added for name in names if name}


def test_paths_that_it_names_are_there():
    named = set(re.findall(r"`((?:engines|mpi4dl_nb|notebooks|tests)/[\w./]*|\w+\.(?:toml|yml|txt)|Makefile)`", TEXT))
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_it_names_every_room():
    files = (path for package in ("engines", "mpi4dl_nb") for path in (ROOT / package).rglob("*.py"))
    rooms = sorted({path.parent.relative_to(ROOT).as_posix() for path in files})
    assert [room for room in rooms if f"`{room}/" not in TEXT] == []


def test_targets_of_make_that_it_names_are_there():
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", TEXT)) <= set(targets)


def test_it_can_be_read_in_one_go():
    assert len(TEXT.splitlines()) <= 165
