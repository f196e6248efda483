"""The benchmark of sums: its sizes, and the lines that it prints."""

from __future__ import annotations

import json

import pytest
import torch

from mpi4dl_nb.engines.bench.communication import list_sizes, make_allreduce_parser
from mpi4dl_nb.engines.comm.nccl import connect_gloo
from mpi4dl_nb.engines.errors import PlanError


@pytest.mark.parametrize(
    ("most", "count", "last"), [(1, 1, 4), (4, 1, 4), (15, 1, 4), (16, 2, 16), (1 << 28, 14, 1 << 28)]
)
def test_sizes_are_powers_of_4(most: int, count: int, last: int):
    found = list_sizes(most)
    assert (len(found), found[0], found[-1]) == (count, 4, last)


def test_without_flags_it_goes_to_256_megabytes():
    assert make_allreduce_parser().parse_args([]).max_bytes == 256 << 20


@pytest.mark.parametrize("flag", ["--max-bytes", "--iterations"])
def test_counts_are_positive(flag: str):
    with pytest.raises(PlanError, match=flag):
        make_allreduce_parser().parse_args([flag, "0"])


class Alone:
    """A world of one."""

    rank, size = 0, 1

    def all_gather(self, value):
        return [value]


def test_gloo_among_one_rank_sums_and_ends():
    for _ in range(2):
        with connect_gloo(Alone()) as gloo:
            tensor = torch.ones(3)
            gloo(tensor)
        assert tensor.tolist() == [1, 1, 1]
        assert not torch.distributed.is_initialized()


def test_where_there_is_no_gloo(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with connect_gloo(Alone()) as gloo:
        assert gloo is None


@pytest.mark.nightly
def test_the_lines(mpiexec):
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", "bench", "allreduce", "--max-bytes", 1 << 18, "--iterations", 3)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["bytes"] for line in lines] == list_sizes(1 << 18)
    for line in lines:
        assert set(line) == {"bytes", "ours_ms", "raw_mpi_ms", "gloo_ms", "ratio_to_mpi", "spread"}
        assert min(line["ours_ms"], line["raw_mpi_ms"], line["gloo_ms"]) > 0
        assert line["ratio_to_mpi"] == pytest.approx(line["raw_mpi_ms"] / line["ours_ms"], abs=0.01)
