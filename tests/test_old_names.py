"""The engines' old name: what was pickled as `engines.plan.Plan` is loaded, unless `engines` is somebody else's."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mpi4dl_nb.engines.geometry.tiles
from mpi4dl_nb import Plan
from mpi4dl_nb.cluster.user_modules import find_user_file
from mpi4dl_nb.engines.cli.options import build_model, make_parser

ROOT = Path(__file__).parents[1]
PLAN = Plan(split_size=2, slice_method="1x2", parts=4, schedule="1f1b")


def make_old_pickle(plan: Plan) -> bytes:
    """By protocol 0, in which names are lines of text."""
    old = pickle.dumps(plan, protocol=0).replace(b"mpi4dl_nb.engines.", b"engines.")
    assert b"engines.plan\nPlan" in old
    assert b"mpi4dl_nb" not in old
    return old


@pytest.mark.parametrize("link", ["mpi4dl_nb", "."], ids=["as installed", "in a repository"])
def test_an_old_pickle_is_loaded(link: str, tmp_path):
    """Installed, nothing is called `engines`; in a repository, the folder itself is found."""
    place = ROOT
    if link == "mpi4dl_nb":
        (place := tmp_path / "installed").mkdir()
        (place / link).symlink_to(ROOT / link)
    (tmp_path / "plan.pickle").write_bytes(make_old_pickle(PLAN))
    code = (
        "import sys, pathlib\n"
        "sys.path[1:] = [path for path in sys.path[1:] if not pathlib.Path(path, 'engines').is_dir()]\n"
        "import mpi4dl_nb, pickle\n"
        "plan = pickle.loads(pathlib.Path('plan.pickle').read_bytes())\n"
        "print(type(plan) is mpi4dl_nb.Plan, plan)"
    )
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == f"True {PLAN}", done.stderr


def test_an_old_name_is_the_same_module_and_leaves_it_as_it_is(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "engines"]:
        monkeypatch.delitem(sys.modules, name)
    tiles = mpi4dl_nb.engines.geometry.tiles
    assert importlib.import_module("engines.geometry.tiles") is tiles
    assert tiles.__spec__.name == tiles.__name__ == "mpi4dl_nb.engines.geometry.tiles"
    assert find_user_file("engines.geometry.tiles", sys.modules["engines.geometry.tiles"]) == ""


def test_in_a_repository_the_folder_itself_is_the_same_package(tmp_path):
    """Found first, before anything of `mpi4dl_nb` was imported."""
    code = "import engines.plan, mpi4dl_nb; print(engines.plan.Plan is mpi4dl_nb.Plan)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr


def test_a_command_takes_an_old_name_of_a_model():
    chosen = make_parser("").parse_args(["--model", "engines.models:resnet20_v1"])
    assert type(build_model(chosen)) is type(mpi4dl_nb.resnet20_v1())


def test_a_pickle_of_a_package_engines_of_the_users_is_theirs(tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "__init__.py").touch()
    (tmp_path / "engines" / "plan.py").write_text("class Plan:\n    pass\n")
    code = "import mpi4dl_nb, pickle; print(pickle.loads(b'cengines.plan\\nPlan\\n.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "<class 'engines.plan.Plan'>", done.stderr
