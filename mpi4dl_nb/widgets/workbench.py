"""The workbench: the views of one training together, with one selection that all of them show and set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets
import traitlets

from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.halo_points import find_layer_of, find_rank_layer
from mpi4dl_nb.draw.volume import Volume
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.picture import Source
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.figure_widget import FigureView, StillFigure
from mpi4dl_nb.widgets.saved_view import SavedPart
from mpi4dl_nb.widgets.slicer import SEEN, Slicer
from mpi4dl_nb.widgets.timeline import TimelineView


class Selection(traitlets.HasTraits):
    """What is selected in all views of a training: a rank, and of it a layer and an event of the timeline.

    `rank` and `event` are -1, and `layer` is empty, if none is selected. Stage and tile follow from the rank. `counts`
    holds the numbers of ranks and events to select from. Raises PlanError if there is no such rank or event.
    """

    rank = traitlets.Int(-1)
    layer = traitlets.Unicode("")
    event = traitlets.Int(-1)

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"rank": 0, "event": 0}

    @traitlets.validate("rank", "event")
    def _check_number(self, proposal: Any) -> int:
        name, count = proposal["trait"].name, self.counts[proposal["trait"].name]
        if not -1 <= proposal["value"] < count:
            raise PlanError(
                f"{name}={proposal['value']} does not exist: there are {count} {name}s, numbered from 0. Use one of "
                "them, or -1 for none."
            )
        return proposal["value"]


COLUMNS = "repeat(auto-fit, minmax(min(100%, 470px), 1fr))"
"""Two columns where both have room, so that a selection in one view is seen in the others; otherwise one."""


class Workbench(StillFigure, ipywidgets.GridBox):
    """A training's image and network, its timeline beside them, its memory below: `Workbench(training, image)`.

    They have one `selection`: a bar chosen in the timeline lights up its tile on the image and its rank's memory, and a
    tile chosen on the image leads to its rank in the timeline. `image` is shown in tiles, and must have the size of the
    training's images. The timeline is that of the last step; `refresh()` takes over a newer one, and a plan that was
    loaded since, for which the panes are made anew. `slicer`, `timeline` (None before the first step) and `memory` are
    the panes, each of which can also be used alone. `save_picture` is as for a `Slicer`, and so is the `max_height` of
    each pane. Raises ImageError or PlanError.

    >>> import torch
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training, Workbench
    >>> plan = Plan(split_size=1, slice_method="2x2")
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     workbench = Workbench(training, torch.rand(3, 32, 32))
    >>> workbench.selection.rank = 3
    >>> workbench.slicer.tile.value
    3
    """

    def __init__(
        self, training: Training, image: Source | Volume, *, save_picture: bool = True, max_height: int | None = None
    ) -> None:
        self.training, self.selection, self.save_picture = training, Selection(), save_picture
        self._max_height = max_height
        self._following = False
        self.memory = FigureView(tip="memory of the selected rank through a step")
        super().__init__(layout={"grid_template_columns": COLUMNS, "grid_gap": "12px", "align_items": "flex-start"})
        self._take_over_plan(image, ())
        self.selection.observe(self._show_selection)
        self.refresh()

    @property
    def figure(self) -> Drawing:
        """The image in tiles, with the selected layer and tile, for pages without live widgets."""
        return self.slicer.figure

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        part, points = self.slicer.save_part(picture_bytes), self.slicer.points
        timeline = [self.timeline.save_view()] if self.timeline else []
        events = self.timeline.timeline.events if self.timeline else ()
        names = self.timeline.timeline.layers if self.timeline else {}
        memory = [self.training.memory(rank) for rank in (None, *range(self.training.plan.ranks))]
        selection = {
            "timed": bool(timeline),
            "ranks": [point.ranks.ranks for point in points],
            "layers": [find_layer_of(points, names.get(event.name, ""), -1) for event in events],
            "pictures": [(figure.to_png(), figure.alt, figure.outline_paper()) for figure in memory],
        }
        views = [*part.views, *timeline, self.memory.save_view()]
        return SavedPart(views, remarks=part.remarks, links={"selection": selection}, is_side_by_side=True)

    def _take_over_plan(self, image: Source | Volume, panes: Sequence[StillFigure | None]) -> None:
        """Make the slicer for the training's plan, in place of the panes of another plan."""
        plan, recipe = self.training.plan, self.training.recipe
        slicer = Slicer(image, plan, recipe, save_picture=self.save_picture, max_height=self._max_height)
        for pane in filter(None, panes):
            pane.close()
        self.slicer, self._recipe = slicer, recipe
        self.timeline: TimelineView | None = None
        self.slicer.view.observe(self._follow_slicer, ["layer", "tile"])
        self.slicer.view.observe(lambda _: self.update_snapshot(), SEEN)
        with self._follow():
            self.selection.rank, self.selection.layer, self.selection.event = -1, "", -1
        self.selection.counts = {"rank": self.training.plan.ranks, "event": 0}

    def refresh(self) -> None:
        """Show the timeline of the last step, under the training's current plan."""
        if self.training.recipe is not self._recipe:
            self._take_over_plan(self.slicer.image, (self.slicer, self.timeline))
        if self.training.reports:
            shown = self.training.timeline()
            self.selection.counts["event"] = len(shown.events)
            if self.timeline is None:
                self.timeline = TimelineView(shown, max_height=self._max_height)
                self.timeline.observe(self._follow_timeline, ["selected", "rank"])
            else:
                self.timeline.show(shown)
        self._draw_memory()
        # The figure is as wide as both panes above it, since it would be scrolled in the half of a cell.
        self.memory.layout.grid_column = "1 / -1" if self.timeline else None
        self.children = [self.slicer, *([self.timeline] if self.timeline else []), self.memory]

    @contextmanager
    def _follow(self) -> Iterator[bool]:
        """Whether a view was changed by a person, and not by another view that follows the selection."""
        first, self._following = not self._following, True
        try:
            yield first
        finally:
            self._following = not first

    def _follow_slicer(self, _change: Any) -> None:
        with self._follow() as by_hand:
            if by_hand:
                point = self.slicer.point
                self.selection.set_trait("layer", point.name)
                self.selection.set_trait("rank", point.ranks.ranks[self.slicer.view.tile])
                self._show()

    def _follow_timeline(self, _change: Any) -> None:
        with self._follow() as by_hand:
            if by_hand and self.timeline is not None:
                event = self.timeline.event
                self.selection.set_trait("event", self.timeline.selected)
                self.selection.set_trait("rank", self.timeline.rank)
                if event is not None:
                    self.selection.set_trait("layer", self.timeline.timeline.layers.get(event.name, ""))
                self._show()

    def _show_selection(self, change: Any) -> None:
        with self._follow() as by_hand:
            if by_hand:
                points = self.slicer.points
                if change["name"] == "layer":  # the rank follows to the stage of the layer
                    ranks = points[find_layer_of(points, self.selection.layer, self.slicer.view.layer)].ranks.ranks
                    if self.selection.rank not in ranks:
                        self.selection.rank = ranks[0]
                self._show()

    def _show(self) -> None:
        """Show the selection in all views that it concerns."""
        selection, view = self.selection, self.slicer.view
        points = self.slicer.points
        layer = find_layer_of(points, selection.layer, view.layer)
        layer = find_rank_layer(points, selection.rank, layer)
        view.layer = layer
        if selection.rank in points[layer].ranks.ranks:
            view.tile = points[layer].numbers[selection.rank]
        if self.timeline is not None:
            if self.timeline.selected != selection.event:
                self.timeline.selected = selection.event
            self.timeline.rank = selection.rank
        self._draw_memory()

    def _draw_memory(self) -> None:
        rank = self.selection.rank
        self.memory.show(self.training.memory(None if rank < 0 else rank))
