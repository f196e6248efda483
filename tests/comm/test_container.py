"""A container's limits are what a process has, and where there is none it is the machine."""

from __future__ import annotations

import pytest

from mpi4dl_nb.engines.comm.device import count_cores, get_memory_bytes


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_has_the_memory_of_its_group(name: str, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("123456\n")
    assert get_memory_bytes(tmp_path, tmp_path / "own") == 123456
    path.write_text("max\n")
    assert get_memory_bytes(tmp_path) > 1 << 30
    assert get_memory_bytes(tmp_path / "nowhere") == get_memory_bytes(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "99900000 100000"}, None),
        ({}, None),
    ],
)
def test_a_container_has_the_cores_of_its_quota(files: dict[str, str], expected: int | None, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert count_cores(tmp_path, tmp_path / "own") == (expected or 4)


@pytest.mark.parametrize(
    ("told", "files", "expected"),
    [
        ("0::/jobs/7\n", {"jobs/7/memory.max": "500", "jobs/memory.max": "700"}, 500),
        ("0::/jobs/7\n", {"jobs/7/memory.max": "max", "jobs/memory.max": "700"}, 700),
        ("9:cpu:/x\n4:memory,hugetlb:/jobs/7\n0::/\n", {"memory/jobs/7/memory.limit_in_bytes": "500"}, 500),
        ("4:memory:/of/the/host\n", {"memory/memory.limit_in_bytes": "600"}, 600),
    ],
)
def test_the_group_may_lie_in_others(told: str, files: dict[str, str], expected: int, tmp_path):
    (tmp_path / "own").write_text(told)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert get_memory_bytes(tmp_path, tmp_path / "own") == expected
