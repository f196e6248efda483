"""Widget to configure a plan: every option with its errors, a picture of the ranks, and a cluster of the right size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count
from threading import RLock
from typing import Any

import ipywidgets
from torch import Tensor, nn

from mpi4dl_nb.background import IsAsked, LatestOnly, call_after_cells
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.plan_picture import (
    MOST_BLOCKS,
    PlanShape,
    count_plan,
    describe_load_groups,
    get_side,
    measure_gauges,
    resize_shape,
)
from mpi4dl_nb.draw.rank_map import COUNTING, describe_forecast, draw_ranks
from mpi4dl_nb.engines.cli.plan_options import GRID, describe_texts, find_plan_option
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError, TraceError
from mpi4dl_nb.engines.formatting import format_count
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Grid
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import MACHINES, resolve_machine
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import Task, sgd
from mpi4dl_nb.planning.plan_cache import CompiledPlan, PlanCache, describe_cluster_fit, describe_place, pause_gc
from mpi4dl_nb.planning.plan_table import list_near_plans, make_plan_table
from mpi4dl_nb.widgets.figure_widget import StillFigure
from mpi4dl_nb.widgets.plan_view import BATCH, IMAGE_PX, MACHINE, Knob, PlanView, StartButton
from mpi4dl_nb.widgets.saved_page import NO_KERNEL
from mpi4dl_nb.widgets.saved_view import SavedPart

PATIENCE_S = 600.0  # enough to trace a very large model
COMPILE_AFTER_S, TRACE_AFTER_S, COUNT_AFTER_S = 0.1, 0.4, 0.2  # without a change, so that a drag is not slowed down
MOST_PX, MOST_IMAGES = 1 << 17, 1 << 20
OWN = "this cluster, as calibrated"
NO_MACHINE = "For the time of a step: cluster.calibrate(), or choose a machine that is known."
LAST = "The picture shows the last plan that works."
TRACING = "Tracing and compiling the model for this plan ..."
WEIGHING = "Counting the memory and predicting the time ..."


class Configurator(StillFigure, ipywidgets.VBox):
    """All options of a `Plan` for one model, validated at each change.

    `image_shape` is that of a batch: (N, C, H, W), of volumes (N, C, D, H, W), of signals (N, C, L). `loss`, `labels`,
    `device` and `optimiser`, whose state is part of the memory, are as for `Training`. `plan` is the last valid plan,
    `programs` are its ranks' programs, `forecast` is its forecast, and `figure` shows it without a page.
    `knobs` holds the knob of each option by name; `image_px` and `batch` are those of the images: rows of pixels (of
    signals positions), and images in a batch. The button starts `cluster` (one over MPI if none is given) with the
    number of ranks that the plan needs, or resizes it. Times are predicted for the calibrated cluster or the chosen
    machine. `machine` is a `Machine` or the name of a known one. `max_height` is in px, by default that of the window.

    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Configurator, Plan
    >>> configurator = Configurator(resnet20_v1(), (2, 3, 64, 64), plan=Plan(split_size=2, num_spatial_parts=4))
    >>> configurator.knobs["split_size"].value = 3
    >>> configurator.plan.ranks
    6
    """

    frame_px = 720

    def __init__(
        self,
        model: nn.Module,
        image_shape: Sequence[int],
        cluster: Cluster | None = None,
        plan: Plan | None = None,
        loss: Loss | None = None,
        labels: TensorSpec | Tensor | None = None,
        device: str = "auto",
        machine: Machine | str | None = None,
        optimiser: Optimiser = sgd,
        max_height: int | None = None,
    ) -> None:
        self.cluster = cluster
        known = MACHINES | ({} if machine is None else {resolve_machine(machine).name: resolve_machine(machine)})
        self.machines: Mapping[str, Machine | None] = {OWN: None, **known}
        self._first = PlanCache(Task.of(model, image_shape, loss, optimiser, labels, device))
        shape = self._first.traces.image_shape
        self.planning, plan = self._first, plan or Plan()
        self.knobs = {
            field.name: Knob(field.name, getattr(plan, field.name), self._handle_change) for field in fields(Plan)
        }
        self.image_px, self.batch = (
            Knob(*setting, self._handle_change) for setting in ((IMAGE_PX, get_side(shape)), (BATCH, shape[0]))
        )
        self.machine = Knob(MACHINE, OWN if machine is None else resolve_machine(machine).name, self._handle_change)
        self._all = self.knobs | {knob.name: knob for knob in (self.image_px, self.batch, self.machine)}
        self.start = StartButton(self._start)
        self._compiling, self._counting, self._starting = LatestOnly(), LatestOnly(), LatestOnly()
        self._turn, self._is_quiet, self._numbers = RLock(), False, count(1)
        self._found: CompiledPlan | None = None
        self._shown: tuple[int, str, PlanShape] | None = None  # of the last valid plan
        self._gauges: dict[str, Any] = {"now": [], "before": []}
        self._error: Mpi4dlError | None = None
        self._plan, self._foreseen, self._rank_trouble = plan.fit(shape[2:]), "", ""
        self._starts = self._doing = self._wrong = ""  # status texts of a start, of other work, and of an error
        axes = AXIS_NAMES[-len(shape[2:]) :]
        self.view = PlanView(list(self.machines), axes, self.set_texts, self.start.click)
        self.view.max_height = max_height
        super().__init__([self.view])
        self._handle_change("")
        call_after_cells(self._follow_cluster)

    @property
    def plan(self) -> Plan:
        """The last valid plan. Raises PlanError or TraceError if there has been none yet."""
        return self._wait_compiled().plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        with self._change_together(""):
            for name, knob in self.knobs.items():
                knob.value = getattr(plan, name)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program of each rank for a training step under that plan."""
        return self._wait_compiled().programs

    @property
    def forecast(self) -> Forecast | None:
        """The forecast of a step of that plan; None if no machine is calibrated or chosen. Waits for the prediction."""
        self._wait_compiled()
        self._counting.wait(PATIENCE_S)
        return self._wait_compiled().forecast

    @property
    def figure(self) -> Drawing:
        """The last valid plan as a figure, with what is counted of it by now."""
        compiled = self._found
        return (
            draw_ranks(compiled.plan, compiled.loads, COUNTING, self._foreseen) if compiled else draw_ranks(self._plan)
        )

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        plan = self.plan
        return self._save_plans(plan, self._list_near(plan), shows_counts=True)

    def _make_framed_part(self) -> SavedPart:
        """Return the plans near this one that are computed by now: a cell that shows the widget waits for no others."""
        machine, compiled = self._resolve_machine(), self._found
        if compiled is None or not compiled.is_counted(machine):
            raise PlanError("The costs of this plan are still being counted.")
        plan = compiled.plan
        near = [other for other in self._list_near(plan) if self.planning.has_counted(other, machine)]
        return self._save_plans(plan, list(dict.fromkeys([plan, *near])), shows_counts=False)

    def _list_near(self, plan: Plan) -> list[Plan]:
        return list_near_plans(plan, axes=len(self.planning.traces.image_shape[2:]))

    def _save_plans(self, plan: Plan, plans: Sequence[Plan], shows_counts: bool) -> SavedPart:
        table = make_plan_table(self.planning, plans, self._resolve_machine(), NO_MACHINE, shows_counts)
        saved = self.view.save_view()
        start = self.view.start | {"disabled": True, "reason": NO_KERNEL, "trouble": "", "place": "", "note": ""}
        view = replace(saved, values=saved.values | {"start": start, "status": {}, "errors": {}})
        remark = (
            f"The page has {format_count(len(table), 'plan')}: {plan.summary}, and those near it. "
            "Controls that lead to no other are grey."
        )
        return SavedPart([view], remarks=[remark], links={"plans": table})

    @property
    def wrong(self) -> dict[str, str]:
        """The errors by the name of the knob that causes them; an empty name for errors of none. Waits for them."""
        self._compiling.wait(PATIENCE_S)
        return {name: text for name, text in self.view.errors.items() if text}

    def wait(self, within_s: float = PATIENCE_S) -> bool:
        """Wait for pending traces, counts and starts, up to `within_s` seconds each. Return whether all are done."""
        return all(work.wait(within_s) for work in (self._compiling, self._counting, self._starting))

    def set_texts(self, texts: Mapping[str, Any]) -> None:
        """Set several knobs at once, from what a page shows of them. `grid` is the number of tiles along each axis."""
        with self._change_together(next(iter(texts), "")):
            for name, text in texts.items():
                if name == GRID:
                    self.knobs["slice_method"].value, self.knobs["num_spatial_parts"].value = str(Grid(*text)), None
                elif name in self._all:
                    self._all[name].text = text

    def __dir__(self) -> list[str]:
        names = ["batch", "cluster", "figure", "forecast", "image_px", "knobs", "machine", "plan", "programs", "start"]
        return [*names, "wait", "wrong"]

    def _follow_cluster(self) -> None:
        """Show the ranks and the times anew if the cluster was calibrated, resized, stopped or lost since.

        In a notebook, this is called after each cell. A start by the button shows its own end.
        """
        if self._starting.wait(0) and self._seen != self._get_cluster_state():
            self._handle_change(self._touched)

    def _get_cluster_state(self) -> tuple[object, ...]:
        return (self.cluster.machine, self.cluster.n, self.cluster.state) if self.cluster else ()

    @contextmanager
    def _change_together(self, touched: str) -> Iterator[None]:
        """Validate once at the end: half-set options may be an invalid plan."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
        self._handle_change("slice_method" if touched == GRID else touched)

    def _wait_compiled(self) -> CompiledPlan:
        self._compiling.wait(PATIENCE_S)
        if self._found is None:
            raise self._error or TraceError(f"The model was not traced within {PATIENCE_S:.0f} s.")
        return self._found

    def _handle_change(self, touched: str) -> None:
        """Validate the plan after a change of the knob `touched`, and show its counts or the error."""
        self._touched = touched
        if self._is_quiet:
            return
        #   this thread               thread of _compiling        thread of _counting
        #   change
        #   counts of the plan
        #     | compiled before?
        #     |-- no ---------------> _compile
        #     | yes                     |
        #   _accept                   _accept                     in both cases: weights and messages of each rank
        #     |-------------------------|-----------------------> _count: memory and time of each rank, the gauges
        #
        # Each thread works on the latest request only. `_turn` is held while plan, errors and page change, so that a
        # result that has become old meanwhile cannot overwrite a newer one.
        with self._turn, pause_gc(), self._show_plan_errors(touched):
            self._compiling.mark_done()  # discards what is under way for an earlier plan
            self._counting.mark_done()
            plan_number = next(self._numbers)
            for knob, most in ((self.image_px, MOST_PX), (self.batch, MOST_IMAGES)):
                if type(knob.value) is not int or not 0 < knob.value <= most:
                    raise PlanError(f"{knob.name}={knob.value!r} must be a whole number from 1 to {most:,}.")
            shape = resize_shape(self._first.traces.image_shape, self.image_px.value, self.batch.value)
            planning = self._first.with_shape(shape)
            plan = Plan(**{name: knob.value for name, knob in self.knobs.items()}).fit(shape[2:])
            if plan.ranks > MOST_BLOCKS:
                raise PlanError(
                    f"{plan.summary} has {plan.ranks:,} ranks, and a page shows at most {MOST_BLOCKS:,}. Choose fewer "
                    "tiles, stages or replicas; forecast() predicts larger plans."
                )
            shown = plan_number, plan.summary, count_plan(plan, planning.traces.image_shape)
            self._resolve_machine()
            if planning.has_compiled(plan):
                self._accept(planning, plan, shown)
            else:
                self.view.show_shape(*shown)
                self._show_state(TRACING)
                self._compiling.submit(lambda is_asked: self._compile(planning, plan, shown, touched, is_asked))

    def _resolve_machine(self) -> Machine | None:
        """Return the machine whose time is predicted; None if the cluster is not calibrated. Raises PlanError."""
        name = self.machine.value
        machine = self.machines[name] if isinstance(name, str) and name in self.machines else resolve_machine(name)
        return machine or (self.cluster.machine if self.cluster else None)

    def _compile(
        self, planning: PlanCache, plan: Plan, shown: tuple[int, str, PlanShape], touched: str, is_asked: IsAsked
    ) -> None:
        error = None
        try:
            quick = planning.traces.has_graph(plan)
            if not self._compiling.pause(COMPILE_AFTER_S if quick else TRACE_AFTER_S, is_asked):
                return
            with pause_gc():
                planning.get_compiled(plan, is_asked)
        except Mpi4dlError as caught:
            error = caught
        with self._turn:
            if is_asked():  # checked under the lock: a newer change discards this result
                with self._show_plan_errors(touched):
                    if error is not None:
                        raise error
                    self._accept(planning, plan, shown)

    def _accept(self, planning: PlanCache, plan: Plan, shown: tuple[int, str, PlanShape]) -> None:
        """Make `plan` current and show its ranks. Memory and times are counted in the background."""
        compiled, machine = planning.get_compiled(plan), self._resolve_machine()
        is_counted = compiled.is_counted(machine)
        self.planning, self._shown, self._foreseen = planning, shown, ""
        self._found = current = compiled if is_counted else compiled.untimed
        self._gauges = {"plan": shown[0], "now": self._gauges["now"], "before": self._gauges["now"]}
        self.view.show_shape(*shown)
        self._show_costs(shown[0], current, machine, "", is_counted)
        if is_counted:
            self._counting.submit(self._save_counted)
        else:
            self._counting.submit(lambda is_asked: self._count(planning, plan, shown[0], machine, is_asked))

    def _save_counted(self, is_asked: IsAsked) -> None:
        if self._counting.pause(COUNT_AFTER_S, is_asked):
            self.update_snapshot()

    def _count(
        self, planning: PlanCache, plan: Plan, plan_number: int, machine: Machine | None, is_asked: IsAsked
    ) -> None:
        """Show the memory and the time of each rank, or the reason why they cannot be counted."""
        if not self._counting.pause(COUNT_AFTER_S, is_asked):
            return
        for wanted in (None, machine) if machine else (None,):  # first the memory, then the time too
            why = ""
            compiled: CompiledPlan | None
            try:
                with pause_gc():
                    compiled = planning.predict_costs(plan, wanted, is_asked)
            except Mpi4dlError as error:
                compiled, why = planning.get_compiled(plan).untimed, str(error)
            with self._turn:
                if compiled is None or not is_asked():
                    return
                self._found = compiled
                self._show_costs(plan_number, compiled, machine, why, bool(why) or wanted is machine)
            if why:
                break
        self.update_snapshot()

    def _show_costs(
        self, plan_number: int, compiled: CompiledPlan, machine: Machine | None, why: str, is_complete: bool
    ) -> None:
        """Show the loads of the current plan's ranks, and its gauges once they are complete."""
        self.view.show_loads(plan_number, *describe_load_groups(compiled.loads, machine))
        if is_complete:
            known = describe_forecast(compiled.forecast, machine) if compiled.forecast and machine else NO_MACHINE
            self._foreseen = why or known
            gauges = measure_gauges(compiled.loads, machine, compiled.forecast, why or NO_MACHINE)
            self._gauges = self._gauges | {"plan": plan_number, "now": list(gauges)}
            self.view.gauges = self._gauges
        self._show_state("" if is_complete else WEIGHING)

    @contextmanager
    def _show_plan_errors(self, touched: str) -> Iterator[None]:
        """Show an error of the body at the knob that it concerns. The last valid plan remains in use."""
        knob_name = text = ""
        try:
            yield
        except Mpi4dlError as error:
            self._error, text = error, str(error)
            named = (name for name in (IMAGE_PX, BATCH, MACHINE) if text.startswith(f"{name}="))
            knob_name = next(named, find_plan_option(text, touched))
            if self._shown:
                self.view.show_shape(*self._shown)
            self._show_state(LAST if self._found else "", text)
        for name, knob in self._all.items():
            knob.trouble = text if name == knob_name else ""
        self.view.errors = {knob_name: text} if text else {}
        sizes = self.planning.traces.image_shape[2:]
        self.view.values = describe_texts({name: knob.value for name, knob in self._all.items()}, sizes)

    def _show_state(self, doing: str = "", wrong: str = "") -> None:
        """Show the ranks needed and the ranks running, and label the button with the action that it offers."""
        self._doing, self._wrong, self._seen = doing, wrong, self._get_cluster_state()
        needed = self._found.plan.ranks if self._found else None
        text, label, helps = describe_cluster_fit(needed, self.cluster)
        unready = "" if self._found and doing != TRACING else "This plan is being checked ..."
        reason = self._starts or (f"It cannot be started: {wrong}" if wrong else unready)
        self.start.description, self.start.disabled, self.start.reason = label, bool(reason) or not helps, reason
        self.view.start = {
            "label": label, "disabled": self.start.disabled, "reason": reason,
            "place": describe_place(self.cluster), "note": text, "trouble": self._rank_trouble,
        }  # fmt: skip
        self.view.status = {"words": doing or self._starts}

    def _show_start(self, starts: str, trouble: str = "") -> None:
        """Show that ranks start, or (if `starts` is empty) that none do; all else that is shown stays."""
        with self._turn:
            self._starts, self._rank_trouble = starts, trouble
            self._show_state(self._doing, self._wrong)

    def _start(self) -> None:
        ranks = self.plan.ranks
        self._show_start(f"Starting {ranks} ranks ...")

        def resize(_is_asked: IsAsked) -> None:
            trouble = f"{ranks} ranks could not be started: the notebook's log has the error."
            try:
                self.cluster = self.cluster or Cluster(ranks)
                self.cluster.resize(ranks)
                trouble = ""
            except Mpi4dlError as error:
                trouble = str(error)
            finally:
                self._show_start("", trouble)

        self._starting.submit(resize)
