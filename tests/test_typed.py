"""The package is typed: a user's script is checked by mypy in strict mode against it, right and wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpi4dl_nb

ROOT = Path(__file__).parents[1]
RIGHT = """
import torch
from mpi4dl_nb import Cluster, Plan, PlanError, Slicer, Training, format_bytes, resnet20_v1, show_timeline

try:
    plan = Plan(split_size=2, spatial_size=1, num_spatial_parts=4, slice_method="square")
except PlanError as error:
    print(error)
ranks: int = plan.ranks
with Cluster(ranks, backend="loopback") as cluster:
    training = Training(resnet20_v1(), plan, cluster, image_shape=(2, 3, 64, 96))
    loss: float = training.step(torch.randn(2, 3, 64, 96), torch.tensor([3, 7]))
    show_timeline(training.timeline(), plan).to_png()
Slicer(torch.rand(3, 64, 64), plan)
text: str = format_bytes(3)
"""
WRONG = """from mpi4dl_nb import Plan, Slicr
Plan(split_size="two")
text: str = Plan(split_size=1).ranks
"""


def test_the_package_says_that_it_is_typed():
    assert (Path(mpi4dl_nb.__file__).parent / "py.typed").exists()


@pytest.mark.nightly
def test_a_users_script_is_checked(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "right.py", "wrong.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = re.findall(r"^(\w+\.py:\d+): error: .*\[([\w-]+)\]$", done.stdout, flags=re.MULTILINE)
    expected = [("wrong.py:1", "attr-defined"), ("wrong.py:2", "arg-type"), ("wrong.py:3", "assignment")]
    assert errors == expected, done.stdout
