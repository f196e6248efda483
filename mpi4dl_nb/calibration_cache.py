"""Cache of calibrations, so that no notebook has to repeat one.

Without a file name, calibrations are stored in the cache folder (XDG_CACHE_HOME or `~/.cache`; MPI4DL_NB_MACHINES
overrides it), by backend, number of ranks, number of cores, torch version and host.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from engines.comm.cgroup_limits import count_cores
from engines.errors import PlanError
from engines.predict.machine import Machine
from engines.predict.machine_schema import find_missing_speeds
from engines.regular_file import read_bounded

__all__ = ["CalibrationCache"]

_MOST_BYTES = 1 << 22  # a calibration takes a hundredth of it
_READ_AS = 3  # format version: increased when measurements are interpreted differently, which invalidates older files


@dataclass(frozen=True)
class CalibrationCache:
    """One file. A default (`usual`) one, which nobody named, fails silently: the machine is then measured."""

    path: Path
    usual: bool = False

    @classmethod
    def of(cls, n: int, backend: str, hosts: str = "") -> CalibrationCache:
        """Return the default file for `n` ranks on this host, or on the given hosts."""
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (there may be no home)
        folder = Path(os.environ.get("MPI4DL_NB_MACHINES") or Path(caches, "mpi4dl_nb_machines"))
        where = sha256((hosts or socket.gethostname()).encode()).hexdigest()[:12]
        kind = f"{backend}-{n}-on-{count_cores()}-torch-{torch.__version__}"
        return cls(folder / f"{kind}-{where}-{_READ_AS}.json", usual=True)

    def read(self) -> Machine | None:
        """Return the stored machine; None if there is none. Raises PlanError if a named file holds something else."""
        if not self.path.exists():
            return None
        try:
            found = Machine.from_json(read_bounded(self.path, _MOST_BYTES).decode(errors="replace"))
            if missing := list(find_missing_speeds(found.speeds)):
                raise PlanError(f"speeds.{missing[0]} is missing. Calibrate, and store it again.")
            return found
        except PlanError as error:
            if not self.usual:
                raise PlanError(f"The machine file {self.path}: {error}") from error
        except OSError as error:
            if not self.usual:
                raise PlanError(f"The machine file {self.path} cannot be read: {error.strerror}.") from error
        return None

    def write(self, machine: Machine) -> None:
        """Replace the file. A quick or noisy calibration is not stored: later notebooks would rely on it."""
        if machine.quick or not machine.noise.is_good:
            return
        with suppress(*(OSError,) * self.usual):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside it and renamed: a notebook that reads now sees the old file or the new one, but whole.
            part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            part.write_text(machine.to_json())
            part.replace(self.path)
