"""Calibrate the ranks of a cluster from the notebook, with a progress bar: quickly if the machine is busy."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mpi4dl_nb.engines.comm.device import count_cores, get_memory_bytes
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.images.regular_file import read_bounded, write_beside
from mpi4dl_nb.engines.predict.calibrate import Calibration
from mpi4dl_nb.engines.predict.calibration_runs import CalibrationRecipes, prepare_recipes
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machine_checks import MOST_ELSEWHERE
from mpi4dl_nb.engines.predict.tallies import CLASSES
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.status_line import show_counts

CallRanks = Callable[..., list[Any]]
"""`Cluster.call`: run a function on all ranks."""


def calibrate_cluster(call: CallRanks, n: int, quick: bool | None, accept_noise: bool, progress: bool) -> Machine:
    """Measure the `n` ranks; the arguments are those of `Cluster.calibrate`.

    Raises PlanError if the machine is too busy for a measurement that must not be `quick`, unless `accept_noise`, and
    RankError if the ranks are lost.
    """
    # The load is measured first. With other programs on the cores, all repetitions of a calibration take a quarter of
    # an hour, and are useless in the end: a quick one is as good, and says the same about them.
    #
    #     quick=       cores are free                           others take them
    #     None         all repetitions, again if noisy          quick, and a warning
    #     False        all repetitions, again if noisy          PlanError, unless `accept_noise`
    #     True         quick                                    quick, and a warning
    elsewhere = _measure_load(call)
    is_busy = elsewhere > MOST_ELSEWHERE
    if is_busy and quick is False and not accept_noise:
        raise PlanError(
            f"This machine is too busy to be measured: other programs take {elsewhere:.0%} of the cores (good: up to "
            f"{MOST_ELSEWHERE:.0%}). {_REMEDY} A noisy measurement serves meanwhile: cluster.calibrate()."
        )
    recipes, is_quick = prepare_recipes(n), is_busy if quick is None else quick
    text = "This machine is busy: measuring it quickly" if is_busy and is_quick else "Measuring this machine"
    machine = _measure(call, n, recipes, is_quick, progress, text)
    if accept_noise or (machine.noise.is_good and not is_busy):
        return machine
    # Noise comes in bursts, so that a second measurement is often a good one, unless others keep the cores busy.
    if not is_quick and _measure_load(call) <= MOST_ELSEWHERE:
        again = _measure(call, n, recipes, is_quick, progress, "The first measurement was noisy: measuring again")
        machine = min(machine, again, key=lambda measurement: measurement.noise.level)
        if machine.noise.is_good:
            return machine
    if machine.noise.is_useless and quick is False:
        raise PlanError(f"This machine is too busy to be measured: {machine.noise}. {_REMEDY}")
    load = f"was quick, as other programs take {elsewhere:.0%} of the cores" if is_busy and is_quick else "is noisy"
    warnings.warn(
        f"This calibration {load}: {machine.noise}. It serves this cluster, but is not remembered: forecasts by it may "
        "be far off. When the machine is quiet, measure it with cluster.calibrate(again=True).",
        stacklevel=3,
    )
    return machine


_REMEDY = (
    "End what else runs and try again. Forecasts need no calibration if they name a machine that is known, such as "
    "'Summit'."
)


def _measure_load(call: CallRanks) -> float:
    """Return the fraction of the cores that other programs take now; it takes less than a second."""
    return max(call(rank_functions.measure_load))


def warn_of_gpus(call: CallRanks, device: str) -> None:
    """Warn if the ranks of a training with this `device` compute on GPUs, which a calibration does not measure."""
    gpus: list[str] = []
    with suppress(RankError):  # a cluster that was stopped can still be predicted
        gpus = sorted(set(call(rank_functions.find_gpu, device)) - {""})
    if gpus:
        warnings.warn(
            f"The ranks compute on {', '.join(gpus)}, but calibrate() measures their CPUs: predicted times, memory "
            "limits and the order of plans are those of device='cpu'. Measure plans on the ranks before you choose "
            "one, or name a machine with such GPUs: mpi4dl_nb.forecast(model, plan, image_shape, 'Summit').",
            stacklevel=3,
        )


def _measure(call: CallRanks, n: int, recipes: CalibrationRecipes, quick: bool, progress: bool, text: str) -> Machine:
    """Measure part by part; an interrupt takes effect between two parts at the latest."""
    call(rank_functions.start_calibration, recipes, quick)
    machine: Any = None  # after each part, as far as it is known then
    parts = Calibration.count_parts(n, quick)
    try:
        with show_counts(text, progress) as report:
            for done in range(1, parts + 1):
                machine = call(rank_functions.run_calibration_part)[0]
                report(done, parts)
    finally:
        with suppress(RankError):  # an early end has an error of its own
            call(rank_functions.discard_calibration)
    return machine


# Cache of calibrations, so that no notebook has to repeat one.
#
# Without a file name, calibrations are stored in the cache folder (XDG_CACHE_HOME or `~/.cache`; MPI4DL_NB_MACHINES
# overrides it), by backend, number of ranks, number of cores, memory, torch version and host.


_MOST_BYTES = 1 << 22  # a calibration takes a hundredth of it
_READ_AS = 4  # format version: increased when measurements are interpreted differently, which invalidates older files


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
        kind = f"{backend}-{n}-on-{count_cores()}-{get_memory_bytes() >> 30}gb-torch-{torch.__version__}"
        return cls(folder / f"{kind}-{where}-{_READ_AS}.json", usual=True)

    def read(self) -> Machine | None:
        """Return the stored machine; None if there is none. Raises PlanError if a named file holds something else."""
        try:
            machine = Machine.from_json(read_bounded(self.path, _MOST_BYTES).decode(errors="replace"))
            if missing := [kind for kind in CLASSES if not machine.speeds.get(kind)]:
                raise PlanError(f"speeds.{missing[0]} is missing. Calibrate, and store it again.")
            return machine
        except PlanError as error:
            if not self.usual:
                raise PlanError(f"The machine file {self.path}: {error}") from error
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self.usual:
                raise PlanError(f"The machine file {self.path} cannot be read: {error.strerror}.") from error
        return None

    def write(self, machine: Machine) -> None:
        """Replace the file. A quick or noisy calibration is not stored: later notebooks would rely on it."""
        if machine.quick or not machine.noise.is_good:
            return
        self._write(machine.to_json(), replaces=True)

    def check_writable(self) -> None:
        """Raise PlanError if a named file cannot be written, before a minute is spent on what goes into it."""
        self._write("", replaces=False)

    def _write(self, text: str, replaces: bool) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_beside(self.path, replaces) as beside:
                beside.write_text(text, encoding="utf-8")
        except OSError as error:
            if not self.usual:
                raise PlanError(
                    f"The machine file {self.path} cannot be written: {error.strerror}. Make room and a folder that "
                    "can be written, or name another file."
                ) from error
