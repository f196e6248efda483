"""Calibrate the ranks of a cluster from the notebook, with a progress bar; results that are too noisy are refused."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from engines.errors import PlanError, RankError
from engines.predict.calibrate import Calibration
from engines.predict.calibration_runs import CalibrationRecipes
from engines.predict.machine import Machine

if TYPE_CHECKING:
    from mpi4dl_nb.cluster import Cluster

__all__ = ["calibrate_cluster"]


def calibrate_cluster(
    cluster: Cluster, quick: bool = False, accept_noise: bool = False, progress: bool = True
) -> Machine:
    """Measure the ranks, a second time if the first measurement is noisy, and return the less noisy one.

    Raises PlanError if both are useless, unless `accept_noise`, and RankError if the ranks are lost.
    """
    rehearsal = CalibrationRecipes.of(cluster.n)
    machine = _measure(cluster, rehearsal, quick, progress)
    if machine.noise.is_good or accept_noise:
        return machine
    # Noise comes from other programs, mostly in bursts, so a second measurement is often a good one.
    machine = min(machine, _measure(cluster, rehearsal, quick, progress), key=lambda each: each.noise.level)
    if machine.noise.is_useless:
        raise PlanError(
            f"This machine is too busy to be measured: {machine.noise}, in the better one of two calibrations. End "
            "what else runs and calibrate again, name a machine that is known (such as 'Summit'), or take the numbers "
            "as they are with cluster.calibrate(accept_noise=True)."
        )
    if not machine.noise.is_good:
        warnings.warn(
            f"This calibration is noisy: {machine.noise}. It serves this cluster, but is not remembered: forecasts by "
            "it may be far off. When the machine is quiet, measure it with cluster.calibrate(again=True).",
            stacklevel=3,
        )
    return machine


def _measure(cluster: Cluster, rehearsal: CalibrationRecipes, quick: bool, progress: bool) -> Machine:
    """Measure part by part; an interrupt takes effect between two parts at the latest."""
    cluster.call(Calibration.start, rehearsal, quick)
    parts = Calibration.count_parts(cluster.n, quick)
    try:
        for _ in tqdm(range(parts), desc="measuring this machine", unit=" parts", disable=not progress, leave=False):
            found = cluster.call(Calibration.run_next_part)[0]
    finally:
        with suppress(RankError):  # an early end has an error of its own
            cluster.call(Calibration.discard)
    return found
