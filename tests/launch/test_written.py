"""What a cluster's processes write: nothing of it is lost, only the end of it is kept, and no file of it grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.launch import process_output
from mpi4dl_nb.launch.process_output import ProcessOutput


def run(output: ProcessOutput, code: str) -> None:
    """As a launcher of ipyparallel does: it opens the path to append."""
    try:
        with Path(output.path).open("ab") as file:
            subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    finally:
        output.begin()


def test_every_line_is_reported_and_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(process_output, "_KEPT_BYTES", 1000)
    told: list[bytes] = []
    output = ProcessOutput(told.append)
    run(output, "for i in range(3000): print(i)")  # what the pipe holds: nobody reads meanwhile
    assert output.end.endswith("\n2998\n2999\n")
    assert len(output.end) == 1000
    assert [*map(int, told)] == [*range(3000)]


def test_a_line_without_an_end_takes_no_memory(monkeypatch):
    monkeypatch.setattr(process_output, "_KEPT_BYTES", 1000)
    told: list[bytes] = []
    output = ProcessOutput(told.append)
    output.begin()
    assert output.end == ""

    output = ProcessOutput(told.append)
    writer = Path(output.path).open("ab", buffering=0)  # noqa: SIM115 (read meanwhile)
    output.begin()
    with writer:
        for _ in range(100):
            writer.write(b"x" * 5000)
        writer.write(b"end\n")
    assert output.end == "x" * 996 + "end\n"
    assert len(told) == 1
    assert len(told[0]) < 1000 + 2 * process_output._PART_BYTES


def count_stored_bytes(folder: Path) -> int:
    """Of all files in it, and in the folders in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.nightly
def test_the_folder_of_a_cluster_does_not_grow_with_its_calls():
    def print_and_gather(host):
        print("a line of a rank")
        return host.world.all_gather(host.world.rank)

    with Cluster(2, output=False) as cluster:
        cluster.call(print_and_gather)
        before = count_stored_bytes(cluster._ranks._place.home)
        for _ in range(50):
            cluster.call(print_and_gather)
        assert count_stored_bytes(cluster._ranks._place.home) == before
        assert len(cluster._ranks._launchers[0].get_output()) < 2000  # nor is it told what nobody reads
