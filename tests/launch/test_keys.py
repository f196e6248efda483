"""Somebody else on the same machine, who lacks the key: can't read it, can't connect, can't listen, can't break it.

What listens beside the loopback interface is named here too: two ports of Open MPI's own mpiexec, which no setting of
it restricts: PRRTE's `create_listen` binds to any address; `prte_if_include` is for connections, and refuses `lo`.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from jupyter_client.session import Session
from zmq.utils.monitor import parse_monitor_message

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.launch import reaper_process

WAIT_S = 1.5
NOBODY = 65534


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def home(cluster) -> Path:
    return cluster._ranks._place.home


def list_family(home: Path) -> list[psutil.Process]:
    return list(reaper_process._find_marked(home.name))


def list_listeners(home: Path) -> set[tuple[str, str, int]]:
    """(program, address, port) of all that its processes listen on."""
    return {
        (process.name(), each.laddr.ip, each.laddr.port)
        for process in list_family(home)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def list_own_ports(home: Path) -> list[int]:
    """Those of the controller, the engines and their nannies."""
    return sorted(port for program, address, port in list_listeners(home) if program != "prterun")


def read_connection(home: Path, kind: str = "client") -> dict:
    (file,) = home.glob(f"security/*-{kind}.json")
    return json.loads(file.read_text())


@pytest.mark.nightly
def test_only_the_ports_of_mpiexec_are_open_to_other_machines(home):
    found = list_listeners(home)
    assert len(list_own_ports(home)) > 15
    beyond = [each for each in found if each[1] not in ("127.0.0.1", "::1")]
    assert {program for program, _, _ in beyond} <= {"prterun"}
    assert sorted(address for _, address, _ in beyond) in (["0.0.0.0", "::"], ["0.0.0.0"])  # without IPv6
    said = " ".join((Path(__file__).parents[2] / "docs" / "limits.md").read_text().split())
    assert "listens on two ports of all interfaces (IPv4 and IPv6)" in said


class Intruder:
    """A socket that speaks ZeroMQ to a port, and notes whether it was let in."""

    def __init__(self, context: zmq.Context, kind: int, port: int, server_key: bytes | None) -> None:
        self.socket = context.socket(kind)
        self.socket.LINGER = 0
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        if server_key:
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = server_key
        self._events = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, *frames: bytes) -> None:
        if self.socket.type != zmq.SUB:
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    @property
    def was_let_in(self) -> bool:
        events = []
        while self._events.poll(0):
            events.append(parse_monitor_message(self._events.recv_multipart())["event"])
        return zmq.EVENT_HANDSHAKE_SUCCEEDED in events

    @property
    def has_answer(self) -> bool:
        return bool(self.socket.poll(0))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._events.close()
        self.socket.close()


def serialize_message(kind: str, content: dict, key: bytes) -> list[bytes]:
    """A message as ipyparallel's own client would send it, signed with a key."""
    session = Session(key=key)
    return session.serialize(session.msg(kind, content))


def try_to_intrude(cluster: Cluster, ports: list[int], key: bytes | None, trap: Path) -> tuple[int, int]:
    """Ask for the connection and for the execution of code, at every port, and listen; (let in, answered)."""
    (engine,) = {cluster._ranks._client._engines[0]}
    code = {"code": f"open({str(trap)!r}, 'w')", "silent": False, "user_expressions": {}}
    messages = [
        serialize_message("connection_request", {}, b""),
        [engine.encode(), *serialize_message("execute_request", code, b"")],
        [engine.encode(), *serialize_message("execute_request", code, b"a wrong key")],
        serialize_message("execute_request", code, b""),
    ]
    with zmq.Context() as context:
        intruders = [Intruder(context, kind, port, key) for port in ports for kind in (zmq.DEALER, zmq.SUB)]
        for intruder in intruders:
            for message in messages:
                intruder.send(*message)
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            cluster.call(lambda host: print("a secret", flush=True))
        try:
            return sum(each.was_let_in for each in intruders), sum(each.has_answer for each in intruders)
        finally:
            for intruder in intruders:
                intruder.close()


@pytest.mark.nightly
@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0]], ids=["no key", "a key of one's own"])
def test_who_lacks_the_key_is_not_let_in_at_any_port(cluster, home, key, tmp_path):
    assert try_to_intrude(cluster, list_own_ports(home), key, tmp_path / "trap") == (0, 0)
    assert not (tmp_path / "trap").exists()
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2


def test_with_the_key_the_same_attempt_is_let_in_and_answered(cluster, home, tmp_path):
    """Or the tests above would show nothing."""
    known = read_connection(home)
    let_in, answered = try_to_intrude(
        cluster, [known["registration"]], known["curve_serverkey"].encode(), tmp_path / "trap"
    )
    assert (let_in, answered) == (1, 1)  # the registrar answers requests, and has nothing for those who listen


def test_noise_at_every_port_breaks_nothing(cluster, home):
    unanswered = set()
    for program, address, port in list_listeners(home):
        to = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET) as noise:
            noise.settimeout(1)
            try:
                noise.connect((to, port))
            except TimeoutError:  # mpiexec takes no connections any more once the ranks have joined
                unanswered.add(program)
                continue
            noise.sendall(os.urandom(4096))
    assert unanswered <= {"prterun"}
    time.sleep(0.5)
    assert cluster.call(lambda host: host.world.all_gather(host.world.rank)) == [[0, 1]] * 2


def test_the_key_is_in_files_that_nobody_else_may_read_and_in_no_command_line(home):
    files = list(home.glob("security/*.json"))
    assert len(files) == 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (home, home / "security")} == {0o700}
    key = read_connection(home)["curve_serverkey"]
    assert not any(key in word for process in list_family(home) for word in process.cmdline())


AS_NOBODY = """if True:
    import os, sys
    os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
    for path in sys.argv[1:]:
        try:
            print(path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
        except PermissionError:
            pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_read_neither_the_key_nor_the_folders(cluster, home):
    place, paths = cluster._ranks._place, [home, home / "security", *home.glob("security/*"), *home.glob("log/*")]
    paths += [place.memory, *place.memory.iterdir()]
    paths += [Path(f"/proc/{process.pid}/environ") for process in list_family(home)]  # where mpiexec passes it on
    paths += list(Path(os.environ.get("XDG_RUNTIME_DIR", Path.home() / ".cache"), "mpi4dl_nb").glob("*.json"))
    command = [sys.executable, "-S", "-c", AS_NOBODY.format(nobody=NOBODY), *map(str, paths), "/etc/passwd"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "/etc/passwd b'r'\n"
