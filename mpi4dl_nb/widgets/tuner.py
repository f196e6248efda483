"""Widget to select a plan by its cost: all plans for the ranks, predicted, and measured on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import anywidget
import ipywidgets
import traitlets
from torch import Tensor, nn

from engines.errors import PlanError
from engines.graph.model_graph import TensorSpec
from engines.plan import Plan
from engines.predict.forecast import Forecast
from engines.train.training import Loss, Optimiser, sgd
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.tuning import describe_measurements, format_table_html, show_tuning
from mpi4dl_nb.draw.tuning_points import make_points, pack_points
from mpi4dl_nb.plan_benchmark import Candidate, replace_measured, sort_candidates
from mpi4dl_nb.plan_tuner import PlanTuner
from mpi4dl_nb.status_line import show_counts
from mpi4dl_nb.widgets.figure_widget import PageWidget, make_bounded_int, make_button, read_code, show_status
from mpi4dl_nb.widgets.page_modules import join_modules, read_style

__all__ = ["ChoiceTable", "Tuner", "TuningView"]

# The plans, as a chart of points and as a table in which one row is selected, by mouse or by the arrow keys.


class ChoiceTable(anywidget.AnyWidget):
    """A widget showing `html`, a table of radio buttons with numbers as values; `index` is the selected value.

    With `summary`, the table is folded below that line.
    """

    _esm = read_code("choice_table.js")
    _css = read_code("choice_table.css")
    html = traitlets.Unicode("").tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
    summary = traitlets.Unicode("").tag(sync=True)


class TuningView(anywidget.AnyWidget):
    """A chart of plans by time and memory; `index` is the plan that is selected and described beside it.

    `on_measure()` is called when the page asks to measure the selected plan; not while `busy`.
    """

    _esm = join_modules("tuning.js")
    _css = read_style("tuning.css")
    words = traitlets.Dict().tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)

    def __init__(self, on_measure: Callable[[], None]) -> None:
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: on_measure() if "measure" in content and not self.busy else None)


class Tuner(PageWidget):
    """The plans for all ranks of a cluster by time and memory, as points and as a table, to measure and to select from.

    The constructor calibrates the cluster and predicts the plans. "Measure the best" trains the first plans on the
    ranks for some steps, "Measure the chosen" the selected one; the table is then sorted again. `plan` is the selected
    plan, the best one if none was selected. A dotted line joins the plans that no other one beats in both time and
    memory, and a dashed line is the memory that a rank may use. `explanation` is the prediction for each kind of
    parallelism. With `neutral_batch`, plans are ordered by the time for an update of that many images, as in `tune`.
    Without a browser, use `measure_best()` and `choose(plan)`.
    Raises PlanError or TraceError if no plan can run, and RankError if the cluster is not started.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Tuner
    >>> with Cluster(2) as cluster:
    ...     tuner = Tuner(resnet20_v1(), (2, 3, 64, 64), cluster, progress=False)
    ...     tuner.choose(Plan(split_size=1, spatial_size=0, data_parallel=2))
    >>> tuner.plan.data_parallel
    2
    """

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
    ) -> None:
        self.neutral_batch = neutral_batch
        self.tuning = PlanTuner(model, image_shape, cluster, loss, optimiser, labels)
        self.rows = ChoiceTable()
        best, timed = (
            "how many of the best plans are trained for real",
            "training steps that are timed; the median counts",
        )
        self.top = make_bounded_int("plans to measure", 3, 1, 20, best, "13em")
        self.steps = make_bounded_int("steps of each", 3, 1, 50, timed, "13em")
        self.status, self.why = ipywidgets.HTML(), ipywidgets.HTML()
        self.buttons = [
            make_button("Measure the best", self.measure_best, "Train the best plans for some steps on the ranks"),
            make_button("Measure the chosen", self.measure_chosen, "Train the chosen plan for some steps on the ranks"),
        ]
        for each in self.buttons:
            each.layout.flex = "0 0 auto"
        line = ipywidgets.HBox([self.top, self.steps, *self.buttons], layout={"flex_flow": "row wrap"})
        super().__init__([line, self.status], TuningView(self.measure_chosen))
        self.children = (*self.children, self.why, self.rows)
        ipywidgets.link((self.rows, "index"), (self.view, "index"))
        self.candidates: tuple[Candidate, ...] = ()
        self._chosen: Plan | None = None
        self._figure: Drawing | None = None
        with show_status("Measuring how fast these ranks compute and send: about a minute ..."):
            cluster.calibrate()
        with show_counts("Predicting plans", progress) as seen:
            found = self.tuning.find(rank_bytes, seen, neutral_batch)
        self.explanation, self.refused, self.too_large = found.explanation, found.refused, found.too_large
        self.why.value = f"<b>Why: what is predicted of each kind of parallelism</b>{self.explanation._repr_html_()}"
        self._show(found.candidates)

        def pick(_change: object) -> None:
            self._chosen = self.candidates[self.rows.index].plan

        self.rows.observe(pick, "index")

    @property
    def figure(self) -> Drawing:
        """The plans as a figure, for pages without live widgets."""
        if self._figure is None:
            self._figure = show_tuning(self.candidates, *self._limits)
        return self._figure

    @property
    def _limits(self) -> tuple[int | None, int | None, tuple[Forecast, ...]]:
        return self.explanation.rank_bytes, self.neutral_batch, self.too_large

    @property
    def plan(self) -> Plan:
        """The selected plan, or the best one if none was selected yet."""
        return self._chosen or self.candidates[0].plan

    @property
    def chosen(self) -> Candidate:
        """The candidate of the selected plan."""
        return next(each for each in self.candidates if each.plan == self.plan)

    def choose(self, plan: Plan) -> None:
        """Select the plan of a candidate. Raises PlanError if no candidate has it."""
        plans = [each.plan for each in self.candidates]
        if plan not in plans:
            raise PlanError(f"{plan.summary}: this is none of the {len(plans)} plans in the table.")
        self.rows.index = plans.index(plan)

    def measure_best(self) -> None:
        """Measure the first `top` candidates on the ranks."""
        self._measure(self.candidates[: self.top.value])

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
                self._show(sort_candidates(replace_measured(self.candidates, measured), self.neutral_batch))
                outcome = describe_measurements(measured)
        finally:
            self._show_text(outcome)
            self._set_busy(False)
            self.update_snapshot()

    def _set_busy(self, busy: bool) -> None:
        self.view.busy = busy
        for each in self.buttons:
            each.disabled = busy

    def _show_text(self, words: str) -> None:
        self.status.value = f'<div role="status">{escape(words)}</div>'

    def _show(self, candidates: Sequence[Candidate]) -> None:
        """Show the candidates in this order, as points and as a table. The selected plan remains selected."""
        self.candidates = tuple(candidates)
        place = [each.plan for each in self.candidates].index(self.plan)
        chosen = self._chosen  # the index changes with the order, and not the selection
        self._figure = None
        points = make_points(self.candidates, self.neutral_batch, self.explanation.rank_bytes, self.too_large)
        with self.view.hold_sync():  # one message: the index is that of these points
            self.view.words = pack_points(points, self.explanation.rank_bytes)
            self.rows.html, self.rows.index = format_table_html(self.candidates, "plan"), place
        self.rows.summary = f"All {len(self.candidates)} plans as a table"
        self._chosen = chosen
