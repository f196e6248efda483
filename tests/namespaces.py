"""Hosts that are network namespaces of this machine: each with an address, a name, an ssh server and its own folders.

They hang on a bridge, as machines do on a switch; this machine is on it too. Root is needed, and `ip`, `unshare` and
`sshd`. All that was made goes again, and what a killed run has left goes when the next one begins.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_PREFIX = "m4d"  # names of interfaces have at most 15 characters
_HOMES = Path("/var/tmp")  # not /tmp: of that each host has its own
_PORT, _UP_S = 2200, 10.0
_SSHD = """
Port {port}
ListenAddress {address}
HostKey {home}/host_key_{name}
AuthorizedKeysFile {home}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
"""
_CLIENT = """
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {home}/key
  IdentitiesOnly yes
  UserKnownHostsFile {home}/known_hosts
  StrictHostKeyChecking yes
"""


def find_obstacle() -> str:
    """Why there can be no such hosts here, in a sentence; empty where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need root on Linux"
    if missing := [name for name in ("ip", "unshare", "mount", "ssh", "ssh-keygen") if not shutil.which(name)]:
        return f"there is no {missing[0]} (Debian: apt-get install iproute2 util-linux openssh-client)"
    if not _find_sshd():
        return "there is no sshd (Debian: apt-get install openssh-server)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this container may make no namespaces"


def _find_sshd() -> str | None:
    """It insists on being started by its whole path."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


class Namespaces:
    """`names` of the hosts; `ssh` is the command that reaches them by these."""

    def __init__(self, count: int) -> None:
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self.tag = f"{_PREFIX}{os.getpid()}"
        self.home = Path(tempfile.mkdtemp(prefix=f"{self.tag}-", dir=_HOMES))
        self._servers: list[subprocess.Popen[bytes]] = []
        self.net = _free_network()

    @property
    def ssh(self) -> str:
        """For MPI4DL_NB_SSH."""
        return f"ssh -F {self.home}/ssh_config"

    def get_address(self, name: str) -> str:
        """Of a host."""
        return f"{self.net}.{self.names.index(name) + 1}"

    def get_space(self, name: str) -> str:
        """Its network namespace."""
        return f"{self.tag}-{self.names.index(name) + 1}"

    def build(self) -> None:
        """Bridge, cables, hosts and their ssh servers. Raises RuntimeError if they do not come up."""
        _run_ip("link", "add", f"{self.tag}b", "type", "bridge")
        _run_ip("addr", "add", f"{self.net}.254/24", "dev", f"{self.tag}b")
        _run_ip("link", "set", f"{self.tag}b", "up")
        self._make_key("key")
        for name in self.names:
            self._connect_host(name)
            self._serve(name)
        deadline = time.monotonic() + _UP_S
        for name in self.names:
            while not _is_answering(self.get_address(name)):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"sshd of {name}: {(self.home / f'sshd_{name}.log').read_text()}")
                time.sleep(0.05)

    def _connect_host(self, name: str) -> None:
        space, cable = self.get_space(name), f"{self.tag}v{self.names.index(name) + 1}"
        _run_ip("netns", "add", space)
        _run_ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run_ip("link", "set", cable, "master", f"{self.tag}b", "up")
        _run_ip("-n", space, "addr", "add", f"{self.get_address(name)}/24", "dev", "eth0")
        _run_ip("-n", space, "link", "set", "lo", "up")
        self.set_link(name, up=True)

    def _make_key(self, file: str) -> str:
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / file))
        return " ".join((self.home / f"{file}.pub").read_text().split()[:2])

    def _serve(self, name: str) -> None:
        """Its own /tmp and /dev/shm, where the project does not lie there: hosts share no such folder."""
        facts = {"name": name, "address": self.get_address(name), "port": _PORT, "home": self.home}
        public = self._make_key(f"host_key_{name}")
        with (self.home / "known_hosts").open("a") as known:
            known.write(f"[{facts['address']}]:{_PORT} {public}\n")
        with (self.home / "ssh_config").open("a") as client:
            client.write(_CLIENT.format(**facts))
        settings = self.home / f"sshd_{name}"
        settings.write_text(_SSHD.format(**facts))
        shared = {str(self.home), str(ROOT), sys.prefix, str(Path.cwd())}
        own = [folder for folder in ("/tmp", "/dev/shm") if not any(each.startswith(f"{folder}/") for each in shared)]
        steps = [f"hostname {name}", *(f"mount -t tmpfs tmpfs {folder}" for folder in (*own, "/run"))]
        script = " && ".join([*steps, "mkdir -p /run/sshd", f"exec {_find_sshd()} -D -e -f {settings}"])
        command = ["ip", "netns", "exec", self.get_space(name), "unshare", "--uts", "--mount", "sh", "-c", script]
        with (self.home / f"sshd_{name}.log").open("wb") as log:
            self._servers.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def set_link(self, name: str, up: bool) -> None:
        """Plug its cable in, or pull it."""
        _run_ip("-n", self.get_space(name), "link", "set", "eth0", "up" if up else "down")

    def list_processes(self, name: str) -> list[psutil.Process]:
        """What runs there, its ssh server aside."""
        found = []
        for pid in _list_pids(self.get_space(name)):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and "sshd" not in process.name():
                    found.append(process)
        return found

    def remove(self) -> None:
        """All of it."""
        _remove(self.tag)
        for server in self._servers:
            server.kill()
            server.wait()


@contextmanager
def open_namespaces(count: int) -> Iterator[Namespaces]:
    """So many hosts while it lasts; this process and those that it starts reach them by ssh meanwhile."""
    for tag in _list_tags_left():
        _remove(tag)
    hosts, before = Namespaces(count), os.environ.get("MPI4DL_NB_SSH")
    try:
        hosts.build()
        os.environ["MPI4DL_NB_SSH"] = hosts.ssh
        yield hosts
    finally:
        os.environ.pop("MPI4DL_NB_SSH", None)
        if before is not None:
            os.environ["MPI4DL_NB_SSH"] = before
        hosts.remove()


def _free_network() -> str:
    """Of this machine's networks none begins so."""
    taken = _run_ip("-o", "addr")
    return next(net for third in range(7, 250) if f" {(net := f'10.213.{third}')}." not in taken)


def _list_tags_left() -> set[str]:
    """Tags of runs that were killed before they could tidy up."""
    known = re.findall(rf"\b({_PREFIX}(\d+))(?:-\d+|v\d+|b)\b", _run_ip("netns", "list") + _run_ip("-o", "link"))
    return {tag for tag, pid in known if not psutil.pid_exists(int(pid))}


def _remove(tag: str) -> None:
    for link in re.findall(rf"\b({tag}(?:v\d+|b))[@:]", _run_ip("-o", "link")):
        _run_ip("link", "del", link)
    for space in re.findall(rf"^{tag}-\d+", _run_ip("netns", "list"), re.MULTILINE):
        for pid in _list_pids(space):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _run_ip("netns", "del", space)
    for folder in _HOMES.glob(f"{tag}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _list_pids(space: str) -> list[int]:
    return [int(pid) for pid in _run_ip("netns", "pids", space).split()]


def _is_answering(address: str) -> bool:
    try:
        socket.create_connection((address, _PORT), 1).close()
    except OSError:
        return False
    return True


def _run_ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
