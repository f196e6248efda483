"""Another user of the machine gets nothing into a running cluster and nothing out of it. Needs root to be two users."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mpi4dl_nb.cluster.cluster import Cluster

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("useradd") is None, reason="two users need root"
)
USER = "m4d-other"

# Runs as the other user: its Python was started by root, whose own may lie in a closed folder. Prints what it got.
ATTACK = """
import encodings.idna, json, os, pathlib, socket, sys
socket.getaddrinfo("127.0.0.1", 9)
user, folders, pids, ports = json.loads(sys.argv[1])
os.setgroups([]), os.setgid(user[1]), os.setuid(user[0])
got = []
for folder in folders:
    for act in (lambda: os.listdir(folder), lambda: pathlib.Path(folder, "planted").touch()):
        try:
            act()
            got.append(f"a way into {folder}")
        except PermissionError:
            pass
for pid in pids:
    for name in ("environ", "mem", "fd/0"):
        try:
            open(f"/proc/{pid}/{name}", "rb").read(1)
            got.append(f"{name} of {pid}")
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        got.append(f"a signal to {pid}")
    except OSError:
        pass
mechanisms, reached = [], []
for port in ports:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5) as line:
            reached.append(port)
            line.settimeout(0.5)
            # The greeting of ZeroMQ without keys. The other side says what it asks for once it knows the version.
            line.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00")
            greeting = line.recv(64)
            while len(greeting) < 64 and (more := line.recv(64)):
                greeting += more
            mechanisms.append(greeting[12:32].rstrip(b"\\0").decode())
            line.sendall(b"NULL".ljust(20, b"\\0") + bytes(32))
            got += [f"an answer of port {port}"] * bool(line.recv(1))
    except OSError:
        pass
print(json.dumps([got, mechanisms, reached]))
"""


@pytest.fixture
def other() -> Iterator[tuple[int, int]]:
    """The ids of another user, who is removed afterwards."""
    subprocess.run(["userdel", USER], check=False, capture_output=True)  # of a run that was killed
    subprocess.run(["useradd", "-M", "-d", "/nonexistent", "-s", "/bin/sh", USER], check=True, capture_output=True)
    try:
        found = subprocess.run(["id", "-u", USER], check=True, capture_output=True, encoding="utf-8").stdout
        group = subprocess.run(["id", "-g", USER], check=True, capture_output=True, encoding="utf-8").stdout
        yield int(found), int(group)
    finally:
        subprocess.run(["userdel", USER], check=False, capture_output=True)


@pytest.fixture
def shared(other, monkeypatch) -> Iterator[Path]:
    """A folder for temporary files where everyone may write, in which the other user has planted settings of MPI."""
    folder = Path(tempfile.mkdtemp(prefix="m4d-shared-"))
    folder.chmod(0o1777)
    for name, text in {".openmpi": "pml = nosuch", ".prte": "ess = nosuch", ".pmix": "gds = nosuch"}.items():
        (folder / name).mkdir()
        (folder / name / "mca-params.conf").write_text(f"{text}\n", encoding="utf-8")
        for path in (folder / name, folder / name / "mca-params.conf"):
            os.chown(path, *other)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", str(folder))  # as it was for a user without a home
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run_attack(ids: tuple[int, int], cluster: Cluster) -> tuple[list[str], list[str], list[int]]:
    """Return what the other user got from a cluster, what guards its ports of ZeroMQ, and the ports it connected to."""
    place = cluster._ranks._place
    family = [each for each in psutil.Process().children(recursive=True) if each.is_running()]
    listening = {
        found.laddr.port
        for each in family
        for found in each.net_connections(kind="tcp")
        if found.status == psutil.CONN_LISTEN
    }
    folders = [*map(str, place.folders), str(place.home / "security")]
    told = json.dumps([ids, folders, [each.pid for each in family], sorted(listening)])
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, told], capture_output=True, encoding="utf-8", check=False, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_another_user_gets_nothing_in_and_nothing_out(other, shared):
    with Cluster(2) as cluster:
        got, mechanisms, reached = run_attack(other, cluster)
        assert not got
        assert set(mechanisms) == {"CURVE"}
        assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2
        (mpi,) = [each for each in psutil.Process().children() if each.name() in ("mpiexec", "prterun")]
        ports = {found.laddr.port for found in mpi.net_connections(kind="tcp") if found.status == psutil.CONN_LISTEN}
        assert ports
        assert not ports.intersection(reached)
    assert not list(shared.glob("mpi4dl_nb-*"))
