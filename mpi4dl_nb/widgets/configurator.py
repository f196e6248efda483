"""Widget to configure a plan: every option with its errors, a map of the ranks, and a cluster of the right size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from html import escape
from threading import RLock
from typing import Any

import ipywidgets
from torch import Tensor, nn

from engines.cli.plan_options import find_plan_option, format_value, parse_value
from engines.errors import Mpi4dlError, TraceError
from engines.graph.model_graph import TensorSpec
from engines.graph.trace_cache import Loss, TraceCache
from engines.plan import OPTIONS, Plan
from engines.predict.forecast import Forecast
from engines.predict.machine import Machine
from engines.predict.machines import MACHINES, resolve_machine
from engines.program.program import Program
from mpi4dl_nb.background import IsAsked, LatestOnly
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.draw.rank_map import COUNTING, describe_forecast, draw_ranks
from mpi4dl_nb.plan_cache import CompiledPlan, PlanCache, describe_cluster_fit, pause_gc
from mpi4dl_nb.widgets.figure_widget import (
    BOX_STYLE,
    ErrorAlert,
    FigureWidget,
    make_button,
    make_checkbox,
    make_dropdown,
)

__all__ = ["Configurator", "OptionControl"]

# One option of a plan: its control and its error message.


LABEL = "9.8em"  # wide enough for the longest name, so that boxes are aligned


class OptionControl(ipywidgets.VBox):
    """The control of one option. `value` is what `Plan` takes, whatever form the control shows."""

    def __init__(self, name: str, value: Any, on_change: Callable[[str], None]) -> None:
        self.name, self.trouble, option = name, ErrorAlert(), OPTIONS[name]
        look = {"description": name, "tooltip": option.help, "style": BOX_STYLE}
        if isinstance(value, bool):
            self.control = make_checkbox(name, value, option.help)
        elif option.choices:
            self.control = make_dropdown(name, tuple(option.choices), value, option.help)
        elif option.proposals is None:
            self.control = ipywidgets.IntText(value, **look)  # any integer: an invalid one is reported, not replaced
        else:  # its value changes on Enter, or when the box loses the focus
            look |= {"options": list(option.proposals), "continuous_update": False}
            self.control = ipywidgets.Combobox(value=format_value(value), **look)
        self.control.layout.width = "98%"  # at 100 % the frame on the right would be cut off
        if not isinstance(self.control, ipywidgets.Checkbox):
            self.control.style.description_width = LABEL
        super().__init__([self.control])
        self.control.observe(lambda _: on_change(name), "value")

    @property
    def value(self) -> Any:
        """The current value, as `Plan` takes it."""
        # Options that may be a number or a word, such as `auto`, are written as text.
        if OPTIONS[self.name].proposals is None:
            return self.control.value
        return parse_value(self.control.value) if self.control.value.strip() else None

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = value if OPTIONS[self.name].proposals is None else format_value(value)

    def show_error(self, text: str) -> None:
        """Show an error message below the control, or nothing if it is empty."""
        self.trouble.show(text)
        self.children = [self.control, self.trouble] if text else [self.control]


# All options, the map of the ranks and the cluster.


PATIENCE_S = 600.0  # enough to trace a very large model
COUNT_AFTER_S = 0.3  # without a change, so that counting does not slow down quick changes
COLUMNS = (("Stages", "Pipeline"), ("Tiles", "Numbers"), ("Directions and replicas",))
COLUMN = {"width": "19em", "margin": "0 1.2em 0.6em 0"}
OWN = "this cluster, as calibrated"
NO_MACHINE = "For the time of a step: cluster.calibrate(), or choose a machine that is known."
LAST = "The figure shows the last plan that works."


class Configurator(FigureWidget):
    """All options of a `Plan` for one model, validated at each change.

    `image_shape` is (N, C, H, W) of a batch; `loss`, `labels` and `device` are as for `Training`. `plan` is the last
    valid plan, `programs` are its ranks' programs, and `forecast` is its forecast. `knobs` holds the control of each
    option by name. The button starts `cluster` (one over MPI if none is given) with the number of ranks that the plan
    needs, or resizes it. Times are predicted for the calibrated cluster or the chosen machine. `machine` is a `Machine`
    or the name of a known one.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Configurator, Plan
    >>> configurator = Configurator(resnet20_v1(), (2, 3, 64, 64), plan=Plan(split_size=2, num_spatial_parts=4))
    >>> configurator.knobs["split_size"].value = 3
    >>> configurator.plan.ranks
    6
    """

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
    ) -> None:
        self.cluster = cluster
        known = MACHINES | ({} if machine is None else {resolve_machine(machine).name: resolve_machine(machine)})
        self.machines: Mapping[str, Machine | None] = {OWN: None} | known
        chosen = OWN if machine is None else resolve_machine(machine).name
        self.machine = make_dropdown("machine", list(self.machines), chosen, "whose time is predicted")
        self.machine.observe(lambda _: self._handle_change(""), "value")
        self.planning = PlanCache(TraceCache(model, tuple(image_shape), loss or nn.CrossEntropyLoss(), labels, device))
        plan = plan or Plan()
        self.knobs = {
            each.name: OptionControl(each.name, getattr(plan, each.name), self._handle_change) for each in fields(Plan)
        }
        self.note, self.rank_trouble = ipywidgets.HTML(), ErrorAlert()
        self.start = make_button("", self._start, "start the cluster with the ranks that the plan needs, or resize it")
        self._tracing, self._counting, self._starting = LatestOnly(), LatestOnly(), LatestOnly()
        self._turn, self._is_quiet = RLock(), False
        self._found: CompiledPlan | None = None
        self._error: Mpi4dlError | None = None
        line = ipywidgets.HBox([self.machine, self.start, self.note], layout={"flex_flow": "row wrap"})
        # Each column has the options of some groups; the page shows as many columns side by side as there is room for.
        columns = []
        for titles in COLUMNS:
            parts = [
                part
                for title in titles
                for part in (
                    ipywidgets.HTML(f"<b>{title}</b>"),
                    *(self.knobs[name] for name, option in OPTIONS.items() if option.group == title),
                )
            ]
            columns.append(ipywidgets.VBox(parts, layout=COLUMN))
        options = ipywidgets.Box(columns, layout={"flex_flow": "row wrap"})
        super().__init__([options, line, self.rank_trouble])
        self.view.show(draw_ranks(plan))
        self._handle_change("")

    @property
    def plan(self) -> Plan:
        """The last valid plan. Raises PlanError or TraceError if there has been none yet."""
        return self._wait_compiled().plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._is_quiet = True  # one validation at the end: half-set options may be an invalid plan
        for name, knob in self.knobs.items():
            knob.value = getattr(plan, name)
        self._is_quiet = False
        self._handle_change("")

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
    def wrong(self) -> dict[str, str]:
        """The errors by the name of the option at which they are shown; an empty name for errors of no option."""
        errors = {name: knob.trouble.text for name, knob in self.knobs.items()} | {"": self.trouble.text}
        return {name: text for name, text in errors.items() if text}

    def wait(self, within_s: float = PATIENCE_S) -> bool:
        """Wait for pending traces, counts and starts, up to `within_s` seconds each. Return whether all are done."""
        return all(each.wait(within_s) for each in (self._tracing, self._counting, self._starting))

    def __dir__(self) -> list[str]:
        return ["cluster", "figure", "forecast", "knobs", "machine", "plan", "programs", "start", "wait", "wrong"]

    def _wait_compiled(self) -> CompiledPlan:
        self._tracing.wait(PATIENCE_S)
        if self._found is None:
            raise self._error or TraceError(f"The model was not traced within {PATIENCE_S:.0f} s.")
        return self._found

    def _handle_change(self, touched: str) -> None:
        """Validate the plan after a change of the option `touched`, and show the plan or the error."""
        if self._is_quiet:
            return
        #   this thread             thread of _tracing       thread of _counting
        #   change
        #     | quick to compile?
        #     |-- no -------------> _trace: the model
        #     | yes                   |
        #   _accept                 _accept                  in both cases: the map of the ranks
        #     |-----------------------|--------------------> _count: memory and time of each rank, the full figure
        #
        # Each thread works on the latest request only. `_turn` is held while plan, errors and figure change, so that a
        # result that has become old meanwhile cannot overwrite a newer one.
        with self._turn, pause_gc(), self._show_plan_errors(touched):
            self._tracing.mark_done()  # discards a trace for an earlier plan
            plan = Plan(**{name: knob.value for name, knob in self.knobs.items()})
            if self.planning.is_quick(plan):
                self._accept(plan)
            else:
                self._show_state("Tracing the model for this plan ...")
                self._tracing.submit(lambda is_asked: self._trace(plan, touched, is_asked))

    def _trace(self, plan: Plan, touched: str, is_asked: IsAsked) -> None:
        error = None
        try:
            self.planning.get_compiled(plan)
        except Mpi4dlError as caught:
            error = caught
        with self._turn:
            if is_asked():  # checked under the lock: a newer change discards this result
                with self._show_plan_errors(touched):
                    self._accept(plan, error)

    def _accept(self, plan: Plan, error: Mpi4dlError | None = None) -> None:
        """Make `plan` current and draw it, or raise `error`. Memory and times are counted in the background."""
        if error is not None:
            raise error
        found = self.planning.get_compiled(plan)
        machine = self.machines[self.machine.value] or (self.cluster.machine if self.cluster else None)
        self._counting.mark_done()  # discards numbers for the plan before
        self._found = found if found.is_counted(machine) else found.untimed
        if not found.is_counted(machine):  # the figure shows what is known at once, and "counting ..." for the rest
            self._counting.submit(lambda is_asked: self._count(plan, machine, is_asked))
        self.view.show(
            draw_ranks(plan, self._found.loads, COUNTING, self._describe_forecast() if self._found is found else "")
        )
        self._show_state()

    def _count(self, plan: Plan, machine: Machine | None, is_asked: IsAsked) -> None:
        """Add the memory and the time of each rank to the figure, or the reason why they cannot be counted."""
        if not self._counting.pause(COUNT_AFTER_S, is_asked):
            return
        why = ""
        try:
            found = self.planning.predict_costs(plan, machine, is_asked)
        except Mpi4dlError as error:
            found, why = self.planning.get_compiled(plan).untimed, str(error)
        with self._turn:
            if found and is_asked():
                self._found = found
                self.view.show(draw_ranks(plan, found.loads, foreseen=why or self._describe_forecast()))

    def _describe_forecast(self) -> str:
        """Return the forecast of a step as text, or a hint on how to get one."""
        found = self._found
        return describe_forecast(found.forecast, found.machine) if found.forecast else NO_MACHINE

    @contextmanager
    def _show_plan_errors(self, touched: str) -> Iterator[None]:
        """Show an error of the body at the option that it concerns. The last valid plan remains in use."""
        place = text = ""
        try:
            yield
        except Mpi4dlError as error:
            self._error, text = error, str(error)
            place = find_plan_option(text, touched)
            self._show_state(LAST if self._found else "")
        for name, knob in self.knobs.items():
            knob.show_error(text if name == place else "")
        self.trouble.show("" if place else text)

    def _show_state(self, doing: str = "") -> None:
        """Show the ranks needed and the ranks running, and label the button with the action that it offers."""
        needed = self._found.plan.ranks if self._found else None
        text, self.start.description, helps = describe_cluster_fit(needed, self.cluster)
        self.start.disabled = not helps
        self.note.value = f'<div role="status">{escape(f"{text} {doing}")}</div>'

    def _start(self) -> None:
        ranks = self.plan.ranks
        self._show_state(f"Starting {ranks} ranks ...")
        self.start.disabled = True  # `_show_state` has enabled it, as the ranks do not run yet

        def resize(_is_asked: IsAsked) -> None:
            try:
                self.cluster = self.cluster or Cluster(ranks)
                self.cluster.resize(ranks)
            except Mpi4dlError as error:
                self.rank_trouble.show(str(error))
            else:
                self.rank_trouble.show("")
            self._show_state()

        self._starting.submit(resize)
