"""Where a cluster keeps its files: folders that only this user can read, on this machine."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.errors import RankError
from mpi4dl_nb.launch.reaper_process import MARK, remove_paths

__all__ = ["PREFIX", "RunDirectory"]

PREFIX = "mpi4dl_nb-"
_SHARED_MEMORY = Path("/dev/shm")
_FILES_BYTES = 4 << 20  # keys, logs, the files of MPI's runtime
_SEGMENT_BYTES = 17 << 20  # Open MPI maps 16 MiB for each rank, and some pages more


@dataclass(frozen=True)
class RunDirectory:
    """`home` holds keys, logs and the files of MPI's runtime; `memory` what the ranks share. Both go with the cluster.

    As MPI would put them, under names of its own in /tmp and /dev/shm, they stay behind when it is killed.
    """

    home: Path
    memory: Path

    @classmethod
    def make(cls, n: int) -> RunDirectory:
        """The folders for `n` ranks. Raises RankError where there is no room, or nothing may be written."""
        home = None
        try:
            home = Path(tempfile.mkdtemp(prefix=PREFIX))
            _check_room(home)
        except OSError as error:
            if home is not None:
                remove_paths([home])
            raise RankError(
                f"There is no place for the files of the cluster: {error.strerror or error} "
                f"({home or tempfile.gettempdir()}; {_FILES_BYTES >> 20} MiB are needed). "
                "Make room there, or set TMPDIR to a folder that can be written, before Python starts."
            ) from None
        return cls(home, _make_memory_folder(home, n))

    @property
    def folders(self) -> list[Path]:
        """Both, or the one."""
        return list(dict.fromkeys([self.home, self.memory]))

    @property
    def name(self) -> str:
        """Of the cluster; no other one has it."""
        return self.home.name

    def make_environment(self, alone: bool = True) -> dict[str, str]:
        """What tells processes that they belong here. `alone`: on no other machine, where no such folders are."""
        ours = {MARK: self.name, "IPYTHONDIR": str(self.home)}  # and not the user's, which may not be there
        if not alone:
            return ours
        return {
            **ours,
            "PRTE_MCA_prte_tmpdir_base": str(self.home),
            "OMPI_MCA_btl_sm_backing_directory": str(self.memory),
            # Ranks of one machine talk through its memory: nobody else should find a port of theirs.
            "OMPI_MCA_btl": os.environ.get("OMPI_MCA_btl", "^tcp"),  # noqa: SIM112 (so it is called)
        }


def _check_room(folder: Path) -> None:
    """Raises OSError where a file of the usual size does not fit."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, _FILES_BYTES)
        else:  # macOS
            file.write(bytes(_FILES_BYTES))


def _make_memory_folder(home: Path, n: int) -> Path:
    """A folder in memory, unless there is too little of that, as in many containers: ranks would die of it."""
    try:
        room = os.statvfs(_SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < n * _SEGMENT_BYTES:
            return home
        memory = _SHARED_MEMORY / home.name
        memory.mkdir(mode=0o700)
    except OSError:
        return home
    return memory
