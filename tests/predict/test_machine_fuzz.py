"""A few dozen damaged machine files before the judge, and what is said of numbers that would overflow later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.predict.machine import interpolate
from mpi4dl_nb.engines.predict.machines import MACHINES
from tests.fuzz.__main__ import run_elsewhere


@pytest.mark.nightly
def test_damaged_machine_files_are_refused_or_give_forecasts():
    found = run_elsewhere("machines", first=0, count=60, seed=11)
    assert not found.wrong
    assert found.outcomes["read"] > 4
    assert found.outcomes["refused"] > 12


@pytest.mark.parametrize(
    ("field", "number", "said"),
    [
        ("speeds.convolution[0].per_s", 1e308, "is 1e+308, but must be from 0.001 to 1e+24"),
        ("speeds.norm[0].back_per_s", -1.0, "is -1.0, but must be"),
        ("speeds.pad[0].half[0]", 1e300, "is 1e+300, but must be"),
        ("speeds.copy[0].inputs", 0, "is 0, but must be"),
        ("latency_s", float("nan"), "is nan, but must be from 0 to 3600"),
        ("bytes_per_s", 10**400, "is a whole number of some 400 digits, but must be"),
        ("between.bytes_per_s", "fast", "is 'fast', which is no number"),
        ("call_s", True, "is True, which is no number"),
        ("cores", 1 << 40, "is 1099511627776, but must be from 1 to 1024"),
        ("cores", 1.5, "is 1.5, which is no whole number"),
        ("slice_s", 1e-12, "is 1e-12, but must be from 1e-05 to 3600"),
        ("noise", [[1]], "is [[1]], which is no table of names and numbers"),
        ("noise.spread", None, "is None, which is no number"),
    ],
)
def test_a_number_that_would_overflow_is_named_with_its_file_and_field(
    field: str, number: object, said: str, tmp_path: Path
):
    fields = json.loads(MACHINES["Summit"].to_json())
    fields["speeds"]["pad"][0]["half"] = [1.0]
    holder, *names = (fields, *field.replace("[0]", ".0").split("."))
    for name in names[:-1]:
        holder = holder[int(name)] if isinstance(holder, list) else holder[name]
    holder[int(names[-1]) if isinstance(holder, list) else names[-1]] = number
    (path := tmp_path / "machine.json").write_text(json.dumps(fields))
    with pytest.raises(PlanError) as caught:
        CalibrationCache(path).read()
    assert f"The machine file {path}: This is no machine that was stored: {field} {said}" in str(caught.value)


def test_a_machine_without_a_class_is_refused_when_it_is_read(tmp_path: Path):
    fields = json.loads(MACHINES["Summit"].to_json())
    del fields["speeds"]["pool"]
    (path := tmp_path / "machine.json").write_text(json.dumps(fields))
    with pytest.raises(PlanError, match=r"machine\.json: speeds\.pool is missing"):
        CalibrationCache(path).read()


def test_what_is_read_far_from_all_samples_is_a_number():
    """A slope of 27 powers of ten in an octave, and 49 octaves further on: neither none nor beyond all floats."""
    sizes, numbers = [(1.0,), (2.0,)], [1e-3, 1e24]
    assert interpolate(sizes, (1e15,), numbers) == pytest.approx(1e24)
    assert 0 < interpolate(sizes, (1e15,), numbers[::-1]) < 1e-3


def test_a_size_with_fewer_axes_than_the_samples_is_read_by_those():
    assert interpolate([(1.0, 1.0), (4.0, 1.0)], (4.0,), [10.0, 40.0]) == pytest.approx(40.0)
