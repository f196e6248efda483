"""The folders of a cluster's files on this machine, which only this user can read."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.errors import RankError
from mpi4dl_nb.launch import host_agent
from mpi4dl_nb.launch.reaper_process import MARK, remove_paths

__all__ = ["PREFIX", "RunDirectory"]

PREFIX = "mpi4dl_nb-"
_FILES_BYTES = 4 << 20  # keys, logs and files of MPI's runtime


# What a cluster has on disk while it runs:
#
#     home      /tmp/mpi4dl_nb-ab12cd34        connection files with their keys, MPI's session (ompi.*)
#     memory    /dev/shm/mpi4dl_nb-ab12cd34    the segments through which the ranks send messages
#     record    .../mpi4dl_nb-ab12cd34.json    the pids of its processes (pid_file.py)


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
        """Create the folders for `n` ranks. Raises RankError if there is no room or no permission to write."""
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
                f"({home or tempfile.gettempdir()}; {_FILES_BYTES >> 20} MiB are needed). "
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
        ours = {MARK: self.name, "IPYTHONDIR": str(self.home)}  # not the user's, which may be missing
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
