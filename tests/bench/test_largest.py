"""The largest image within a bound of memory: sizes are searched, and tried for real."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mpi4dl_nb.engines.bench.memory_limit import bench_largest, search_largest
from mpi4dl_nb.engines.errors import PlanError

# With less memory the size that fits depends on how the allocator happens to lay its blocks.
CHAIN = ("--model", "mpi4dl_nb.engines.models:chain", "--memory-mb", "128", "--step-px", "128", "--image-size", "512")
STRIPS = ("--split-size", "1", "--slice-method", "8x1")


@pytest.mark.parametrize("first", [64, 512, 4096])
@pytest.mark.parametrize("limit", [64, 100, 511, 512, 700, 4000])
def test_the_largest_size_and_the_next(first: int, limit: int):
    tries: list[int] = []

    def try_size(size: int) -> bool:
        tries.append(size)
        return size <= limit

    assert search_largest(try_size, first, 64, 4096) == (limit // 64 * 64, limit // 64 * 64 + 64)
    assert len(tries) == len(set(tries)) <= 14


def test_ends_of_the_search():
    assert search_largest(lambda size: True, 512, 64, 1000) == (960, None)
    assert search_largest(lambda size: False, 512, 64, 1000) == (0, 64)


@pytest.mark.nightly
def test_tiles_in_turn_train_larger_images(mpiexec):
    plain, in_turn = (
        json.loads(mpiexec(1, "-m", "mpi4dl_nb.engines", "bench", "largest", *CHAIN, *more, "--way", way).stdout)
        for way, more in (("plain", ()), ("in-turn", (*STRIPS, "--most-px", "2048")))
    )
    assert plain["next_px"] == plain["largest_px"] + 128
    assert plain["next_failure"]
    assert 10 * in_turn["largest_px"] >= 14 * plain["largest_px"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--step-px", "64", "--most-px", "32"), "less than one step of 64 px"),
        (("--image-size", "256x128"), "images are square here"),
        (("--way", "again", "--data-parallel", "2"), "2 ranks"),
        (("--way", "again", "--model", "mpi4dl_nb:resnet110_v2", "--memory-mb", "1"), "Not even 256 x 256 px"),
    ],
)
def test_what_cannot_be_tried_is_said(flags: tuple[str, ...], said: str):
    with pytest.raises(PlanError, match=said.replace("(", r"\(")):
        bench_largest(SimpleNamespace(size=1), [*CHAIN, "--step-px", "256", *STRIPS, *flags])
