"""The slicer: a picture in tiles, and what a layer borrows across their seams, down to single pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any

import ipywidgets
from torch import nn

from engines.images.picture import Source, open_image
from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.training import Recipe
from mpi4dl_nb.draw.halos import HaloPoint, traced
from mpi4dl_nb.draw.layers import Layers, bare_point, fused, stage_ranks
from mpi4dl_nb.draw.places import (
    ARROWS,
    NEAR_PX,
    closer,
    farther,
    fraction_of,
    nearest_own,
    neighbour,
    owner,
    panned,
    pixel_at,
    scaled,
    seam_near,
    stepped,
    usual_seam,
)
from mpi4dl_nb.draw.rasters import Rasters
from mpi4dl_nb.draw.slicing import View, draw_slicing, draw_tiles_only
from mpi4dl_nb.widgets.announced import announced
from mpi4dl_nb.widgets.controls import button
from mpi4dl_nb.widgets.instrument import Instrument
from mpi4dl_nb.widgets.slicer_controls import WAYS, slicer_controls

__all__ = ["Slicer"]


class Slicer(Instrument):
    """A picture or slide in the tiles of a plan: `Slicer(image, plan, model)`.

    `image` is anything that `open_image` takes. With a model (or the `recipe` of a `Training`), a slider chooses among
    its layers that read beyond their tiles; a module is traced at the picture's size first, which takes seconds.
    `fused_halos` compares the plan's halos with others; `plan` is the plan with those chosen. Controls can be set by
    code as well (`slicer.layer.value = 3`), and `figure` is what is shown. Raises PlanError, TraceError or ImageError.

    >>> from engines.images.samples import immunohistochemistry
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, Slicer
    >>> slicer = Slicer(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1())
    >>> slicer.layer.value = 3
    >>> slicer.figure.savefig("slicing.png")
    """

    def __init__(self, image: Source, plan: Plan, model: nn.Module | Recipe | ModelGraph | None = None) -> None:
        self._plan, self.rasters = plan, Rasters(open_image(image))
        self._layers = None if model is None else Layers(self._traced(model), plan)
        self._zoom: int | None = None
        self._place: tuple[float, float] | None = None
        self._settling = False
        self._controls = made = slicer_controls(plan)
        self.stage, self.layer, self.tile = made.stage, made.layer, made.tile
        self.fused_halos, self.together = made.fused_halos, made.together
        self.receptive, self.row, self.column = made.receptive, made.row, made.column
        self.note = ipywidgets.HTML()
        super().__init__(self._rows(), (*self._keys(),), self._pressed, self._clicked)
        self._settle()
        for control in self._controls.all:
            control.observe(self._changed, "value")
        self._redraw()

    @property
    def plan(self) -> Plan:
        """The plan, with halos fused as is chosen now."""
        return fused(self._plan, self._together)

    def zoom_in(self) -> None:
        """Show a quarter as many pixels across; from the whole, the seam that is nearest to where one looks."""
        point = self._point()
        if self._zoom is None:
            at = seam_near(point, self._rank(point), self._pixel(point)) if self._place else self._pixel(point)
            self._place = fraction_of(at, point.size_px)
        self._look(closer(self._zoom, point.size_px))

    def zoom_out(self) -> None:
        """Show four times as many."""
        self._look(farther(self._zoom, self._point().size_px))

    def zoom_to_whole(self) -> None:
        """Show the whole layer."""
        self._look(None)

    def go(self, way: str) -> None:
        """`ArrowLeft` and so on: to the next tile or, close up, a quarter of the view on."""
        point = self._point()
        if self._zoom is None:
            self.tile.value = neighbour(point.ranks.grid, self.tile.value, ARROWS[way])
        else:
            at = panned(self._pixel(point), ARROWS[way], self._zoom, point.size_px)
            self._place = fraction_of(at, point.size_px)
            self._redraw()

    def _traced(self, model: nn.Module | Recipe | ModelGraph) -> ModelGraph:
        rows, cols = self.rasters.picture.shape()
        with announced(f"Tracing {type(model).__name__} for images of {rows} × {cols} px ..."):
            return traced(model, self.rasters.picture, self._plan)

    def _rows(self) -> list[ipywidgets.Widget]:
        buttons = [
            button("zoom in", self.zoom_in, "show fewer pixels, larger (+)", "search-plus"),
            button("zoom out", self.zoom_out, "show more pixels (-)", "search-minus"),
            button("whole", self.zoom_to_whole, "show the whole layer (0)"),
            *(button(name, partial(self.go, way), "the next tile; close up, pan") for way, name in WAYS.items()),
        ]
        return self._controls.rows(buttons, self.note, bool(self._layers))

    def _keys(self) -> dict[str, Any]:
        return {
            **{way: partial(self.go, way) for way in ARROWS},
            "+": self.zoom_in, "=": self.zoom_in, "-": self.zoom_out, "0": self.zoom_to_whole,
            "[": partial(self._step, -1), "]": partial(self._step, 1),
            "d": partial(self._switch, self.fused_halos), "r": partial(self._switch, self.receptive),
        }  # fmt: skip

    def _pressed(self, key: str) -> None:
        with self.telling():
            self._keys()[key]()

    def _step(self, by: int) -> None:
        self.layer.value = stepped(self.layer.value, by, self.layer.most)

    def _switch(self, control: ipywidgets.Checkbox) -> None:
        if self._layers:
            control.value = not control.value

    def _clicked(self, across: float, down: float) -> None:
        place = self.figure and self.figure.at(across, down)
        if not place:
            return
        panel, x, y = place
        point, whole = self._point(), self._zoom is None
        at = pixel_at(x, y, point.size_px)
        closely = (panel == "side") == whole  # in the framed place, or in the view that is close already
        with self._settled():
            self._zoom = NEAR_PX if whole and closely else self._zoom
            if not closely:
                self.tile.value = owner(point.ranks.grid, at, point.size_px)
            self._place = fraction_of(at, point.size_px)

    @property
    def _together(self) -> int | str | None:
        return self.together.value if self._layers and self.fused_halos.value else None

    def _point(self) -> HaloPoint:
        stage = self.stage.value
        if not (self._layers and self._points_of(stage)):
            return bare_point(self.rasters.picture, self._plan, stage)
        return self._layers.point(stage, self.layer.value, self._together)

    def _points_of(self, stage: int) -> tuple[HaloPoint, ...]:
        """The layers of a stage, compiled if need be: what takes a second is told."""
        for together in (None, self._together):
            if not self._layers.knows(together):
                with self._busy("Compiling the ranks' programs ..."):
                    self._layers.points(stage, together)
        return self._layers.points(stage)

    @contextmanager
    def _busy(self, text: str) -> Iterator[None]:
        self.note.value = f'<span role="status">{escape(text)}</span>'
        try:
            yield
        finally:
            self.note.value = ""

    def _rank(self, point: HaloPoint) -> int:
        return point.ranks.ranks[self.tile.value]

    def _pixel(self, point: HaloPoint) -> tuple[int, int]:
        return usual_seam(point, self._rank(point)) if self._place is None else scaled(self._place, point.size_px)

    def _look(self, zoom: int | None) -> None:
        self._zoom = zoom
        self._redraw()

    def _changed(self, change: Any) -> None:
        if self._settling:
            return
        control = change["owner"]
        if control in (self.tile, self.stage):
            self._place = None
        if control in (self.row, self.column):
            self._look_at_output((self.row.value, self.column.value))
        else:
            self._redraw()

    def _look_at_output(self, at: tuple[int, int]) -> None:
        """Look where an output pixel is, from the tile that makes it."""
        point = self._point()
        out_px = self._layers.out_px(point)
        with self._settled():
            self._place = fraction_of(at, out_px)
            self.tile.value = owner(point.ranks.grid, at, out_px)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Controls that are set inside draw nothing by themselves; one drawing follows."""
        self._settling = True
        try:
            yield
        finally:
            self._settling = False
        self._redraw()

    def _redraw(self) -> None:
        with self.telling():
            self._settle()
            point = self._point()
            if self._zoom is None and not point.readers:
                figure = draw_tiles_only(self.rasters, point, self.tile.value)
            else:
                figure = draw_slicing(self.rasters, point, self.tile.value, self._view(point))
            self.view.show(figure)

    def _view(self, point: HaloPoint) -> View:
        field = remarks = None
        if point.readers and self.receptive.value:
            field = self._layers.field(point, self.row.value, self.column.value)
        if point.readers and self._together:
            remarks = (self._layers.compared(point.stage, self.tile.value, self._together),)
        return View(self._zoom, self._pixel(point), field, remarks or ())

    def _settle(self) -> None:
        """The controls get the spans that the others leave them, and show where one looks."""
        before, self._settling = self._settling, True
        try:
            stage = self.stage.value
            self.tile.max = stepped(stage_ranks(self._plan, stage).grid.tiles, -1)
            if self._layers:
                self.layer.span(0, stepped(len(self._points_of(stage)), -1))
                self.together.disabled = not self.fused_halos.value
                self._settle_output(self._point())
        finally:
            self._settling = before

    def _settle_output(self, point: HaloPoint) -> None:
        for control in (self.row, self.column):
            control.disabled = not (self.receptive.value and point.readers)
        if point.readers and self.receptive.value:
            out_px = self._layers.out_px(point)
            at = scaled(fraction_of(self._pixel(point), point.size_px), out_px)
            at = nearest_own(point.ranks.grid, self.tile.value, at, out_px)
            for control, limit, value in zip((self.row, self.column), out_px, at, strict=True):
                control.max, control.value = stepped(limit, -1), value
