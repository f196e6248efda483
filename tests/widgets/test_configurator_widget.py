"""The configurator without a browser: values are set, plans and words come out."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from IPython.core.events import EventManager
from torch import nn

from mpi4dl_nb import Cluster, background, show_ranks
from mpi4dl_nb.background import LatestOnly
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import format_bytes, format_seconds
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.planning.plan_cache import describe_cluster_fit
from mpi4dl_nb.widgets import configurator as module
from mpi4dl_nb.widgets.configurator import Configurator
from mpi4dl_nb.widgets.plan_view import PlanView
from tests.unpacking import unpack_tables

SHAPE = (4, 3, 32, 32)


@pytest.fixture(scope="module")
def made() -> Configurator:
    return Configurator(resnet20_v1(), SHAPE)


@pytest.fixture
def chosen(made) -> Configurator:
    made.image_px.value, made.batch.value, made.machine.value = SHAPE[2], SHAPE[0], module.OWN
    made.plan = Plan()
    assert made.wait()
    return made


def test_a_knob_that_is_turned_is_a_plan_and_a_picture(chosen):
    before = chosen.view.blocks
    chosen.knobs["split_size"].value = 3
    assert chosen.view.blocks != before  # at once, before anything is compiled
    assert chosen.view.shape["summary"] == "3 stages: 2x2 tiles -> 1 rank -> 1 rank; 6 ranks"
    assert chosen.plan == Plan(split_size=3)
    assert len(chosen.programs) == 6
    assert chosen.figure.alt.startswith("3 stages: 2x2 tiles -> 1 rank -> 1 rank; 6 ranks.")
    assert chosen.wait()
    told = show_ranks(Plan(split_size=3), resnet20_v1(), SHAPE).alt
    assert chosen.figure.alt == f"{told} {module.NO_MACHINE}"
    assert chosen.forecast is None


def read_blocks(view) -> list[dict[str, int]]:
    """What the page reads of the blocks of the ranks."""
    *columns, _, sides = unpack_tables(view.blocks).values()
    rows = zip(*(column.tolist() for column in columns), sides[0::4].tolist(), sides[2::4].tolist(), strict=True)
    return [dict(zip(("copy", "stage", "tile", "rank", "top", "bottom"), row, strict=True)) for row in rows]


def test_the_page_has_what_it_draws_of_each_rank_before_it_is_asked(chosen):
    chosen.knobs["slice_method"].value = "2x1"
    assert chosen.wait()
    view = chosen.view
    assert [(each["rank"], each["stage"], each["top"], each["bottom"]) for each in read_blocks(view)] == [
        (0, 0, 0, 16), (1, 0, 16, 32), (2, 1, 0, 32)
    ]  # fmt: skip
    assert view.shape["facts"][:2] == (("3", "ranks"), ("2", "tiles of 16 × 32 px"))
    of_rank = unpack_tables(view.rank_groups)
    for rank, load in enumerate(chosen.planning.get_compiled(chosen.plan).loads):
        lines = view.loads["groups"][of_rank[rank]]["lines"]
        assert f"weights {format_bytes(load.weight_bytes)}" in lines
        assert f"halos {format_bytes(load.halo_bytes)}" in lines
        assert f"memory {format_bytes(load.peak_bytes)}" in lines
        assert f"sends {load.sent.messages} messages, {format_bytes(load.sent.bytes)}" in lines
    assert view.loads["plan"] == view.shape["plan"] == view.gauges["plan"]


def test_what_belongs_to_the_plan_before_is_marked_until_the_new_one_is_counted(chosen, monkeypatch):
    before, go_on = chosen.view.gauges["now"], Event()
    predict = module.PlanCache.predict_costs
    monkeypatch.setattr(module.PlanCache, "predict_costs", lambda *given: go_on.wait(20) and predict(*given))
    chosen.knobs["split_size"].value = 4
    assert chosen.plan.split_size == 4
    view = chosen.view
    assert view.gauges["plan"] != view.shape["plan"] == view.loads["plan"]
    assert (view.gauges["now"], view.status["words"]) == (before, module.WEIGHING)
    go_on.set()
    assert chosen.wait()
    assert view.gauges["plan"] == view.shape["plan"]
    assert (view.gauges["before"], view.status["words"]) == (before, "")
    assert view.gauges["now"] != before


def test_a_size_of_the_images_is_a_knob_and_counts_do_not_wait_for_the_trace(chosen, monkeypatch):
    go_on, get_graph = Event(), TraceCache.get_graph
    monkeypatch.setattr(TraceCache, "get_graph", lambda self, plan: go_on.wait(20) and get_graph(self, plan))
    chosen.image_px.value = 64
    chosen.batch.value = 2
    assert chosen.view.shape["facts"][1] == ("4", "tiles of 32 × 32 px")
    assert chosen.view.status["words"] == module.TRACING
    assert chosen.start.disabled
    go_on.set()
    assert chosen.plan == Plan()
    assert chosen.planning.traces.image_shape == (2, 3, 64, 64)
    assert chosen.programs[0].direction_programs[0].input_shards["images"].tile.shape == (32, 32)
    chosen.batch.value = 0
    assert list(chosen.wrong) == ["batch"]
    assert "batch=0 must be a whole number from 1" in chosen.wrong["batch"]
    chosen.image_px.value, chosen.batch.value = 32, 4
    assert chosen.wrong == {}


def test_the_page_sets_several_knobs_as_one_change(chosen):
    numbers = []
    chosen.view.observe(lambda change: numbers.append(change["new"]["plan"]), "shape")
    chosen.set_texts({"grid": [1, 2], "parts": "2", "halo_d2": True})
    assert chosen.plan == Plan(slice_method="1x2", parts=2, halo_d2=True)
    assert len(set(numbers)) == 1
    assert chosen.view.values["grid"] == [1, 2]
    chosen.view.unobserve_all("shape")
    chosen.set_texts({"parts": "two"})
    assert list(chosen.wrong) == ["parts"]
    assert chosen.view.values["parts"] == "two"


@pytest.mark.parametrize(
    ("shape", "label", "tiles", "grid"),
    [
        ((2, 1, 8, 16, 32), "Image, rows of px", 8, [1, 2, 4]),
        ((2, 1, 64), "Image, columns of px", 4, [4]),
    ],
    ids=["volumes", "signals"],
)
def test_volumes_and_signals_are_configured_like_images(shape, label, tiles, grid):
    axes = len(shape) - 2
    convolution, pool = (nn.Conv3d, nn.AdaptiveAvgPool3d) if axes == 3 else (nn.Conv1d, nn.AdaptiveAvgPool1d)
    model = nn.Sequential(convolution(1, 4, 3, padding=1), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(4, 3))
    widget = Configurator(model, shape, machine="Summit")
    widget.set_texts({"num_spatial_parts": str(tiles)})
    assert widget.view.values["grid"] == list(widget.plan.grids[0]) == grid, "the parts whose halos are smallest"
    controls = {control["name"]: control for control in widget.view.options}
    assert (len(controls["grid"]["axes"]), controls["image_px"]["label"]) == (axes, label)
    widget.set_texts({"grid": [1] * (axes - 1) + [2], "image_px": "32", "batch": "1"})
    assert widget.plan.slice_method == "x".join([*"1" * (axes - 1), "2"])
    assert widget.view.shape["image"] == ("16 × 32 × 64 px" if axes == 3 else "32 px")
    assert (widget.wait(), widget.wrong) == (True, {})
    assert widget.forecast.seconds > 0
    assert len(widget._make_saved_part(0).links["plans"]) > 4
    widget.set_texts({"grid": [1, 2]})
    assert "grid" not in widget.view.values, "the sliders stay where they are"
    assert f"but the image has {axes}" in " ".join(widget.wrong.values())
    widget.close()


def test_the_page_is_answered_also_after_an_interrupt():
    view = PlanView([], ("rows", "columns"), Mock(side_effect=KeyboardInterrupt), Mock())
    view.send = Mock()
    with pytest.raises(KeyboardInterrupt):
        view._handle_event(None, {"set": {"parts": "2"}, "asked": 7}, [])
    view.send.assert_called_once_with({"answered": 7})  # else no control of it would send anything any more


def test_what_does_not_fit_is_called_so():
    small = replace(MACHINES["Summit"], name="small", memory_bytes=1 << 20)
    made = Configurator(resnet20_v1(), SHAPE, machine=small)
    assert made.wait()
    memory = made.view.gauges["now"][0]
    assert (memory["verdict"], memory["limit"]) == ("does not fit", 1 << 20)
    assert "times what a rank has" in memory["reason"]
    assert {group["word"] for group in made.view.loads["groups"]} == {"does not fit"}


@pytest.mark.nightly
def test_the_memory_is_that_of_the_chosen_optimiser():
    made = Configurator(resnet20_v1(), SHAPE, machine="Summit", optimiser=torch.optim.Adam)
    assert made.wait()
    shown = show_ranks(Plan(), resnet20_v1(), SHAPE, machine="Summit", optimiser=torch.optim.Adam)
    assert made.figure.alt == shown.alt
    assert made.figure.alt != show_ranks(Plan(), resnet20_v1(), SHAPE, machine="Summit").alt


@pytest.mark.nightly
def test_the_time_of_each_rank_is_that_of_the_chosen_machine(chosen):
    chosen.machine.value = "Summit"
    assert chosen.wait()
    summit = show_ranks(Plan(), resnet20_v1(), SHAPE, machine="Summit").alt
    assert chosen.figure.alt == summit
    assert f"Predicted on Summit: {format_seconds(chosen.forecast.seconds)} a step" in summit
    chosen.knobs["split_size"].value = 3
    assert chosen.plan.split_size == 3
    assert "predicted" not in chosen.figure.alt  # until it is counted
    assert chosen.wait()
    assert chosen.figure.alt == show_ranks(Plan(split_size=3), resnet20_v1(), SHAPE, machine="Summit").alt
    chosen.knobs["split_size"].value = 2
    assert chosen.figure.alt == summit  # known from before, so that it is there at once
    chosen.machine.value = "Lassen"
    assert chosen.forecast == forecast(chosen.planning.traces.get_graph(Plan()), Plan(), MACHINES["Lassen"])
    assert "Predicted on Lassen" in chosen.figure.alt
    chosen.machine.value = module.OWN
    assert chosen.wait()
    assert chosen.forecast is None
    assert chosen.figure.alt.endswith(module.NO_MACHINE)


@pytest.fixture
def run_cell(monkeypatch):
    """A notebook of which nothing is there but that its cells end."""
    shell = SimpleNamespace()
    shell.events = EventManager(shell, {"post_run_cell": lambda result: None})
    monkeypatch.setattr(background, "get_ipython", lambda: shell)
    run = partial(shell.events.trigger, "post_run_cell", None)
    run.callbacks = shell.events.callbacks["post_run_cell"]
    return run


def test_after_a_cell_it_shows_what_has_become_of_the_cluster(run_cell):
    cluster = Cluster(5, backend="loopback")
    made = Configurator(resnet20_v1(), SHAPE, cluster)
    assert made.forecast is None
    cluster.machine = replace(MACHINES["Summit"], name="as measured", ranks=5)  # what calibrate() leaves there
    run_cell()
    assert made.wait()
    assert made.forecast == forecast(made.planning.traces.get_graph(Plan()), Plan(), cluster.machine)
    assert "Predicted on as measured" in made.figure.alt
    assert made.view.start["label"] == "Start 5 ranks"
    cluster.start()
    run_cell()
    assert made.view.start["label"] == "5 ranks run"
    cluster.stop()
    made.knobs["split_size"].value = 40
    run_cell()
    assert list(made.wrong) == ["split_size"]  # an error stays where it is
    made.knobs["split_size"].value = 2
    assert made.view.start["label"] == "Start 5 ranks"
    shown = made.view.shape["plan"]
    run_cell()
    assert made.view.shape["plan"] == shown  # nothing has changed


@pytest.mark.nightly
def test_a_closed_one_ends_with_its_last_name_though_it_was_called_after_each_cell(run_cell):
    made = Configurator(resnet20_v1(), SHAPE)
    assert made.wait()
    assert len(run_cell.callbacks) == 1
    made.close()
    gone = ref(made)
    del made
    gc.collect()
    assert gone() is None
    run_cell()
    assert run_cell.callbacks == []


@pytest.mark.nightly
def test_a_machine_that_cannot_run_the_model_is_reported_and_its_memory_still_shown():
    slow = replace(MACHINES["Summit"], name="no convolutions", speeds={})
    made = Configurator(resnet20_v1(), SHAPE, machine=slow)
    assert made.wait()
    assert "has no speed for" in made.figure.alt
    assert "in all)" in made.figure.alt
    assert "has no speed for" in made.view.gauges["now"][1]["note"]
    with pytest.raises(PlanError, match="no machine 'sumit'"):
        Configurator(resnet20_v1(), SHAPE, machine="sumit")
    made.machine.value = ["Summit"]
    assert "no machine ['Summit']" in str(made._error)


@pytest.mark.nightly
def test_words_and_several_numbers(chosen):
    chosen.knobs["spatial_size"].value = 2
    chosen.knobs["slice_method"].value = ("2x3", "vertical")
    assert chosen.knobs["slice_method"].text == "2x3, vertical"
    chosen.knobs["num_spatial_parts"].text = "6, 2"
    chosen.knobs["balance"].text = "10, 10"
    assert "balance" in chosen.wrong
    chosen.knobs["balance"].text = "auto"
    expected = Plan(spatial_size=2, slice_method=("2x3", "vertical"), num_spatial_parts=(6, 2))
    assert (chosen.wrong, chosen.plan) == ({}, expected)
    chosen.knobs["num_spatial_parts"].text = ""
    assert chosen.plan.num_spatial_parts is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("split_size", 0, "split_size=0 must be a whole number of at least 1"),
        ("split_size", 40, "the model has only"),
        ("spatial_size", 3, "more spatial stages than the split_size=2"),
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
    before, shown = chosen.knobs[knob].value, chosen.view.blocks
    chosen.knobs[knob].value = value
    assert list(chosen.wrong) == [knob]
    assert said in chosen.wrong[knob]
    assert chosen.knobs[knob].trouble == chosen.wrong[knob]
    assert (chosen.plan, chosen.view.blocks) == (Plan(), shown)
    assert chosen.view.status["words"] == module.LAST
    assert chosen.start.disabled
    assert said in chosen.start.reason
    assert said in chosen.view.start["reason"]
    chosen.start.click()  # does nothing
    assert chosen.cluster is None
    chosen.knobs[knob].value = before
    assert chosen.wrong == {}
    assert chosen.knobs[knob].trouble == ""
    assert chosen.view.status["words"] != module.LAST


@pytest.mark.nightly
def test_what_needs_a_trace_comes_later_and_a_cell_waits_for_it(chosen, monkeypatch):
    chosen.planning.traces._graphs.clear()
    go_on, get_graph = Event(), TraceCache.get_graph
    monkeypatch.setattr(TraceCache, "get_graph", lambda self, plan: go_on.wait(20) and get_graph(self, plan))
    start_s = time.monotonic()
    chosen.knobs["parts"].value = 2
    assert time.monotonic() - start_s < 2
    assert "Tracing" in chosen.view.status["words"]
    chosen.knobs["parts"].value = 3  # before the trace of the other one is there
    assert list(chosen.wrong) == ["parts"]
    chosen.knobs["parts"].value = 4
    go_on.set()
    assert chosen.plan == Plan(parts=4)
    assert "Tracing" not in chosen.view.status["words"]
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
    assert chosen.plan.ranks == 4
    assert (chosen.start.description, chosen.start.disabled) == ("Resize to 4 ranks", False)
    assert "4 ranks needed, 3 running." in chosen.view.start["note"]
    assert "threads of this notebook" in chosen.view.start["place"]
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


def test_a_start_under_way_stays_shown_and_its_end_hides_no_error(chosen, monkeypatch):
    cluster, begun, go_on = Cluster(5, backend="loopback"), Event(), Event()
    monkeypatch.setattr(cluster, "resize", lambda _ranks: begun.set() or go_on.wait(20))
    chosen.cluster = cluster
    chosen.start.click()
    assert begun.wait(20)
    for stages in (3, 2):  # compiled and counted while the ranks start
        chosen.knobs["split_size"].value = stages
        assert chosen.plan.split_size == stages
        assert chosen._counting.wait(60)
        assert chosen.start.disabled
        assert chosen.view.start["reason"] == chosen.view.status["words"] == "Starting 5 ranks ..."
    chosen.knobs["split_size"].value = 40
    go_on.set()
    assert chosen.wait()
    assert "It cannot be started" in chosen.start.reason
    assert chosen.view.status["words"] == module.LAST
    chosen.cluster = None


def test_a_start_that_fails_in_any_way_ends(chosen, monkeypatch):
    chosen.cluster = Cluster(5, backend="loopback")
    monkeypatch.setattr(chosen.cluster, "resize", Mock(side_effect=OSError("no room")))
    monkeypatch.setattr(threading, "excepthook", lambda _given: None)
    chosen.start.click()
    assert chosen.wait()
    assert "5 ranks could not be started" in chosen.view.start["trouble"]
    assert not chosen.start.disabled
    chosen.cluster = None


def test_a_cluster_that_does_not_start_says_why(chosen, monkeypatch):
    cluster = Cluster(5)
    monkeypatch.setattr("mpi4dl_nb.launch.mpi_library.sys.prefix", "/nowhere")
    monkeypatch.setattr("mpi4dl_nb.launch.mpi_library.shutil.which", lambda name: None)
    chosen.cluster = cluster
    chosen.start.click()
    assert chosen.wait()
    assert "There is no mpiexec" in chosen.view.start["trouble"]
    assert not chosen.start.disabled
    chosen.cluster = None


def test_a_dead_rank_is_reported():
    cluster = Cluster(5, backend="loopback").start()
    cluster.dead = "Rank 3: gone."
    text, button, _ = describe_cluster_fit(6, cluster)
    assert button == "Restart with 6 ranks"
    assert "Rank 3: gone." in text
    cluster.stop()


def test_every_knob_is_shown_once_under_its_own_name(chosen):
    assert list(OPTIONS) == list(chosen.knobs)
    shown = chosen.view.options
    main = [each["name"] for each in shown if not each["group"]]
    assert main == ["image_px", "batch", "split_size", "spatial_size", "grid", "machine"]
    folded = {name: option.group for name, option in OPTIONS.items() if name not in main}
    assert {each["name"]: each["group"] for each in shown if each["group"]} == folded
    assert len(shown) == len({each["name"] for each in shown})
    assert all(each["help"] and each["label"] and each["mpi"] for each in shown)
    assert set(chosen.view.values) == {each["name"] for each in shown} | {"split_size", "spatial_size"}


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
    names = ["batch", "cluster", "figure", "forecast", "image_px", "knobs", "machine", "plan", "programs", "start"]
    assert dir(chosen) == [*names, "wait", "wrong"]
