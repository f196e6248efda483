"""Images per second in the field's own lines."""

from __future__ import annotations

import json
import re

import pytest

from mpi4dl_nb.engines.bench.step import bench_throughput, make_throughput_parser, make_throughput_recipe
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan

TINY = ("--model", "resnet_v1", "--num-layers", "8", "--image-size", "16", "--batch-size", "4", "--num-classes", "10")


def test_each_rank_is_a_replica_unless_the_flags_say():
    flags = make_throughput_parser().parse_args([])
    assert (flags.model, flags.image_size, flags.num_classes, flags.batch_size) == ("resnet50", "224", 1000, 32)
    flags = make_throughput_parser().parse_args(TINY)
    assert make_throughput_recipe(flags, 1).plan == Plan(split_size=1, spatial_size=0, data_parallel=1)
    tiles = make_throughput_parser().parse_args([*TINY, "--split-size", "2", "--spatial-size", "1"])
    assert make_throughput_recipe(tiles, 5).plan == Plan(split_size=2, spatial_size=1)
    with pytest.raises(PlanError):
        make_throughput_recipe(make_throughput_parser().parse_args([*TINY, "--data-parallel", "1"]), 2)


def hide_speeds(text: str) -> list[str]:
    return [re.sub(r"\d+\.\d", "9.9", line) for line in text.splitlines()]


LINES = [
    "Model: resnet_v1",
    "Batch size: 4",
    "Number of CPUs: 1",
    "Running warmup...",
    "Running benchmark...",
    "Iter #0: 9.9 img/sec per CPU",
    "Iter #1: 9.9 img/sec per CPU",
    "Img/sec per CPU: 9.9 +-9.9",
    "Total img/sec on 1 CPU(s): 9.9 +-9.9",
]


@pytest.mark.nightly
def test_the_familiar_lines(mpiexec):
    counts = ("--warmup", 1, "--num-iters", 2, "--num-batches-per-iter", 2, "--device", "cpu")
    done = mpiexec(1, "-m", "mpi4dl_nb.engines", "bench", "throughput", *TINY, *counts)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert hide_speeds("\n".join(lines)) == LINES
    line = json.loads(last)
    assert (line["model"], line["device"], line["ranks"], line["images_per_step"]) == ("resnet_v1", "CPU", 1, 4)
    assert (
        line["images_per_s_total"] == line["images_per_s_each"] == pytest.approx(sum(line["iterations"]) / 2, abs=1e-3)
    )


def test_ranks_that_share_an_image_share_its_speed():
    flags = make_throughput_parser().parse_args([*TINY, "--split-size", "2", "--spatial-size", "1", "--device", "cpu"])
    recipe = make_throughput_recipe(flags, 5)
    lines = run_ranks(5, lambda world: bench_throughput(world, recipe, "tiny", 1, 2, 1, seed=0))
    assert all(line == lines[0] for line in lines)
    assert lines[0]["images_per_s_total"] == pytest.approx(5 * lines[0]["images_per_s_each"], abs=1e-3)
    assert options.make_plan(flags).ranks == lines[0]["ranks"] == 5
