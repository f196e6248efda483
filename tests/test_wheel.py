"""What is installed is all that is needed: wheel and sdist, away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = """
import os, torch, mpi4dl_nb
from mpi4dl_nb import Cluster, Plan, Slicer, Training, resnet20_v1
assert mpi4dl_nb.__file__.startswith(os.getcwd()), mpi4dl_nb.__file__
with Cluster(2) as cluster:
    training = Training(resnet20_v1(), Plan(split_size=1, slice_method="1x2"), cluster, (2, 3, 32, 32))
    training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    assert training.verify()["ok"]
Slicer(torch.rand(3, 64, 64), Plan(split_size=1, slice_method="1x2"))
print("well")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Wheel and sdist of the files that git knows, made by the build backend itself."""
    folder, sources = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("sources")
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, known):
        if (ROOT / name).exists() and not name.startswith(("tests/", "notebooks/")):
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, sources / name, follow_symlinks=False)
    build = f"from setuptools import build_meta as b; b.build_sdist({str(folder)!r}); b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, check=True)
    return folder


def test_the_sdist_has_what_a_build_reads(built: Path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "mpi4dl_nb/page/figure/figure_view.js",
        "mpi4dl_nb/engines/plan/__init__.py",
    } <= names


def test_the_wheel_has_one_top_level_name(built: Path):
    """And what the sdist has of the package, with the marker and the stub for type checkers."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (entries,) = [file.read(name).decode() for name in file.namelist() if name.endswith("entry_points.txt")]
    assert {name.partition("/")[0] for name in names} == {"mpi4dl_nb"}
    engines = {f"mpi4dl_nb/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "engines").rglob("*.py")}
    assert {"mpi4dl_nb/py.typed", "mpi4dl_nb/__init__.pyi", *engines} <= names
    assert "mpi4dl-nb = mpi4dl_nb.__main__:main" in entries
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        sources = {
            name.partition("/")[2] for name in archive.getnames() if name.endswith((".py", ".pyi", ".js", ".css"))
        }
    assert {name for name in names if name.endswith((".py", ".pyi", ".js", ".css"))} <= sources


@pytest.mark.nightly
def test_the_wheel_trains_where_there_are_no_sources(built: Path, tmp_path):
    """`make wheel` does so in an empty environment; here what it depends on is not installed a second time."""
    (wheel,) = built.glob("*.whl")
    own = tmp_path / "site-packages"
    install = ["install", "-q", "--no-deps", "--no-index", "--target", str(own), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SMOKE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(own)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr[-2000:]
