"""README.md of this folder: what it names is there, and each folder, feature and file at the top is named in it."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
TEXT = (HERE / "README.md").read_text(encoding="utf-8")
FOLDERS, FEATURES, TOP = (re.findall(r"^\| (.+?) \| (.+) \|$", part, re.MULTILINE) for part in TEXT.split("\n## ")[1:])


def list_named(text: str) -> list[str]:
    """Folders and Python files of the tests that a text names, in its order."""
    return re.findall(r"`((?:[a-z_]+/)?(?:[a-z_]+\.py)|[a-z_]+/)`", text)


def list_packages() -> set[str]:
    """The packages within the two folders of the code."""
    return {path.parent.name for top in ("engines", "mpi4dl_nb") for path in ROOT.glob(f"{top}/*/__init__.py")}


def test_what_it_names_is_there():
    named = list_named(TEXT.replace("`engines/models.py`", ""))
    assert len(named) > 200
    assert [name for name in named if not (HERE / name).exists()] == []


def test_each_folder_is_named_once():
    folders = sorted(f"{path.parent.name}/" for path in HERE.glob("*/*.py"))
    assert sorted(name for first, _ in FOLDERS for name in list_named(first)) == sorted(set(folders))


def test_each_package_has_a_folder():
    assert list_packages() - {"engines"} <= {path.parent.name for path in HERE.glob("*/test_*.py")}


def test_each_feature_is_named():
    headings = re.findall(r"^### (.+)", (ROOT / "docs" / "features.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 30
    assert set(headings) <= {first for first, _ in FEATURES}


def test_each_feature_has_a_test():
    assert [feature for feature, files in FEATURES[1:] if "test_" not in "".join(list_named(files))] == []


def test_each_file_at_the_top_is_named():
    assert {path.name for path in HERE.glob("*.py")} <= set(list_named(TEXT))


def test_names_of_test_files_are_unique():
    names = [path.name for path in HERE.rglob("test_*.py")]
    assert len(names) == len(set(names))
