"""A calibration that others disturbed is not believed: by made-up measurements, and a clock of our own."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.cluster import calibrate_cluster as from_notebook
from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.models import chain
from mpi4dl_nb.engines.predict import calibrate as calibrating
from mpi4dl_nb.engines.predict.calibration_runs import CalibrationTimes
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machine_checks import (
    MOST_ELSEWHERE,
    MOST_SPREAD,
    Noise,
    Spin,
    compute_foreign_share,
    compute_spread,
)
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.planning.plan_tuner import PlanTuner
from mpi4dl_nb.training.recovery import choose_plan
from tests.predict.test_simulate import FLAT

QUIET, BUSY, HOPELESS = Noise(0.02, 0.05), Noise(0.35, 0.3), Noise(0.8, 1.5)


def make_spins(shares: list[float], host: str = "here", wall_s: float = 0.2) -> list[Spin]:
    """Ranks of processes of their own that were given these shares of a core."""
    return [Spin(host, process, wall_s, share * wall_s) for process, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "cores", "expected"),
    [
        ([1.0], 8, 0.0),  # one rank asks for one core
        ([1.0, 1.0], 2, 0.0),
        ([0.4] * 5, 2, 0.0),  # they share two cores among each other
        ([0.5, 0.5], 2, 0.5),
        ([0.2] * 5, 2, 0.5),
        ([0.3], 8, 0.7),
        ([1.02, 1.0], 2, 0.0),  # clocks are not exact
    ],
)
def test_what_ranks_are_not_given_others_have(shares: list[float], cores: int, expected: float):
    assert compute_foreign_share(make_spins(shares), cores) == pytest.approx(expected)


def test_the_busiest_host_counts_and_threads_of_one_process_want_one_core():
    spins = [*make_spins([1.0, 1.0], "one"), *make_spins([0.6, 0.6], "other")]
    assert compute_foreign_share(spins, 2) == pytest.approx(0.4)
    assert compute_foreign_share([Spin("here", 7, 0.2, 0.05)] * 4, 2) == pytest.approx(0.0)


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=30))
def test_the_spread_is_that_of_the_middle_half(times: list[float]):
    """Against quartiles by sorting, whatever the unit."""
    ordered = sorted(times)

    def compute_quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    expected = (compute_quantile(0.75) - compute_quantile(0.25)) / statistics.median(times)
    assert compute_spread([times]) == pytest.approx(expected)
    assert compute_spread([[1000 * each for each in times]]) == pytest.approx(expected)


def test_one_disturbed_repetition_of_nine_is_no_noise_and_half_of_them_are():
    assert compute_spread([[1.0] * 8 + [23.0]] * 5) == 0
    assert Noise(spread=compute_spread([[1.0, 23.0] * 5] * 5)).is_useless


def test_what_is_good_and_what_is_useless():
    assert Noise(MOST_ELSEWHERE, MOST_SPREAD).is_good
    assert QUIET.is_good
    assert not BUSY.is_good
    assert not BUSY.is_useless
    assert HOPELESS.is_useless
    assert "35% of the cores" in str(BUSY)
    assert "30%" in str(BUSY)


# ---- a clock of our own


class Clock:
    """Time that passes when it is asked for; this thread is given a `share` of it."""

    def __init__(self, share: float) -> None:
        self.share, self.now_s = share, 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-4
        return self.now_s

    def thread_time(self) -> float:
        return self.share * self.now_s


class Alone:
    rank, size = 0, 1

    def barrier(self) -> None: ...

    def all_gather(self, value: object) -> list[object]:
        return [value]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
def test_a_rank_notes_how_much_of_a_core_it_was_given(share: float, monkeypatch):
    monkeypatch.setattr(calibrating, "time", Clock(share))
    spin, _ = calibrating._measure_spin(Alone())
    assert compute_foreign_share([spin], cores=1) == pytest.approx(1 - share, abs=0.01)


# ---- what the notebook does with it


def replace_measurements(monkeypatch, *noises: Noise, load: float = 0.02) -> list[bool]:
    """Calibrations that come out with these noises, in turn, under a load; whether each was quick."""
    left: Iterator[Noise] = iter(noises)
    asked: list[bool] = []

    def measure(call: object, n: int, recipes: object, quick: bool, progress: bool, text: str) -> Machine:
        asked.append(quick)
        print(text)
        return replace(FLAT, ranks=n, noise=next(left), quick=quick)

    monkeypatch.setattr(from_notebook, "_measure", measure)
    monkeypatch.setattr(from_notebook, "_measure_load", lambda call: load)
    monkeypatch.setattr(from_notebook, "prepare_recipes", lambda ranks: ())
    return asked


@pytest.fixture
def remembered(monkeypatch, tmp_path) -> Callable[[], Machine | None]:
    monkeypatch.setenv("MPI4DL_NB_MACHINES", str(tmp_path))
    return lambda: CalibrationCache.of(2, "loopback").read()


def test_a_good_one_is_remembered(monkeypatch, remembered):
    asked = replace_measurements(monkeypatch, QUIET)
    machine = Cluster(2, backend="loopback").calibrate()
    assert asked == [False]
    assert machine.noise == QUIET
    assert remembered() == machine == Machine.from_json(machine.to_json())


def test_a_noisy_one_is_measured_again_and_the_better_one_counts(monkeypatch, remembered):
    asked = replace_measurements(monkeypatch, HOPELESS, QUIET)
    assert Cluster(2, backend="loopback").calibrate().noise == QUIET
    assert len(asked) == 2
    assert remembered().noise == QUIET


def test_two_noisy_ones_serve_with_a_warning_and_are_not_remembered(monkeypatch, remembered, tmp_path):
    replace_measurements(monkeypatch, BUSY, HOPELESS)
    cluster = Cluster(2, backend="loopback")
    with pytest.warns(UserWarning, match=r"other programs took 35% of the cores .* is not remembered"):
        assert cluster.calibrate(tmp_path / "asked.json").noise == BUSY
    assert cluster.calibrate() is cluster.machine
    assert remembered() is None
    assert not (tmp_path / "asked.json").exists()


def test_a_useless_one_is_refused_where_a_good_one_is_asked_for(monkeypatch, remembered, capsys):
    replace_measurements(monkeypatch, HOPELESS, HOPELESS, HOPELESS)
    cluster = Cluster(2, backend="loopback")
    with pytest.raises(PlanError, match=r"too busy to be measured: other programs took 80% .* End what else runs"):
        cluster.calibrate(quick=False)
    assert capsys.readouterr().out == ("Measuring this machine\nThe first measurement was noisy: measuring again\n")
    assert cluster.machine is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cluster.calibrate(accept_noise=True).noise == HOPELESS
    assert remembered() is None


@pytest.mark.parametrize("noise", [QUIET, HOPELESS])
def test_a_busy_machine_is_measured_quickly_and_once_with_a_warning(monkeypatch, remembered, noise, capsys):
    """Also if the load has gone meanwhile: what was asked for were all repetitions."""
    asked = replace_measurements(monkeypatch, noise, load=0.45)
    cluster = Cluster(2, backend="loopback")
    with pytest.warns(UserWarning, match=r"take 45% of the cores: .* not remembered: .*calibrate\(again=True\)"):
        machine = cluster.calibrate()
    assert asked == [True]
    assert capsys.readouterr().out == "This machine is busy: measuring it quickly\n"
    assert machine.quick
    assert cluster.calibrate() is machine
    assert remembered() is None
    assert not CalibrationCache.of(2, "loopback").path.exists()


def test_who_asks_for_all_repetitions_hears_in_the_first_second_that_the_machine_is_busy(monkeypatch, remembered):
    asked = replace_measurements(monkeypatch, HOPELESS, HOPELESS, load=0.45)
    cluster = Cluster(2, backend="loopback")
    with pytest.raises(PlanError, match=r"too busy to be measured: other programs take 45% of the cores .*up to 20%"):
        cluster.calibrate(quick=False)
    assert asked == []
    for quick, accepted in ((False, False), (None, True)):
        assert cluster.calibrate(again=True, quick=quick, accept_noise=True).quick is accepted


def test_a_load_that_comes_meanwhile_is_no_reason_to_measure_again(monkeypatch, remembered):
    asked = replace_measurements(monkeypatch, HOPELESS, HOPELESS)
    loads = iter((0.02, 0.6))
    monkeypatch.setattr(from_notebook, "_measure_load", lambda call: next(loads))
    with pytest.warns(UserWarning, match=r"This calibration is noisy: other programs took 80% of the cores"):
        Cluster(2, backend="loopback").calibrate()
    assert asked == [False]


def test_the_load_is_known_in_the_first_second(monkeypatch, remembered):
    """Before anything is prepared or measured; the ranks themselves are no load."""
    with Cluster(2, backend="loopback") as cluster:
        start_s = time.perf_counter()
        load = from_notebook._measure_load(cluster.call)
        assert time.perf_counter() - start_s < 2  # on a machine with other work, too
        assert 0 <= load < 1
        monkeypatch.setattr(calibrating, "_measure_spin", lambda world: (Spin("here", 1, 0.2, 0.025), []))
        assert from_notebook._measure_load(cluster.call) == pytest.approx(0.75)
        monkeypatch.setattr(from_notebook, "prepare_recipes", lambda ranks: pytest.fail("not before the load is known"))
        with pytest.raises(PlanError, match="75% of the cores"):
            cluster.calibrate(again=True, quick=False)


def test_a_quick_look_serves_until_more_is_asked_for(monkeypatch, remembered):
    asked = replace_measurements(monkeypatch, QUIET, QUIET)
    cluster = Cluster(2, backend="loopback")
    quick = cluster.calibrate(quick=True)
    assert cluster.calibrate() is quick
    assert remembered() is None
    assert not cluster.calibrate(quick=False).quick
    assert cluster.calibrate(quick=True).quick is False
    assert asked == [True, False]
    assert remembered() is not None


class ThreeParts(calibrating.Calibration):
    """A calibration that measures nothing."""

    begun = 0

    def __init__(self, world: object, rehearsal: object, quick: bool) -> None:
        ThreeParts.begun += 1
        self.done = 0

    @staticmethod
    def count_parts(ranks: int, quick: bool) -> int:
        return 3

    def run_part(self) -> Machine | None:
        self.done += 1
        return replace(FLAT, ranks=2) if self.done == self.count_parts(2, True) else None


def test_it_goes_part_by_part_and_can_be_stopped(monkeypatch, remembered):
    """An interrupt in the middle: the next calibration begins anew, on the same ranks."""
    calls = []

    def report(done, of):
        calls.append((done, of))
        if len(calls) == 2:
            raise KeyboardInterrupt

    for module in (from_notebook, rank_functions):
        monkeypatch.setattr(module, "Calibration", ThreeParts)
    monkeypatch.setattr(from_notebook, "prepare_recipes", lambda ranks: ())
    monkeypatch.setattr(from_notebook, "show_counts", lambda text, shown: nullcontext(report))
    monkeypatch.setattr(from_notebook, "_measure_load", lambda call: 0.0)
    with Cluster(2, backend="loopback") as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.calibrate()
        assert cluster.state == "ready"
        assert remembered() is None
        assert cluster.calibrate() == remembered()
    assert calls == [(1, 3), (2, 3), (1, 3), (2, 3), (3, 3)]
    assert ThreeParts.begun == 4  # on two ranks, twice


@pytest.mark.nightly
def test_where_ranks_compute_on_gpus_predictions_say_that_they_are_of_cpus(monkeypatch):
    machine, shape = replace(MACHINES["Summit"], ranks=2), (2, 3, 32, 32)
    with Cluster(2, backend="loopback") as cluster:
        monkeypatch.setattr(cluster, "calibrate", lambda **_: machine)
        training = Training(chain(4, 4), Plan(split_size=1, spatial_size=0, data_parallel=2), cluster, shape)
        predictions = (
            training.forecast,
            lambda: choose_plan(training, 2),
            lambda: PlanTuner(chain(4, 4), shape, cluster).find(progress=False),
        )
        for predict in predictions:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                predict()
        monkeypatch.setattr(rank_functions, "choose_device", lambda device, rank: torch.device("cuda", rank))
        for predict in predictions:
            with pytest.warns(UserWarning, match=r"compute on cuda:0, cuda:1, but calibrate\(\) measures their CPUs"):
                predict()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_many_parts_as_were_announced(ranks: int, quick: bool, monkeypatch):
    """With next to nothing in each of them."""

    class Nothing:
        timed: tuple[()] = ()

        def __init__(self, *_: object, **__: object) -> None: ...
        def run_round(self) -> None: ...
        def run_steps(self, steps: int) -> None: ...
        def gather_times(self) -> CalibrationTimes:
            return CalibrationTimes(0.0, (), spread=0.25)

    for name in ("KernelTimer", "CalibrationRun"):
        monkeypatch.setattr(calibrating, name, Nothing)
    monkeypatch.setattr(calibrating, "build_op_tallies", lambda _: [])
    monkeypatch.setattr(calibrating, "fit_machine", lambda machine, *_: machine)

    def count(world: object) -> tuple[int, Machine]:
        calibration = calibrating.Calibration(world, ((None, False),), quick)
        parts = 0
        while calibration.run_part() is None:
            parts += 1
        return parts + 1, calibration.machine

    for parts, machine in run_ranks(ranks, count):
        assert parts == calibrating.Calibration.count_parts(ranks, quick)
        assert machine.quick is quick
        assert machine.noise.spread == 0.25
