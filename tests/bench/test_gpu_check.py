"""What a machine needs to check its GPU: torch, numpy and mpi4py, and nothing else of what is installed here."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mpi4dl_nb.engines.bench.gpu_check import CHECKS, LINK_BYTES, measure_link_speeds
from mpi4dl_nb.engines.bench.halo import make_halo_case, make_halo_parser
from mpi4dl_nb.engines.bench.memory_limit import make_largest_parser
from mpi4dl_nb.engines.cli import command, options

WITHOUT = '''
import sys

class Nowhere:
    """Finds nothing of these, as where they are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
from mpi4dl_nb.engines.cli.command import main
sys.exit(main(sys.argv[1:]))
'''
ABSENT = {
    "IPython", "PIL", "anywidget", "cloudpickle", "greenlet", "imagecodecs", "ipykernel", "ipyparallel", "ipywidgets",
    "matplotlib", "openslide", "psutil", "safetensors", "skimage", "tifffile", "zarr",
}  # fmt: skip
SMALL = ("--model", "mpi4dl_nb:resnet20_v1", "--image-size", 32, "--split-size", 1, "--slice-method", "1x2")


@pytest.fixture
def bare(tmp_path) -> Path:
    path = tmp_path / "bare.py"
    path.write_text(WITHOUT.format(names=ABSENT))
    return path


@pytest.mark.nightly
def test_without_a_gpu_it_says_so(bare, mpiexec):
    done = mpiexec(1, bare, "gpu-check")
    assert done.returncode == 0, done.stderr
    assert "There is no GPU" in done.stdout or json.loads(done.stdout.splitlines()[-1])["device"]


def parse_flags(command: Sequence[str]) -> Namespace:
    match list(command):
        case ["bench", "halo", *rest]:
            return Namespace(**vars(make_halo_case(make_halo_parser().parse_args(rest)).plan))
        case ["bench", "largest", *rest]:
            return make_largest_parser().parse_args(rest)
        case ["bench", "step" | "compiled", *rest]:
            return options.make_parser("", iterations=5).parse_args(rest)
        case ["bench", "memory", *rest] | ["verify", *rest]:
            return options.make_parser("").parse_args(rest)
    raise AssertionError(command)


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_is_a_command_for_its_ranks(name: str):
    ranks, command = CHECKS[name]
    chosen = parse_flags(command)
    assert getattr(chosen, "way", "") == "in-turn" or options.make_plan(chosen).ranks == ranks


def test_the_link_is_faster_than_nothing():
    assert all(speed > LINK_BYTES for speed in measure_link_speeds(torch.device("cpu")).values())


def test_a_check_that_is_not_there_is_named(capsys):
    assert command.main(["gpu-check", "--only", "slow"]) == 2
    assert "No check begins with slow. There are link, exact, ResNet-20" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", [("verify",), ("bench", "step", "--iterations", 1), ("bench", "memory")])
def test_what_it_runs_needs_no_more(command, bare, mpiexec):
    done = mpiexec(2, bare, *command, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
