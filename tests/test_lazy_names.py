"""Public names are imported when they are first used: what a process loads is what it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mpi4dl_nb

ROOT = Path(__file__).parents[1]
NOTEBOOK = {
    "IPython",
    "anywidget",
    "ipykernel",
    "ipyparallel",
    "ipywidgets",
    "jupyter_client",
    "matplotlib",
    "traitlets",
}
HEAVY = NOTEBOOK | {"PIL", "mpi4py", "numpy", "safetensors", "skimage", "tifffile", "torch"}


def find_loaded(code: str) -> set[str]:
    """The packages that a new process has loaded after the code."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import mpi4dl_nb; dir(mpi4dl_nb)", HEAVY),
        ("from mpi4dl_nb import Plan, PlanError, format_bytes; Plan(split_size=1)", {"torch", *NOTEBOOK}),
        ("import mpi4dl_nb.engines", HEAVY),
        ("import mpi4dl_nb.engines.server.rank_functions, mpi4dl_nb.engines.cli.command", NOTEBOOK),
        ("from mpi4dl_nb import resnet20_v1; resnet20_v1()", NOTEBOOK),
    ],
)
def test_what_is_not_needed_is_not_loaded(code: str, absent: set[str]):
    assert not find_loaded(code) & absent


def test_a_star_brings_every_public_name():
    names: dict[str, object] = {}
    exec("from mpi4dl_nb import *", names)
    assert names.keys() - {"__builtins__"} == set(mpi4dl_nb.__all__)
    assert set(mpi4dl_nb.__all__) <= set(dir(mpi4dl_nb))


def test_an_unknown_name_is_an_attribute_error_that_suggests_one():
    with pytest.raises(AttributeError, match=r"module 'mpi4dl_nb' has no attribute 'Slicr'"):
        _ = mpi4dl_nb.Slicr
    done = subprocess.run(
        [sys.executable, "-c", "import mpi4dl_nb; mpi4dl_nb.Slicr"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Did you mean: 'Slicer'?" in done.stderr


def test_the_stub_says_each_name_once_as_type_checkers_want_it():
    """`import a as a` is how a stub exports."""
    stub = ast.parse((ROOT / "mpi4dl_nb" / "__init__.pyi").read_text(encoding="utf-8"))
    aliases = [alias for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert [alias.name for alias in aliases] == [alias.asname for alias in aliases]
    assert len({alias.name for alias in aliases}) == len(aliases) == len(mpi4dl_nb.__all__)


def test_the_version_stands_in_one_place():
    """The package's metadata and the citation are made from it, or held to it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mpi4dl_nb.__version__"}
    assert f"\nversion: {mpi4dl_nb.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {mpi4dl_nb.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
