"""What is found out of a rehearsal is what the machine was made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.predict.calibrate import Calibration
from mpi4dl_nb.engines.predict.calibration_runs import (
    CalibrationRecipes,
    CalibrationTimes,
    RunComparison,
    fit_machine,
    prepare_recipes,
)
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.tallies import CLASSES
from tests.predict.test_simulate import FLAT

RANKS = 4
FOUND = (
    "update_s",
    "jitter",
    "instruction_s",
    "exchange_s",
    "sum_s",
    "cold_copies",
    "resume_s",
    "thread_s",
)
REAL = replace(
    FLAT,
    cores=2,
    slice_s=0.2,
    instruction_s=6e-5,
    update_s=1e-3,
    exchange_s=2e-4,
    sum_s=1e-4,
    cold_copies=0.8,
    copy_per_s=1e9,
    resume_s=0.1,
    thread_s=2e-3,
    jitter=0.1,
)


@pytest.fixture(scope="module")
def rehearsal():
    return prepare_recipes(RANKS)


def simulate_times(machine: Machine, *act) -> CalibrationTimes:
    """As ranks of such a machine would measure themselves."""
    programs = RunComparison(*act)
    return CalibrationTimes(
        programs.simulate_seconds(machine), tuple(programs.estimate_work_s(machine)), machine.jitter
    )


@pytest.mark.nightly
def test_what_ranks_would_measure_leads_back_to_their_machine(rehearsal):
    seen = [simulate_times(REAL, *act) for act in rehearsal]
    blank = replace(FLAT, cores=2, slice_s=REAL.slice_s, copy_per_s=REAL.copy_per_s)
    found = fit_machine(blank, rehearsal, seen)
    for name in FOUND:
        assert getattr(found, name) == pytest.approx(getattr(REAL, name), rel=0.1), name


def measure(rehearsal: CalibrationRecipes, world) -> Machine:
    calibration = Calibration(world, rehearsal, quick=True)
    while calibration.machine is None:
        calibration.run_part()
    return calibration.machine


@pytest.mark.nightly
def test_ranks_measure_themselves_and_agree():
    machines = run_ranks(2, partial(measure, prepare_recipes(2)))
    assert machines[0] == machines[1] == Machine.from_json(machines[0].to_json())
    machine = machines[0]
    assert set(machine.speeds) == set(CLASSES)
    assert 0 <= machine.cold_copies < 100
    assert 0 < machine.exchange_s < 0.1
    assert 0 <= machine.resume_s < 0.1


@pytest.mark.nightly
def test_a_rank_alone_waits_for_nobody():
    (machine,) = run_ranks(1, partial(measure, prepare_recipes(1)))
    assert machine.resume_s == 0
    assert machine.cold_copies == 0
