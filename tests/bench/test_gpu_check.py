"""What a machine needs to check its GPU: torch, numpy and mpi4py, and nothing else of what is installed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

WITHOUT = '''
import sys

class Nowhere:
    """Finds nothing of these, as where they are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
from engines.command import main
sys.exit(main(sys.argv[1:]))
'''
ABSENT = {
    "IPython", "PIL", "anywidget", "cloudpickle", "greenlet", "imagecodecs", "ipykernel", "ipyparallel", "ipywidgets",
    "matplotlib", "openslide", "psutil", "safetensors", "skimage", "tifffile", "zarr",
}  # fmt: skip
SMALL = ("--model", "engines.models:resnet20_v1", "--image-size", 32, "--split-size", 1, "--slice-method", "1x2")


@pytest.fixture
def bare(tmp_path) -> Path:
    path = tmp_path / "bare.py"
    path.write_text(WITHOUT.format(names=ABSENT))
    return path


def test_without_a_gpu_it_says_so(bare, mpiexec):
    done = mpiexec(1, bare, "gpu-check")
    assert done.returncode == 0, done.stderr
    assert "There is no GPU" in done.stdout or json.loads(done.stdout.splitlines()[-1])["device"]


@pytest.mark.parametrize("command", [("verify",), ("bench", "step", "--iterations", 1), ("bench", "memory")])
def test_what_it_runs_needs_no_more(command, bare, mpiexec):
    done = mpiexec(2, bare, *command, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
