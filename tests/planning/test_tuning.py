"""Plans predicted, measured and chosen: from a cell, and by the widget without a browser."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from html import escape

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Training, forecast, tune
from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache, warn_of_gpus
from mpi4dl_nb.draw.timeline import show_timeline
from mpi4dl_nb.draw.tuning import describe_measurements, show_tuning
from mpi4dl_nb.draw.tuning_points import make_points
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import ImageError, PlanError, RankError, TraceError
from mpi4dl_nb.engines.formatting import format_bytes, format_number
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.candidates import Candidate, Measurement, sort_candidates
from mpi4dl_nb.engines.predict.explain import classify_plan, describe_plan
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machine_checks import Noise
from mpi4dl_nb.engines.program.program import Program, count_traffic
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.planning.plan_benchmark import PlanTrial, run_interleaved
from mpi4dl_nb.planning.plan_tuner import PlanTuner, order_for_measurement
from mpi4dl_nb.widgets.tuner import Tuner
from tests.draw.legible import find_unreadable, read
from tests.sampling import EVERYTHING


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


SHAPE = (2, 3, 32, 32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(2, backend="loopback") as started:
        store = tmp_path_factory.mktemp("machine") / "machine.json"
        started.calibrate(store, quick=not EVERYTHING, accept_noise=True)
        yield started


def test_a_machine_is_measured_once_and_kept(cluster, tmp_path):
    assert cluster.calibrate() is cluster.calibrate()
    file = tmp_path / "machine.json"
    file.write_text(cluster.machine.to_json())
    assert Cluster(2).calibrate(file) == cluster.machine  # read: these ranks were never started
    file.write_text("3")
    with pytest.raises(PlanError, match="no machine that was stored"):
        Cluster(2).calibrate(file)
    assert isinstance(cluster.machine, Machine)
    assert cluster.machine.ranks == 2
    assert min(speed.per_s for kind in cluster.machine.speeds.values() for speed in kind) > 1e6


def test_a_machine_that_is_known_is_stored_where_it_is_asked(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "machine", replace(cluster.machine, quick=False, noise=Noise()))
    assert cluster.calibrate(tmp_path / "machine.json") is cluster.machine
    assert Machine.from_json((tmp_path / "machine.json").read_text()) == cluster.machine


def test_a_machine_file_that_cannot_be_used_is_named_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"machine\.json cannot be read: Not a directory\."):
        Cluster(2).calibrate(tmp_path / "file" / "machine.json")
    with pytest.raises(PlanError, match=r"machine\.json cannot be written: File exists\."):
        Cluster(2).calibrate(tmp_path / "file" / "machine.json", again=True)
    with pytest.raises(RankError, match="not started"):  # so it would be measured
        Cluster(2).calibrate(tmp_path / "machine.json")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_traced_is_refused_before_a_minute_is_spent_on_calibration():
    cluster = Cluster(2, backend="loopback")  # not started: a calibration would raise RankError
    with pytest.raises(TraceError, match=r"names|named tensors"):
        tune(make_model(), SHAPE, cluster, loss=lambda scores, labels: (scores.names - labels).sum(), progress=False)


def test_a_rank_that_dies_ends_a_tuning():
    with Cluster(2, backend="loopback") as cluster:
        trial = PlanTrial(cluster, lambda: cluster._mark_dead(RankError("Rank 1: killed", 1)))
        with pytest.raises(RankError, match="Rank 1: killed"):
            run_interleaved([trial, trial], 1)


@pytest.mark.nightly
def test_a_machine_is_remembered_for_the_next_notebook(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("MPI4DL_NB_MACHINES", str(tmp_path))
    machine = replace(cluster.machine, noise=Noise())  # however busy this one was: a noisy one is not remembered
    CalibrationCache.of(2, "loopback").write(machine)
    assert Cluster(2, backend="loopback").calibrate() == machine
    (file,) = tmp_path.iterdir()
    for text in (replace(machine, ranks=3).to_json(), "of another version"):
        file.write_text(text)
        with pytest.raises(RankError, match="not started"):  # so it would be measured
            Cluster(2, backend="loopback").calibrate()
    with pytest.raises(RankError, match="not started"):
        Cluster(3, backend="loopback").calibrate()
    CalibrationCache.of(2, "loopback").write(machine)
    with pytest.raises(RankError, match="not started"):
        Cluster(2, backend="loopback").calibrate(again=True)
    monkeypatch.setenv("MPI4DL_NB_MACHINES", str(file))  # no folder can be made of a file
    CalibrationCache.of(2, "loopback").write(machine)
    assert CalibrationCache.of(2, "loopback").read() is None


def test_the_best_of_each_kind_that_may_be_fastest_is_measured_first(cluster):
    found = PlanTuner(make_model(), SHAPE, cluster).find(progress=False)
    ordered = order_for_measurement(found.candidates, found.explanation)
    assert ordered[0].plan == found.plan
    assert sorted(map(id, ordered)) == sorted(map(id, found.candidates))
    likely = {each.kind: each.plan for each in found.explanation.verdicts if each.fits and each.share >= 0.5}
    first, others = ordered[: len(likely)], ordered[len(likely) :]
    assert {classify_plan(each.plan): each.plan for each in first} == likely
    for part in (first, others):
        speeds = [each.forecast.images_per_s for each in part]
        assert speeds == sorted(speeds, reverse=True)
    assert len(likely) > 1


def test_the_best_plan_is_one_that_was_measured_and_trains(cluster):
    tuned = tune(make_model(), SHAPE, cluster, top=2, steps=2, progress=False)
    measured = [each for each in tuned.candidates if each.measured]
    assert len(measured) == 2 < len(tuned.candidates)
    assert tuned.best.images_per_s == max(each.images_per_s for each in measured)
    for each in measured:
        assert len(each.measured.seconds) == 2
        assert each.predicted_bytes == pytest.approx(each.peak_bytes, rel=0.15)
    assert tuned.plan.ranks == 2
    assert f"{tuned.best.forecast.seconds * 1e3:.4g} ms" in show_timeline(tuned.best.forecast.timeline, tuned.plan).alt
    assert tuned._repr_html_().count('scope="row"') == len(tuned.candidates)
    assert all(escape(sentence) in tuned._repr_html_() for sentence in tuned.explanation.sentences)
    fastest, predicted = tuned.explanation.sentences[:2]
    assert fastest.startswith(f"The fastest plan, as measured, is {describe_plan(tuned.plan)}: ")
    assert predicted.startswith("The best for 2 ranks, as predicted, is ")
    assert {classify_plan(each.plan) for each in tuned.candidates} <= {each.kind for each in tuned.explanation.verdicts}
    training = Training(make_model(), tuned.plan, cluster, SHAPE)
    spec = training.recipe.step_specs
    training.step(torch.rand(spec["images"].shape), torch.zeros(spec["labels"].shape, dtype=torch.int64))
    training.close()
    assert not cluster.call(lambda host: len(host.get_kept(RankTraining)))[0]


def test_by_memory_the_best_plan_is_the_leanest_that_was_measured(cluster):
    tuned = tune(make_model(), SHAPE, cluster, top=2, steps=1, progress=False, by="memory")
    measured = [each for each in tuned.candidates if each.measured]
    assert tuned.best.peak_bytes == min(each.peak_bytes for each in measured)
    assert [each.predicted_bytes for each in tuned.candidates[2:]] == sorted(
        each.predicted_bytes for each in tuned.candidates[2:]
    )
    first, second, *_ = tuned.explanation.sentences
    assert first.startswith(f"The plan with the least memory, as measured, is {describe_plan(tuned.plan)}: ")
    assert second.startswith("What needs least memory for 2 ranks, as predicted, is ")
    limit = max(each.predicted_bytes for each in tuned.candidates) - 1
    within = tune(make_model(), SHAPE, cluster, top=0, progress=False, rank_bytes=limit)
    assert within.best.predicted_bytes <= limit


def test_a_tuner_orders_by_speed_or_memory(cluster):
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False)
    fastest = tuner.plan
    assert [words for words, _ in tuner.order.options] == ["most images per second", "least memory of the fullest rank"]
    tuner.order.value = "memory"
    assert tuner.candidates[0].predicted_bytes == min(each.predicted_bytes for each in tuner.candidates)
    assert tuner.plan == tuner.candidates[0].plan
    assert "What needs least memory" in tuner.why.value
    tuner.order.value = "speed"
    assert tuner.plan == fastest
    assert "What needs least memory" not in tuner.why.value
    lean = Tuner(make_model(), SHAPE, cluster, progress=False, by="memory")
    assert lean.order.value == lean.explanation.by == "memory"
    # By memory, plans that recompute are asked for as well.
    least, kept_least = (min(each.predicted_bytes for each in shown.candidates) for shown in (lean, tuner))
    assert lean.chosen.predicted_bytes == least <= kept_least


def test_numbers_that_make_no_sense_are_refused(cluster):
    for go in (tune, Tuner):
        with pytest.raises(PlanError, match=r"by='cost' is unknown"):
            go(make_model(), SHAPE, cluster, by="cost")
    with pytest.raises(PlanError, match="top=-1 plans"):
        tune(make_model(), SHAPE, cluster, top=-1)
    for go in (
        lambda: tune(make_model(), SHAPE, cluster, steps=0),
        lambda: PlanTuner(make_model(), SHAPE, cluster).measure([], 0),
    ):
        with pytest.raises(PlanError, match="steps=0 of each plan"):
            go()


def test_what_cannot_be_trained_is_refused_before_the_machine_is_measured(cluster, monkeypatch):
    asked = []
    monkeypatch.setattr(cluster, "calibrate", lambda **more: asked.append(more) or cluster.machine)
    for go in (tune, Tuner):
        with pytest.raises(TraceError, match=r"It does run on \(1, 3, .*\): one image is a batch of one"):
            go(make_model(), SHAPE[1:], cluster)
        with pytest.raises(ImageError, match="must be"):
            go(make_model(), SHAPE[2:], cluster)
        with pytest.raises(PlanError):
            go(make_model(), SHAPE, cluster, optimiser=lambda weights: torch.optim.SGD(weights, lr=-1))
    assert asked == []
    PlanTuner(make_model(), SHAPE, cluster).find(progress=False)
    assert asked == [{"progress": False}]


def test_the_figure_tells_what_was_predicted_and_what_was_measured(cluster):
    tuned = tune(make_model(), SHAPE, cluster, top=1, steps=1, progress=False)
    figure = show_tuning(tuned.candidates)
    assert find_unreadable(figure) == []
    assert "images per second" in read(figure)
    best = tuned.best
    for rate in (best.images_per_s, best.predicted_images_per_s):
        assert f"{format_number(rate)} images/s" in figure.alt
        assert format_number(rate) in read(figure)
    assert format_bytes(best.peak_bytes) in read(figure)  # as the table and the alt text say it
    with pytest.raises(PlanError, match="no candidate"):
        show_tuning([])


def test_a_tuner_is_set_and_read_without_a_browser(cluster):
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False)
    assert tuner.plan == tuner.candidates[0].plan
    other = tuner.candidates[3].plan
    tuner.rows.chosen = repr(other)
    assert tuner.plan == other
    assert tuner.rows.html.count('type="radio"') == len(tuner.candidates)
    assert escape(tuner.explanation.sentences[0]) in tuner.why.value
    assert "the best for 2 ranks, as predicted, is" in tuner.explanation.words.lower()
    tuner.steps.value = 1
    tuner.measure_chosen()
    assert tuner.plan == other
    assert tuner.chosen.measured
    ratio = tuner.chosen.images_per_s / tuner.chosen.predicted_images_per_s
    assert f"1 of 1 plans measured, at {ratio:.2f} of" in tuner.status.value
    assert tuner.candidates[0].plan == other  # what was measured comes first
    tuner.choose(tuner.candidates[2].plan)
    assert tuner.rows.chosen == repr(tuner.candidates[2].plan)
    strips = next(each.plan for each in tuner.candidates if each.plan.grids[0].tiles == 2)
    written = {"2x1": "horizontal", "1x2": "vertical"}[strips.slice_method]
    tuner.choose(replace(strips, slice_method=written, num_spatial_parts=2))
    assert tuner.plan == strips
    assert tuner.rows.chosen == repr(strips)
    with pytest.raises(PlanError, match="none of the"):
        tuner.choose(type(other)())
    assert tuner.trouble.text == ""


def test_the_page_measures_what_it_names_and_nothing_that_does_not_fit(cluster):
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False)
    tuner.steps.value = 1
    first, last = tuner.candidates[0].plan, tuner.candidates[-1].plan
    tuner.view._handle_custom_msg({"measure": repr(last)}, [])  # before the state that tells of the choice
    assert tuner.plan == tuner.candidates[0].plan == last
    assert sum(bool(each.measured) for each in tuner.candidates) == 1
    tuner.rows._handle_custom_msg({"choose": repr(first)}, [])  # the rows have moved meanwhile
    assert tuner.plan == first
    replies = []
    tuner.view.send = lambda content, buffers=None: replies.append(content)
    tuner.view._handle_custom_msg({"measure": repr(Plan(split_size=3))}, [])
    assert [list(reply) for reply in replies] == [["refused"]], "it is none of the plans in the table"
    assert sum(bool(each.measured) for each in tuner.candidates) == 1


def test_unless_one_is_chosen_the_plan_is_the_best_measured(cluster):
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False)
    tuner.top.value, tuner.steps.value = 2, 1
    tuner.measure_best()
    assert tuner.plan == tuner.candidates[0].plan
    assert tuner.candidates[0].images_per_s == max(each.images_per_s for each in tuner.candidates[:2])


def test_plans_whose_steps_overlap_with_those_of_the_fastest_may_be_as_fast():
    plans = [
        Plan(split_size=2, spatial_size=0),
        Plan(split_size=1, slice_method="1x2"),
        Plan(split_size=1, slice_method="2x1"),
    ]
    seconds = [(1.0, 1.2, 1.4), (1.5, 1.6, 1.7), (1.3, 1.9, 2.0)]
    candidates = [
        Candidate(forecast(make_model(), plan, SHAPE, "Summit"), Measurement(times, (1,)))
        for plan, times in zip(plans, seconds, strict=True)
    ]
    words = describe_measurements(candidates)
    assert words.startswith("The fastest plan, as measured, is 2 stages: 1.67 images/s in steps of 2 images. ")
    assert "these may be as fast: 2x1 tiles. 3 of 3 plans measured" in words
    (alone,) = candidates[:1]
    assert describe_measurements([alone], neutral_batch=1).startswith(
        "Measured: 2 stages: 0.833 images/s in steps of 2 images, of which 1 counts. 1 of 1 plans measured"
    )


def test_images_beyond_a_neutral_batch_do_not_count_in_the_table(cluster):
    neutral = SHAPE[0]
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False, neutral_batch=neutral)
    assert len({each.forecast.images for each in tuner.candidates}) > 1
    assert tuner.candidates == sort_candidates(tuner.candidates, neutral)
    tuner.steps.value = 1
    tuner.measure_chosen()
    assert tuner.candidates == sort_candidates(tuner.candidates, neutral)
    for candidate, point in zip(tuner.candidates, make_points(tuner.candidates, neutral), strict=True):
        if candidate.measured is not None:
            assert dict(point.facts)["measured"].startswith(f"{format_number(candidate.images_per_s)} images/s")
    with pytest.raises(PlanError, match="neutral_batch=0 must be 1 image or more"):
        Tuner(make_model(), SHAPE, cluster, progress=False, neutral_batch=0)


def test_a_plan_that_fails_is_reported_and_the_others_are_measured(cluster, monkeypatch):
    tuner = Tuner(make_model(), SHAPE, cluster, progress=False)
    first, second = order_for_measurement(tuner.candidates, tuner.explanation)[:2]
    whole = tuner.tuning.make_recipe

    def fail_for_first(plan):
        if plan == first.plan:
            raise PlanError("it does not <run>")
        return whole(plan)

    monkeypatch.setattr(tuner.tuning, "make_recipe", fail_for_first)
    tuner.top.value, tuner.steps.value = 2, 1
    tuner.measure_best()
    assert tuner.candidates[0].plan == second.plan
    assert tuner.candidates[-1].failure == "it does not <run>"
    assert "it does not &lt;run&gt;" in tuner.rows.html
    assert "failed: it does not &lt;run&gt;" in tuner.status.value


@pytest.mark.nightly
def test_over_mpi_predictions_are_of_the_size_of_what_is_measured():
    with Cluster(2) as started:
        tuned = tune(make_model(), (2, 3, 64, 64), started, top=2, steps=3, progress=False)
        for each in tuned.candidates[:2]:
            assert 0.05 < each.predicted_images_per_s / each.images_per_s < 20
            check_bytes(
                each,
                compile_plan(
                    PlanTuner(make_model(), (2, 3, 64, 64), started).task.traces.get_graph(each.plan), each.plan
                ),
            )


def check_bytes(found: Candidate, programs: Sequence[Program]) -> None:
    """As predicted; beyond it are at most messages that their receivers, which share the cores, fetched late."""
    for memory, seen, program in zip(found.forecast.memory, found.measured.peak_bytes, programs, strict=True):
        sent = sum(each.bytes for each in count_traffic(program).values())
        assert 0.98 * memory.peak_bytes <= seen <= 1.02 * memory.peak_bytes + sent


def test_a_plan_whose_bytes_were_not_counted_has_a_figure():
    found = forecast(make_model(), Plan(split_size=1, spatial_size=0), SHAPE, "Summit")
    candidate = Candidate(found, Measurement((0.1, 0.2), ()))
    assert candidate.peak_bytes is None
    assert candidate._repr_html_()
    assert show_tuning([candidate]).alt


def test_a_calibrated_cluster_forecasts_after_it_was_stopped():
    with Cluster(2, backend="loopback") as started:
        started.calibrate(quick=True, accept_noise=True, progress=False)
        training = Training(make_model(), Plan(split_size=2, spatial_size=0), started, SHAPE)
        found = training.forecast()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training.forecast() == found


def test_a_forecast_of_ranks_on_gpus_is_warned_of():
    with pytest.warns(UserWarning, match="The ranks compute on NVIDIA X, but calibrate"):
        warn_of_gpus(lambda function, device: ["NVIDIA X", ""], "auto")
