"""Ranks read a picture, each its own tile: exactly the pixels of one read, and not more than its share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi4dl_nb.engines.bench.read import ALLOWED_BYTES, bench_read
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import ImageError, PlanError
from tests.images.made_slides import find_shared, make_tissue, write_svs


def get_slide(folder: Path) -> Path:
    """The user's slide, or a generated one of about its size."""
    try:
        return find_shared("CMU-1-Small-Region.svs")
    except pytest.skip.Exception:
        write_svs(folder / "a.svs", make_tissue(2967, 2220), tile=240)
        return folder / "a.svs"


@pytest.mark.nightly
def test_four_ranks_read_the_pixels_of_one_read_with_a_quarter_of_the_memory(mpiexec, tmp_path):
    done = mpiexec(4, "-m", "mpi4dl_nb.engines", "bench", "read", get_slide(tmp_path))
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["same_pixels"]
    assert line["ok"]
    assert sum(line["bytes_read"]) == line["picture_bytes"] == 2967 * 2220 * 3
    assert max(line["bytes_read"]) == line["largest_part_bytes"] < line["picture_bytes"] / 3.9
    assert max(line["peak_bytes"]) <= line["picture_bytes"] / 4 + ALLOWED_BYTES


@pytest.mark.parametrize(("method", "halo_px", "level"), [("square", 0, 0), ("1x4", 7, 0), ("horizontal", 3, 1)])
def test_with_halos_and_on_any_level(tmp_path, method, halo_px, level):
    """A level of 401 / 4 rows too, whose pixels are no whole numbers of level 0's."""
    write_svs(tmp_path / "a.svs", make_tissue(401, 502), tile=64)
    lines = run_ranks(4, lambda world: bench_read(world, str(tmp_path / "a.svs"), method, halo_px, level))
    assert lines[0]["same_pixels"]
    assert lines[0]["shape"] == [[401, 502], [100, 125]][level]
    if not halo_px:
        assert sum(lines[0]["bytes_read"]) == lines[0]["picture_bytes"]


def test_other_pixels_would_be_reported(tmp_path, monkeypatch):
    write_svs(tmp_path / "a.svs", make_tissue(200, 200), tile=64)
    monkeypatch.setattr(
        "mpi4dl_nb.engines.bench.read._compute_digest", lambda pixels, seen=[]: seen.append(0) or str(len(seen))
    )
    (line,) = run_ranks(1, lambda world: bench_read(world, str(tmp_path / "a.svs")))
    assert not line["same_pixels"]
    assert not line["ok"]


def test_what_cannot_be_read_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "a.svs").write_text("no slide")

    def read_error(world: object) -> str:
        with pytest.raises(ImageError) as caught:
            bench_read(world, str(tmp_path / "a.svs"))
        return str(caught.value)

    assert len(set(run_ranks(4, read_error))) == 1
    with pytest.raises(PlanError, match="halo_px=-1"):
        run_ranks(1, lambda world: bench_read(world, "a.png", halo_px=-1))
