"""The folders of a cluster's files on this machine, which only this user can read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.launch import host_agent
from mpi4dl_nb.launch.reaper_process import MARK, end_cluster, get_start_time, remove_paths

PREFIX = "mpi4dl_nb-"
_FILES_BYTES = 4 << 20  # keys, logs and files of MPI's runtime
_VARIABLE = re.compile(r"\$(\w|\{)")


# What a cluster has on disk while it runs:
#
#     home      /tmp/mpi4dl_nb-ab12cd34        connection files with their keys, MPI's session (ompi.*)
#     memory    /dev/shm/mpi4dl_nb-ab12cd34    the segments through which the ranks send messages
#     record    .../mpi4dl_nb-ab12cd34.json    the pids of its processes (`PidFile`)


@dataclass(frozen=True)
class RunDirectory:
    """Folders of a cluster: `home` for keys, logs and MPI's files, `memory` for the ranks' shared memory.

    Both are removed with the cluster. Where MPI would put them, under its own names in /tmp and /dev/shm, they would
    remain if the cluster is killed.
    """

    home: Path
    memory: Path

    @classmethod
    def make(cls, n: int) -> RunDirectory:
        """Create the folders for `n` ranks. Raises RankError if there is no room or no permission to write.

        Raises it also if the name would be another one for IPython, which replaces variables in its folders' names.
        """
        if _VARIABLE.search(tempfile.gettempdir()):
            raise RankError(
                f"The name of the folder for temporary files, {tempfile.gettempdir()}, contains a variable, which "
                "IPython replaces by its value. Set TMPDIR to a folder without $ before Python starts."
            )
        home = None
        try:
            home = Path(tempfile.mkdtemp(prefix=PREFIX))
            # A file of the usual size must fit: on a full disk the controller would fail later, without saying why.
            with tempfile.TemporaryFile(dir=home) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, _FILES_BYTES)
                else:  # macOS
                    file.write(bytes(_FILES_BYTES))
        except OSError as error:
            if home is not None:
                remove_paths([home])
            raise RankError(
                f"There is no place for the files of the cluster: {error.strerror or error} "
                f"({home or tempfile.gettempdir()}; {format_bytes(_FILES_BYTES)} are needed). "
                "Make room there, or set TMPDIR to a folder that can be written, before Python starts."
            ) from None
        return cls(home, Path(host_agent.make_memory_folder(str(home), n)))

    @property
    def folders(self) -> list[Path]:
        """Both folders, or one if they are the same."""
        return list(dict.fromkeys([self.home, self.memory]))

    @property
    def name(self) -> str:
        """The unique name of the cluster."""
        return self.home.name

    def make_environment(self, alone: bool = True) -> dict[str, str]:
        """Return the environment that marks the cluster's processes. `alone`: they all run on this machine."""
        # By default PyTorch runs the compiled code that it finds in /tmp/torchinductor_USER, whoever has made that.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(self.home / "torchinductor")
        # IPYTHONDIR is not the user's, which may be missing.
        ours = {MARK: self.name, "IPYTHONDIR": str(self.home), "TORCHINDUCTOR_CACHE_DIR": compiled}
        if not alone:
            return ours
        return {
            # Only on this machine: other hosts do not have these folders.
            **ours,
            "PRTE_MCA_prte_tmpdir_base": str(self.home),
            "OMPI_MCA_btl_sm_backing_directory": str(self.memory),
            # Ranks on one machine communicate through shared memory: they should open no port for others to find.
            "OMPI_MCA_btl": os.environ.get("OMPI_MCA_btl", "^tcp"),  # noqa: SIM112 (so it is called)
        }


# Records of running clusters, by which the next start finds those whose notebook was killed.


