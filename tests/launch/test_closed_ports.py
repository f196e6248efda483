"""Nobody connects to mpiexec any more once its ranks have, and those that are connected notice nothing."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from mpi4dl_nb.launch.closed_ports import close_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets of other processes are Linux's")

# Listens on a port, accepts one connection, and echoes what comes through it.
SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
one, _ = server.accept()
while text := one.recv(100):
    one.sendall(text)
"""


def test_a_closed_port_takes_no_connection_and_keeps_those_that_it_has():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        try:
            address = ("127.0.0.1", int(server.stdout.readline()))
            with socket.create_connection(address, 5) as known:
                assert close_ports(psutil.Process(server.pid)) == 1
                with pytest.raises(TimeoutError):
                    socket.create_connection(address, 0.3)
                known.sendall(b"still here")
                assert known.recv(100) == b"still here"
        finally:
            server.kill()
