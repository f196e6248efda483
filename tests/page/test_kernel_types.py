"""What the kernel sends to a page has the types with which the page's modules are checked: TypeScript compares them."""

from __future__ import annotations

import json
from pathlib import Path

import ipywidgets
import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Configurator, Plan, Slicer, Stepper, TimelineView, Training, forecast
from mpi4dl_nb.draw.rank_map import draw_ranks
from mpi4dl_nb.draw.tuning_points import make_points, pack_points
from mpi4dl_nb.engines.predict.candidates import Candidate
from mpi4dl_nb.widgets.figure_widget import FigureView, RangeBar
from mpi4dl_nb.widgets.page_modules import FOLDER
from mpi4dl_nb.widgets.page_view import PageView
from mpi4dl_nb.widgets.tuner import ChoiceTable, TuningView
from tests.page.test_page_modules import run_node

LINT = Path(__file__).parent / "lint"
TYPESCRIPT = LINT / "node_modules/typescript/bin/tsc"
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
PLAN, SHAPE = Plan(split_size=2, spatial_size=1, slice_method="1x2", balance=(1, 1)), (2, 3, 16, 24)
BYTES = "bytes of the kernel"

pytestmark = pytest.mark.skipif(not TYPESCRIPT.exists(), reason="`make lint` installs TypeScript")


def read_state(view: PageView) -> dict[str, object]:
    """Return the values of a view that are its own, and not those of every widget."""
    names = set(view.trait_names(sync=True)) - set(ipywidgets.DOMWidget.class_trait_names(sync=True))
    return {name: getattr(view, name) for name in sorted(names) if not name.startswith("_")}


def write_value(value: object) -> str:
    """Return a value as an expression of TypeScript."""
    text = json.dumps(value, default=lambda each: BYTES if isinstance(each, bytes) else list(each))
    return text.replace(json.dumps(BYTES), "new DataView(new ArrayBuffer(0))")


def check_types(folder: Path, sent: list[tuple[str, object]]) -> None:
    """Let TypeScript compare values with the names of their types."""
    lines = [f"export const value{at}: {name} = {write_value(value)};\n" for at, (name, value) in enumerate(sent)]
    folder.joinpath("sent.ts").write_text("".join(lines), encoding="utf-8")
    settings = {"extends": str(LINT / "tsconfig.json"), "include": [f"{FOLDER}/*/*.d.ts", "sent.ts"]}
    folder.joinpath("tsconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    run_node(str(TYPESCRIPT), "-p", str(folder))


def test_a_value_of_another_type_is_found(tmp_path):
    with pytest.raises(AssertionError, match="TS2322"):
        check_types(tmp_path, [("ChoiceValues", {"html": "", "chosen": 3, "summary": ""})])


def test_forecasts_and_pictures(tmp_path):
    found = forecast(MODEL, PLAN, SHAPE, "Summit")
    tuning = TuningView(print, print, bool)
    tuning.words = pack_points(make_points([Candidate(found)], None, 10**9, [found]), 10**9)
    figure = FigureView()
    figure.show(draw_ranks(PLAN))
    views = {
        "TimelineValues": TimelineView(found.timeline, PLAN, found.timeline),
        "SlicerValues": Slicer(np.zeros((16, 24, 3), np.uint8), PLAN, MODEL).view,
        "TuningValues": tuning,
        "ChoiceValues": ChoiceTable(print, bool),
        "RangeValues": RangeBar(),
        "FigureValues": figure,
    }
    check_types(tmp_path, [(name, read_state(view)) for name, view in views.items()])


def test_a_plan(tmp_path):
    configurator = Configurator(MODEL, SHAPE, plan=PLAN, machine="Summit")
    assert configurator.wait()
    check_types(tmp_path, [("PlanPageValues", read_state(configurator.view))])


def test_a_step(tmp_path):
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        labels = torch.zeros((2, 16, 24), dtype=torch.long)
        stepper = Stepper(Training(MODEL, PLAN, cluster, SHAPE), torch.zeros(SHAPE), labels)
        for _ in range(6):
            stepper._handle_key("n")
        frames = [("FrameMeta", frame.meta) for frame in stepper.record.frames]
        assert len(frames) == 7
        check_types(tmp_path, [("StepperValues", read_state(stepper.view)), *frames])
        stepper.close()