_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class PidFile:
    """Record of a cluster: its name, its folders, and its processes as (pid, start time), the notebook first.

    `host`, `boot` and `pids` identify the machine, its boot and the pid namespace in which the numbers are valid.
    """

    name: str
    folders: tuple[str, ...]
    processes: tuple[tuple[int, float], ...]
    host: str
    boot: str
    pids: str

    @classmethod
    def of(cls, place: RunDirectory, *pids: int) -> PidFile:
        """Return the record of a cluster of this notebook with these processes."""
        processes = []
        for pid in (os.getpid(), *pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append((pid, get_start_time(pid)))
        return cls(place.name, (str(place.home), str(place.memory)), tuple(processes), *_identify_machine())

    @classmethod
    def read(cls, path: Path) -> PidFile:
        """Read a record. Raises ValueError if the file is none. Its content is not trusted."""
        # The folder is this user's own, but a record may still be replaced by a link to a device or a pipe, which
        # would not end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            fields = json.loads(file.read(_MOST_BYTES))
        try:
            record = cls(**fields)
            processes = tuple((int(pid), float(began)) for pid, began in record.processes)
            texts = (record.name, record.host, record.boot, record.pids, *record.folders)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{path} is no record of a cluster: {error}") from None
        if not processes or not all(isinstance(text, str) for text in texts) or not _NAME.fullmatch(record.name):
            raise ValueError(f"{path} is no record of a cluster")
        return cls(record.name, tuple(record.folders), processes, record.host, record.boot, record.pids)

    def write(self) -> Path | None:
        """Store the record and return its path; None if there is no safe folder."""
        folder = _find_runtime_folder()
        if folder is None:
            return None
        path = folder / f"{self.name}.json"
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(json.dumps(asdict(self)).encode())
            file.flush()
            Path(file.name).replace(path)
        return path

    def is_stale(self) -> bool:
        """Return whether the notebook of the cluster is certainly gone."""
        host, boot, pids = _identify_machine()
        if host != self.host or (boot == self.boot and pids != self.pids):
            return False  # another machine or container with the same home
        return boot != self.boot or not _is_same_process(*self.processes[0])

    def clean(self) -> None:
        """End what is left: processes with the cluster's marker, or of this user with a recorded pid and start time."""
        # After a new boot all pids are those of others; and a pid may be used again, but not with its start time.
        others = []
        for pid, began in self.processes if self.boot == _identify_machine()[1] else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                others += [psutil.Process(pid)] * _is_same_process(pid, began)
        end_cluster(self.name, others)
        remove_paths(path for path in map(Path, self.folders) if _is_own_folder(path) and _NAME.fullmatch(path.name))


def remove_stale_clusters() -> list[str]:
    """Clean up after this user's clusters whose notebook is gone, and return their names."""
    swept = []
    for path in sorted((_find_runtime_folder() or Path(os.devnull)).glob("*.json")):
        try:
            record = PidFile.read(path)
        except OSError:
            continue
        except (ValueError, RecursionError):  # damaged, and of no use to anyone
            remove_paths([path])
            continue
        if record.is_stale():
            record.clean()
            remove_paths([path])
            swept.append(record.name)
    return swept


def _find_runtime_folder() -> Path | None:
    """Return a folder that only this user can access, created if missing; None if there is none."""
    wishes = [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"]
    parents = [Path(os.path.expanduser(wish)) for wish in wishes]  # noqa: PTH111 (Path's raises where there is no home)
    for folder in (parent / "mpi4dl_nb" for parent in parents if parent.is_absolute()):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_own_folder(folder) and not stat.S_IMODE(folder.stat().st_mode) & 0o077:
                return folder
    return None


def _is_own_folder(folder: Path) -> bool:
    """Return whether a path is a folder of this user, and no symbolic link."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_same_process(pid: int, began: float) -> bool:
    """Return whether the process with this pid and start time still runs as this user."""
    try:
        return get_start_time(pid) == began and psutil.Process(pid).uids().real == os.getuid()
    except psutil.Error:
        return False


def _identify_machine() -> tuple[str, str, str]:
    """Return the host name, the boot id and the pid namespace."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return (
        socket.gethostname(),
        boot.read_text(encoding="utf-8").strip() if boot.exists() else str(psutil.boot_time()),
        str(pids.readlink()) if pids.exists() else "",
    )
