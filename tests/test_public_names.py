"""`help()` is enough: every public name has a docstring with an example that stands alone, and runs."""

from __future__ import annotations

import doctest
import inspect
import warnings
from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

import mpi4dl_nb
from mpi4dl_nb import Cluster
from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.engines.predict.machine_checks import Noise
from tests.sampling import EVERYTHING


@pytest.fixture(scope="module")
def _calibrated_quickly() -> None:
    """Examples that need a calibration of two ranks find a quick one, which takes a fifth of the time."""
    if not EVERYTHING:
        with Cluster(2) as cluster:
            machine = cluster.calibrate(quick=True, accept_noise=True, progress=False)
        CalibrationCache.of(2, cluster.backend).write(replace(machine, quick=False, noise=Noise()))


@pytest.mark.nightly
@pytest.mark.usefixtures("_calibrated_quickly")
@pytest.mark.parametrize("name", [name for name in mpi4dl_nb.__all__ if callable(getattr(mpi4dl_nb, name))])
def test_the_example_of_a_public_name_runs(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = inspect.getdoc(getattr(mpi4dl_nb, name)) or ""
    test = doctest.DocTestParser().get_doctest(text, {name: getattr(mpi4dl_nb, name)}, name, None, None)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
    plt.close("all")


def test_all_names_are_there_once():
    """Ruff sorts them: constants, classes, functions."""
    assert len(set(mpi4dl_nb.__all__)) == len(mpi4dl_nb.__all__)
    assert all(hasattr(mpi4dl_nb, name) for name in mpi4dl_nb.__all__)
