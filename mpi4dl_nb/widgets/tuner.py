"""Widget to select a plan by its cost: all plans for the ranks, predicted, and measured on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape

import ipywidgets
import traitlets
from torch import Tensor, nn

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.tuning import describe_measurements, format_table_html, show_tuning
from mpi4dl_nb.draw.tuning_points import make_points, pack_points
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.candidates import Candidate, replace_measured, sort_candidates
from mpi4dl_nb.engines.predict.explain import Explanation, explain
from mpi4dl_nb.engines.predict.forecast import ORDERS, check_order
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import sgd
from mpi4dl_nb.planning.plan_tuner import PlanTuner, order_for_measurement
from mpi4dl_nb.status_line import show_counts
from mpi4dl_nb.widgets.figure_widget import PageWidget, make_bounded_int, make_button, make_dropdown
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules, PageView, Request
from mpi4dl_nb.widgets.saved_view import SavedPart

# The plans, as a chart of points and as a table in which one row is selected, by mouse or by the arrow keys.


class ChoiceTable(PageView):
    """A widget showing `html`, a table of radio buttons; `chosen` is the value of the selected one.

    With `summary`, the table is folded below that line. `on_choose(value)` is called when the page selects a button,
    and `knows(value)` returns whether there is one with this value.
    """

    _esm = join_modules("tuning/choice_table.js")
    _css = read_style("tuning/choice_table.css")
    html = traitlets.Unicode("").tag(sync=True)
    chosen = traitlets.Unicode("").tag(sync=True)
    summary = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_choose: Callable[[str], None], knows: Callable[[str], bool], **traits: str) -> None:
        super().__init__(**traits)
        self._rules = PageRules(
            settable={"chosen": lambda value, _: knows(value)}, requests={"choose": Request(knows, on_choose)}
        )


class TuningView(BoundedView):
    """A chart of plans by time and memory; `chosen` is the plan, as text, that is selected and described beside it.

    `on_choose(plan)` is called when the page selects a plan, and `on_measure(plan)` when it asks to measure one; not
    while `busy`. Both name the plan: `chosen` may be older, since pages hold state back while the kernel works, and a
    row may have moved. `knows(plan)` returns whether there is such a plan.
    """

    _esm = join_modules("tuning/tuning.js")
    _css = read_style("tuning/tuning.css")
    words = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Unicode("").tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)

    def __init__(
        self, on_choose: Callable[[str], None], on_measure: Callable[[str], None], knows: Callable[[str], bool]
    ) -> None:
        super().__init__()
        self._rules = PageRules(
            settable={"chosen": lambda plan, _: knows(plan)},
            requests={
                "choose": Request(knows, on_choose),
                "measure": Request(lambda plan: not self.busy and knows(plan), on_measure),
            },
        )


def _resolve_tiles(plan: Plan) -> dict[str, object]:
    """Return the options of a plan, with the grids of tiles that they mean: "2x2" is four square tiles."""
    return {**asdict(plan), "slice_method": None, "num_spatial_parts": plan.grids}


class Tuner(PageWidget):
    """The plans for all ranks of a cluster by time and memory, as points and as a table, to measure and to select from.

    The constructor calibrates the cluster and predicts the plans. "Measure the best" trains the first plans on the
    ranks for some steps, "Measure the chosen" the selected one; the table is then sorted again. `plan` is the selected
    plan, the best one if none was selected. A dotted line joins the plans that no other one beats in both time and
    memory, and a dashed line is the memory that a rank may use, `rank_bytes`. `explanation` is the prediction for each
    kind of parallelism. The menu "the best has" orders the plans `by` "speed" or "memory", as in `tune`; `by="memory"`
    from the start also predicts every plan with recomputation. With `neutral_batch`, the speed is that of updates of so
    many images. `max_height` of the chart is in px, by default that of the window. Without a browser, use
    `measure_best()`, `choose(plan)` and `order.value`.
    Raises PlanError or TraceError if no plan can run, and RankError if the cluster is not started.

    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Tuner
    >>> with Cluster(2) as cluster:
    ...     tuner = Tuner(resnet20_v1(), (2, 3, 64, 64), cluster, progress=False)
    ...     tuner.choose(Plan(split_size=1, spatial_size=0, data_parallel=2))
    >>> tuner.plan.data_parallel
    2
    """

    frame_px = 560

    def __init__(
        self,
        model: nn.Module,
        image_shape: Sequence[int],
        cluster: Cluster,
        loss: Loss | None = None,
        optimiser: Optimiser = sgd,
        labels: TensorSpec | Tensor | None = None,
        rank_bytes: int | None = None,
        progress: bool = True,
        neutral_batch: int | None = None,
        by: str = "speed",
        max_height: int | None = None,
    ) -> None:
        check_order(by)
        self.neutral_batch = neutral_batch
        self.tuning = PlanTuner(model, image_shape, cluster, loss, optimiser, labels)
        self.rows = ChoiceTable(self._pick, self._knows)
        best, timed = (
            "how many of the best plans are trained for real",
            "training steps that are timed; the median counts",
        )
        self.top = make_bounded_int("plans to measure", 3, 1, 20, best, "13em")
        self.steps = make_bounded_int("steps of each", 3, 1, 50, timed, "13em")
        self.status, self.why = ipywidgets.HTML(), ipywidgets.HTML()
        self.buttons = [
            make_button(
                "Measure the best", self.measure_best, "Train the best plans of each kind for some steps on the ranks"
            ),
            make_button("Measure the chosen", self.measure_chosen, "Train the chosen plan for some steps on the ranks"),
        ]
        for button in self.buttons:
            button.layout.flex = "0 0 auto"
        orders = [(words, name) for name, words in ORDERS.items()]
        self.order = make_dropdown("the best has", orders, by, "what the plans are ordered by", "24em")
        line = ipywidgets.HBox([self.order, self.top, self.steps, *self.buttons], layout={"flex_flow": "row wrap"})
        super().__init__([line, self.status], TuningView(self._pick, self._measure_plan, self._knows))
        self.view.max_height = max_height
        self.children = (*self.children, self.why, self.rows)
        ipywidgets.link((self.rows, "chosen"), (self.view, "chosen"))
        self.candidates: tuple[Candidate, ...] = ()
        self._chosen: Plan | None = None
        self._figure: Drawing | None = None
        with show_counts("Predicting plans", progress) as seen:
            tuned = self.tuning.find(rank_bytes, seen, neutral_batch, progress, by)
        self.refused, self.too_large = tuned.refused, tuned.too_large
        self._explain(tuned.explanation)
        self._show(tuned.candidates)
        self.order.observe(lambda _change: self._sort(), "value")
        self.rows.observe(lambda change: self._pick(change["new"]), "chosen")

    def _explain(self, explanation: Explanation) -> None:
        self.explanation = explanation
        self.why.value = f"<b>Why: what is predicted of each kind of parallelism</b>{explanation._repr_html_()}"

    def _sort(self) -> None:
        """Order the plans, and explain them, by what the menu says."""
        foreseen = (*(candidate.forecast for candidate in self.candidates), *self.too_large)
        limit = self.explanation.rank_bytes
        self._explain(explain(foreseen, self.refused, limit, self.neutral_batch, self.order.value))
        self._show(sort_candidates(self.candidates, self.neutral_batch, self.order.value))
        self.update_snapshot()

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        views = [self.view.save_view(), self.rows.save_view()]
        return SavedPart(views, links={"same": [[[0, "chosen"], [1, "chosen"]]]})

    @property
    def figure(self) -> Drawing:
        """The plans as a figure, for pages without live widgets."""
        if self._figure is None:
            self._figure = show_tuning(self.candidates, self.explanation.rank_bytes, self.neutral_batch, self.too_large)
        return self._figure

    @property
    def plan(self) -> Plan:
        """The selected plan, or the best one if none was selected yet."""
        return self._chosen or self.candidates[0].plan

    @property
    def chosen(self) -> Candidate:
        """The candidate of the selected plan."""
        return next(candidate for candidate in self.candidates if candidate.plan == self.plan)

    def choose(self, plan: Plan) -> None:
        """Select the plan of a candidate, however its tiles are written. Raises PlanError if no candidate has it."""
        same = (
            candidate.plan for candidate in self.candidates if _resolve_tiles(candidate.plan) == _resolve_tiles(plan)
        )
        self._chosen = self._find(repr(next(same, plan))).plan
        self.rows.chosen = repr(self._chosen)

    def _find(self, text: str) -> Candidate:
        """Return the candidate of a plan that is given as text."""
        for candidate in self.candidates:
            if repr(candidate.plan) == text:
                return candidate
        raise PlanError(f"{text}: this is none of the {len(self.candidates)} plans in the table, which all fit.")

    def _knows(self, text: object) -> bool:
        return any(repr(candidate.plan) == text for candidate in self.candidates)

    def _pick(self, text: str) -> None:
        self._chosen = self._find(text).plan

    def _measure_plan(self, text: str) -> None:
        """Choose and measure the plan that the page names."""
        with self.show_errors():
            self.choose(self._find(text).plan)
        if not self.trouble.text:
            self.measure_chosen()

    def measure_best(self) -> None:
        """Measure `top` candidates on the ranks, the best of each kind first, as `tune` does."""
        self._measure(order_for_measurement(self.candidates, self.explanation)[: self.top.value])

    def measure_chosen(self) -> None:
        """Measure the selected candidate on the ranks."""
        self._measure([self.chosen])

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        self._set_busy(True)  # a second measurement at the same time would slow down the first
        outcome = ""
        try:
            with self.show_errors():
                measured = self.tuning.measure(
                    candidates,
                    self.steps.value,
                    lambda done, of: self._show_text(f"Measuring: step {done} of {of} ..."),
                )
                order = self.neutral_batch, self.order.value
                self._show(sort_candidates(replace_measured(self.candidates, measured), *order))
                outcome = describe_measurements(measured, *order)
        finally:
            self._show_text(outcome)
            self._set_busy(False)
            self.update_snapshot()

    def _set_busy(self, busy: bool) -> None:
        self.view.busy = busy
        for button in self.buttons:
            button.disabled = busy

    def _show_text(self, words: str) -> None:
        self.status.value = f'<div role="status">{escape(words)}</div>'

    def _show(self, candidates: Sequence[Candidate]) -> None:
        """Show the candidates in this order, as points and as a table. The selected plan remains selected."""
        self.candidates = tuple(candidates)
        chosen = self._chosen  # stays None: the best plan is shown as selected until one is
        self._figure = None
        points = make_points(self.candidates, self.neutral_batch, self.explanation.rank_bytes, self.too_large)
        with self.view.hold_sync():  # one message: the selected plan is one of these points
            self.view.words = pack_points(points, self.explanation.rank_bytes)
            self.rows.html, self.rows.chosen = format_table_html(self.candidates, "plan"), repr(self.plan)
        self.rows.summary = f"All {len(self.candidates)} plans as a table"
        self._chosen = chosen
