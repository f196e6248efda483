"""The configurator without a browser: values are set, plans and words come out."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event

import pytest
from torch import nn

from engines.errors import PlanError, TraceError
from engines.formatting import format_seconds
from engines.models import resnet20_v1
from engines.plan import OPTIONS, Plan
from engines.predict.forecast import forecast
from engines.predict.machines import MACHINES
from mpi4dl_nb import Cluster, show_ranks
from mpi4dl_nb.background import LatestOnly
from mpi4dl_nb.plan_cache import describe_cluster_fit
from mpi4dl_nb.widgets import configurator as module
from mpi4dl_nb.widgets.configurator import Configurator

SHAPE = (4, 3, 32, 32)


@pytest.fixture(scope="module")
def made() -> Configurator:
    return Configurator(resnet20_v1(), SHAPE)


@pytest.fixture
def chosen(made) -> Configurator:
    made.plan = Plan()
    assert made.wait()
    return made


def test_a_knob_that_is_turned_is_a_plan_and_a_picture(chosen):
    before = chosen.view.png
    chosen.knobs["split_size"].value = 3
    assert chosen.plan == Plan(split_size=3)
    assert len(chosen.programs) == 6
    assert chosen.view.png != before
    assert chosen.view.alt.startswith("3 stages: 2x2 tiles -> 1 rank -> 1 rank; 6 ranks.")
    assert chosen.wait()
    told = show_ranks(Plan(split_size=3), resnet20_v1(), SHAPE).alt
    assert chosen.view.alt == f"{told} {module.NO_MACHINE}"
    assert chosen.forecast is None


@pytest.mark.nightly
def test_the_time_of_each_rank_is_that_of_the_chosen_machine(chosen):
    chosen.machine.value = "Summit"
    assert chosen.wait()
    summit = show_ranks(Plan(), resnet20_v1(), SHAPE, machine="Summit").alt
    assert chosen.view.alt == summit
    assert f"Predicted on Summit: {format_seconds(chosen.forecast.seconds)} a step" in summit
    chosen.knobs["split_size"].value = 3
    assert "predicted" not in chosen.view.alt  # until it is counted
    assert chosen.wait()
    assert chosen.view.alt == show_ranks(Plan(split_size=3), resnet20_v1(), SHAPE, machine="Summit").alt
    chosen.knobs["split_size"].value = 2
    assert chosen.view.alt == summit  # known from before, so that it is there at once
    chosen.machine.value = "Lassen"
    assert chosen.forecast == forecast(chosen.planning.traces.get_graph(Plan()), Plan(), MACHINES["Lassen"])
    assert "Predicted on Lassen" in chosen.view.alt
    chosen.machine.value = module.OWN
    assert chosen.wait()
    assert chosen.forecast is None
    assert chosen.view.alt.endswith(module.NO_MACHINE)


@pytest.mark.nightly
def test_the_time_is_that_of_the_cluster_once_it_is_calibrated():
    cluster = Cluster(5, backend="loopback")
    made = Configurator(resnet20_v1(), SHAPE, cluster)
    assert made.forecast is None
    cluster.machine = replace(MACHINES["Summit"], name="as measured", ranks=5)  # what calibrate() leaves there
    made.knobs["parts"].value = 2
    assert made.wait()
    assert made.forecast == forecast(made.planning.traces.get_graph(Plan(parts=2)), Plan(parts=2), cluster.machine)
    assert "Predicted on as measured" in made.view.alt


@pytest.mark.nightly
def test_a_machine_that_cannot_run_the_model_is_told_and_its_memory_still_shown():
    slow = replace(MACHINES["Summit"], name="no convolutions", speeds={})
    made = Configurator(resnet20_v1(), SHAPE, machine=slow)
    assert made.wait()
    assert "has no speed for" in made.view.alt
    assert "in all)" in made.view.alt
    with pytest.raises(PlanError, match="no machine 'sumit'"):
        Configurator(resnet20_v1(), SHAPE, machine="sumit")


@pytest.mark.nightly
def test_words_and_several_numbers(chosen):
    chosen.knobs["spatial_size"].value = 2
    chosen.knobs["slice_method"].value = ("2x3", "vertical")
    assert chosen.knobs["slice_method"].control.value == "2x3, vertical"
    chosen.knobs["num_spatial_parts"].control.value = "6, 2"
    chosen.knobs["balance"].control.value = "10, 10"
    assert "balance" in chosen.wrong
    chosen.knobs["balance"].control.value = "auto"
    expected = Plan(spatial_size=2, slice_method=("2x3", "vertical"), num_spatial_parts=(6, 2))
    assert (chosen.wrong, chosen.plan) == ({}, expected)
    chosen.knobs["num_spatial_parts"].control.value = ""
    assert chosen.plan.num_spatial_parts is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("split_size", 0, "split_size=0 must be a whole number of at least 1"),
        ("split_size", 40, "the model has only"),
        ("spatial_size", 3, "more spatial stages than the split_size=2"),
        ("num_spatial_parts", 6, "no square number"),
        ("slice_method", "diagonal", "is unknown"),
        ("slice_method", "40x1", "32 rows of pixels cannot be cut into 40 tiles"),
        ("parts", 3, "cannot be cut into parts=3"),
        ("times", 2, "bidirectional is off"),
        ("schedule", "gems", "Set bidirectional=True"),
        ("stages_per_rank", 2, "only 'interleaved' has several"),
        ("local_dp", 3, "cannot share the 4 images"),
        ("fused_layers", "auto", "Set halo_d2=True"),
    ],
)
def test_what_is_wrong_is_said_beside_its_knob_until_it_is_mended(chosen, knob, value, said):
    before, shown = chosen.knobs[knob].value, chosen.view.png
    chosen.knobs[knob].value = value
    assert list(chosen.wrong) == [knob]
    assert said in chosen.wrong[knob]
    assert chosen.knobs[knob].trouble in chosen.knobs[knob].children
    assert (chosen.plan, chosen.view.png) == (Plan(), shown)
    assert module.LAST in chosen.note.value
    chosen.knobs[knob].value = before
    assert chosen.wrong == {}
    assert module.LAST not in chosen.note.value


@pytest.mark.nightly
def test_what_needs_a_trace_comes_later_and_a_cell_waits_for_it(chosen, monkeypatch):
    chosen.planning.traces._graphs.clear()
    go_on, get_graph = Event(), chosen.planning.traces.get_graph
    monkeypatch.setattr(
        type(chosen.planning.traces), "get_graph", lambda self, plan: go_on.wait(20) and get_graph(plan)
    )
    start_s = time.monotonic()
    chosen.knobs["parts"].value = 2
    assert time.monotonic() - start_s < 2
    assert "Tracing the model" in chosen.note.value
    chosen.knobs["parts"].value = 3  # before the trace of the other one is there
    assert list(chosen.wrong) == ["parts"]
    chosen.knobs["parts"].value = 4
    go_on.set()
    assert chosen.plan == Plan(parts=4)
    assert "Tracing" not in chosen.note.value
    assert chosen.wrong == {}


def test_a_model_that_cannot_be_traced_says_so():
    class Choosy(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))

    broken = Configurator(Choosy(), SHAPE)
    with pytest.raises(TraceError, match="may take no decision from the values of a tensor"):
        _ = broken.plan
    assert "may take no decision from the values of a tensor" in broken.wrong[""]
    assert broken.start.disabled


@pytest.mark.nightly
def test_the_button_starts_and_resizes_the_cluster():
    cluster = Cluster(2, backend="loopback")
    chosen = Configurator(resnet20_v1(), SHAPE, cluster, Plan(slice_method="1x2"))
    assert chosen.wait()
    assert (chosen.start.description, chosen.start.disabled) == ("Start 3 ranks", False)
    chosen.start.click()
    assert chosen.wait()
    assert (cluster.n, cluster.state) == (3, "ready")
    assert (chosen.start.description, chosen.start.disabled) == ("3 ranks run", True)
    chosen.knobs["split_size"].value = 3
    assert (chosen.start.description, chosen.start.disabled) == ("Resize to 4 ranks", False)
    assert "4 ranks needed, 3 running." in chosen.note.value
    chosen.start.click()
    assert chosen.wait()
    assert cluster.call(lambda host: host.world.size) == [4] * 4
    cluster.stop()


def test_without_a_cluster_it_makes_one(chosen, monkeypatch):
    monkeypatch.setattr(module, "Cluster", lambda n: Cluster(n, backend="loopback"))
    chosen.start.click()
    assert chosen.wait()
    assert (chosen.cluster.n, chosen.cluster.state) == (5, "ready")
    chosen.cluster.stop()
    chosen.cluster = None


def test_a_cluster_that_does_not_start_says_why(chosen, monkeypatch):
    cluster = Cluster(5)
    monkeypatch.setattr("mpi4dl_nb.launch.mpi_library.sys.prefix", "/nowhere")
    monkeypatch.setattr("mpi4dl_nb.launch.mpi_library.shutil.which", lambda name: None)
    chosen.cluster = cluster
    chosen.start.click()
    assert chosen.wait()
    assert "There is no mpiexec" in chosen.rank_trouble.text
    assert not chosen.start.disabled
    chosen.cluster = None


def test_a_dead_rank_is_told():
    cluster = Cluster(5, backend="loopback").start()
    cluster.dead = "Rank 3: gone."
    text, button, _ = describe_cluster_fit(6, cluster)
    assert button == "Restart with 6 ranks"
    assert "Rank 3: gone." in text
    cluster.stop()


def test_every_knob_is_shown_once_under_its_own_name(chosen):
    assert list(OPTIONS) == list(chosen.knobs)
    assert {title for titles in module.COLUMNS for title in titles} == {option.group for option in OPTIONS.values()}
    for name, knob in chosen.knobs.items():
        assert knob.control.description == name
        assert knob.control.tooltip


def test_what_is_asked_for_last_is_what_counts():
    later, seen, go_on = LatestOnly(), [], Event()
    later.submit(lambda is_asked: go_on.wait(20) and is_asked() and seen.append("first"))
    later.submit(lambda is_asked: is_asked() and seen.append("second"))
    assert later.wait(20)
    go_on.set()
    later.submit(lambda is_asked: later.pause(60, is_asked))
    assert not later.wait(0.05)
    later.mark_done()
    assert later.wait(0)
    assert seen == ["second"]


def test_a_page_that_cannot_run_widgets_gets_the_figure(chosen):
    assert "5 ranks" in chosen._repr_mimebundle_()["text/html"]
    names = ["cluster", "figure", "forecast", "knobs", "machine", "plan", "programs", "start", "wait", "wrong"]
    assert dir(chosen) == names
