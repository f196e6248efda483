"""Widget of a step's timeline: zooms, pans, searches and describes events on the page."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import traitlets

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.timeline import show_timeline
from mpi4dl_nb.draw.timeline_rows import make_timeline_rows
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent
from mpi4dl_nb.widgets.figure_widget import StillFigure
from mpi4dl_nb.widgets.page_modules import join_modules, read_style
from mpi4dl_nb.widgets.page_view import BoundedView, PageRules
from mpi4dl_nb.widgets.saved_view import SavedPart


class TimelineView(StillFigure, BoundedView):
    """A training step on all ranks, to zoom into: a row per rank, with its work above its messages and waiting.

    The wheel zooms at the pointer, dragging moves, and a click selects an event; by keyboard: w, s, a, d, the arrow
    keys, + and -, and 0 for all of the step. Pointing at an event shows its layer, times and bytes, and how long it was
    `predicted` to take, whose bars lie thin below the measured ones. A text box searches for layers and kinds.
    `plan` adds each rank's stage and tile. `layers` is the module of each instruction, by its name; a training's own
    timeline knows its plan and layers. `selected` is the place of an event in `timeline.events`, -1 for none, and
    `rank` that of the event or of the chosen row. `max_height` is in px, by default that of the window.
    `show_timeline` draws the same as a figure. Raises PlanError if it does, and if `predicted` has ranks that were not
    measured.

    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, TimelineView, forecast
    >>> plan = Plan(split_size=2, num_spatial_parts=4)
    >>> view = TimelineView(forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit").timeline, plan)
    >>> view.selected = 3
    >>> view.event.rank == view.rank == 0
    True
    """

    frame_px = 480
    _esm = join_modules("timeline/timeline.js")
    _css = read_style("timeline/timeline.css")
    words = traitlets.Dict().tag(sync=True)
    columns = traitlets.Bytes(b"").tag(sync=True)
    serial = traitlets.Int(0).tag(sync=True)  # another one for each step: two steps may differ in their times only
    selected = traitlets.Int(-1).tag(sync=True)
    rank = traitlets.Int(-1).tag(sync=True)

    def __init__(
        self,
        timeline: Timeline,
        plan: Plan | None = None,
        predicted: Timeline | None = None,
        layers: Mapping[str, str] | None = None,
        *,
        max_height: int | None = None,
    ) -> None:
        super().__init__(max_height=max_height)
        self._serials = count(1)
        self._rules = PageRules(
            settable={
                "selected": lambda event, _: -1 <= event < len(self.timeline.events),
                "rank": lambda rank, _: rank == -1 or rank in self.timeline.ranks,
            }
        )
        self.show(timeline, plan, predicted, layers)

    def show(
        self,
        timeline: Timeline,
        plan: Plan | None = None,
        predicted: Timeline | None = None,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        """Show another step in place of the current one; the arguments are those of the constructor."""
        plan = plan or getattr(timeline, "plan", None)
        rows = make_timeline_rows(timeline, plan, predicted, timeline.layers if layers is None else layers)
        self.timeline, self.plan, self.predicted = timeline, plan, predicted
        self._figure: Drawing | None = None
        with self.hold_sync():  # one message, so that no numbers meet the words of another step
            self.selected, self.rank = -1, -1
            self.words, self.columns = rows.words, rows.columns
            self.serial = next(self._serials)  # last: the page reads the step when this changes
        self.update_snapshot()

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        return SavedPart([self.save_view()])

    @property
    def event(self) -> TimelineEvent | None:
        """The selected event, or None."""
        return None if self.selected < 0 else self.timeline.events[self.selected]

    @property
    def figure(self) -> Drawing:
        """The whole step as a figure, for pages without live widgets."""
        if self._figure is None:
            self._figure = show_timeline(self.timeline, self.plan, self.predicted)
        return self._figure

    @traitlets.validate("selected")
    def _check_selected(self, proposal: Any) -> int:
        if not -1 <= proposal["value"] < len(self.timeline.events):
            raise PlanError(
                f"selected={proposal['value']} is none of the {len(self.timeline.events)} events: give the place of an "
                "event in timeline.events, or -1 for none."
            )
        return proposal["value"]

    @traitlets.observe("selected")
    def _follow_selected(self, _change: object) -> None:
        if self.event is not None:
            self.rank = self.event.rank
