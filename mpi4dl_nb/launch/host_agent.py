"""A small process on each host for the lifetime of the cluster. The text of this file is all that is sent there.

The process reports what the host has, holds the connection file in a folder that only its user can read, and answers
heartbeats. If they cease, it ends the remaining ranks and removes the folder. Requests and replies are lines of JSON.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = ("mpi4dl_nb", "mpi4py", "ipyparallel", "torch")
_CONNECT_S, _ASKED_S = 5.0, 20.0
_SHARED_MEMORY = "/dev/shm"
_SEGMENT_BYTES = 17 << 20  # Open MPI maps 16 MiB for each rank, and some more pages


def collect_facts(order: dict) -> dict:
    """Return the host's facts.

    `order` has the working `folder`, the `mpiexec`, an address to reach (`towards`), and `paths` to search for modules.
    """
    sys.path[1:1] = order["paths"]  # as if they were in PYTHONPATH
    address = find_own_address(order["towards"])
    return {
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "versions": collect_versions(order["mpiexec"]),
        "has_folder": os.access(order["folder"], os.X_OK),
        "network": find_network(address),
        "home": os.environ.get("HOME"),
    }


def collect_versions(mpiexec: str) -> dict:
    """Return the versions that must be alike on all hosts; our own code is identified by a hash."""
    versions: dict[str, str | None] = {"Python": sys.version.split()[0], "code of mpi4dl_nb": None, "MPI": None}
    spec = importlib.util.find_spec("mpi4dl_nb")
    if spec is not None and spec.origin:
        # The version number stays the same while someone works on the code; ranks of two states of it could hang.
        home, code = Path(spec.origin).parent / "engines", hashlib.sha256()
        for file in sorted(home.rglob("*.py")):
            code.update(str(file.relative_to(home)).encode() + b"\0" + file.read_bytes())
        versions["code of mpi4dl_nb"] = code.hexdigest()[:12]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = run_program([mpiexec, "--version"], _ASKED_S, HOME=os.devnull)  # MPI reads no settings from there
        versions["MPI"] = next(iter(done.stdout.strip().splitlines()), None)
    for name in _PACKAGES:
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def run_program(command: "Sequence[str]", within_s: float, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, and return its exit code and its output. `variables` are added to the environment.

    Raises OSError if it cannot be run, and subprocess.TimeoutExpired.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **variables},
        timeout=within_s,
        check=False,
    )


def find_own_address(towards: str) -> "str | None":
    """Return the address of the interface that routes to `towards`; no packet is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def find_network(address: "str | None") -> "str | None":
    """Return the network of an address of this host, such as `10.0.0.0/24`."""
    import ipaddress

    if address is None:
        return None
    try:
        import psutil
    except ImportError:
        return None
    for known in psutil.net_if_addrs().values():
        for interface in known:
            if interface.address == address and interface.netmask and ":" not in address:
                return str(ipaddress.ip_network(f"{address}/{interface.netmask}", strict=False))
    return None


def write_files(home: str, order: dict) -> str:
    """Write the files of `order`, readable by their owner only. Return why the controller is unreachable, or ""."""
    for name, text in order["files"].items():
        path = Path(home, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Created with these permissions: a file whose permissions are changed later could be read in between.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    try:
        socket.create_connection(order["controller"], _CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""


class _LineReader:
    """Reads lines from standard input with a timeout."""

    def __init__(self) -> None:
        self.pending, self.ready = b"", selectors.DefaultSelector()
        self.ready.register(0, selectors.EVENT_READ)

    def read_line(self, within_s: float) -> "bytes | None":
        """Return the next line; None at the end of the input or after the timeout."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self.pending:
            if not self.ready.select(max(0.0, deadline - time.monotonic())):
                return None
            read = os.read(0, 1 << 16)
            if not read:
                return None
            self.pending += read
        line, _, self.pending = self.pending.partition(b"\n")
        return line


def make_memory_folder(home: str, ranks: int) -> str:
    """Return a folder in shared memory for `ranks` ranks, or `home` if there is too little room: ranks would crash."""
    # Docker gives a container 64 MiB of shared memory unless told otherwise, enough for three ranks.
    memory = Path(_SHARED_MEMORY, Path(home).name)
    try:
        room = os.statvfs(_SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < ranks * _SEGMENT_BYTES:
            return home
        memory.mkdir(mode=0o700)
    except OSError:
        return home
    return str(memory)


def _send(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def main() -> None:
    """Serve requests until the input ends or is silent for too long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are for the ranks
    for signal_number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: sys.exit(1))  # sent by batch systems: exit through the cleanup
    # 60 s for the first order; after that the notebook says how long it may be silent.
    lines, silence_s = _LineReader(), 60.0
    home = memory = tempfile.mkdtemp(prefix="mpi4dl_nb-")
    try:
        while (line := lines.read_line(silence_s)) is not None:
            order = json.loads(line)
            if order["do"] == "tell":
                silence_s = order["silence_s"]
                memory = make_memory_folder(home, order["ranks"])
                _send(facts=collect_facts(order), home=home, memory=memory)
            elif order["do"] == "arm":
                _send(unreachable=write_files(home, order))
            else:
                _send(beat=order["beat"])
    except OSError:
        pass  # the other side is gone
    finally:
        # End the cluster's remaining processes here, which have its folder in their environment.
        mark = b"=" + home.encode() + b"\0"
        for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
        for folder in (memory, home):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
