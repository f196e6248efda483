"""The slicer: a widget that shows a picture in tiles and a layer's halos across the seams, down to single pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any

import ipywidgets
from torch import nn

from engines.graph.model_graph import ModelGraph
from engines.images.picture import Source, open_image
from engines.plan import Plan
from engines.train.training import Recipe
from mpi4dl_nb.draw.halo_points import (
    HaloLayers,
    HaloPoint,
    find_spatial_stages,
    get_stage_ranks,
    make_picture_point,
    resolve_graph,
    with_fused_halos,
)
from mpi4dl_nb.draw.navigation import (
    ARROWS,
    NEAR_PX,
    RasterCache,
    add_clamped,
    choose_seam,
    clamp_to_tile,
    find_nearest_seam,
    find_owner,
    find_zoom,
    get_neighbour,
    get_pixel_at,
    pan,
    to_fractions,
    to_pixel,
)
from mpi4dl_nb.draw.slicing import LayerView, draw_slicing
from mpi4dl_nb.widgets.figure_widget import (
    FigureWidget,
    Slider,
    make_bounded_int,
    make_button,
    make_checkbox,
    make_dropdown,
    show_status,
)

__all__ = ["Slicer"]

TOGETHER = ("auto", 1, 2, 3, 4, 6, 8)  # layers fused
HELP = (
    "Click a tile to choose it; click the framed place to look at it closely. Keys on the figure: arrows choose the "
    "tile or, close up, pan; + and - zoom, 0 shows the whole; [ and ] change the layer, d fused halos, r the "
    "receptive field."
)
WAYS = {"ArrowLeft": "← left", "ArrowUp": "↑ up", "ArrowDown": "↓ down", "ArrowRight": "→ right"}
ROW = {"flex_flow": "row wrap", "align_items": "center"}
COMPILING = "Compiling the ranks' programs ..."


class Slicer(FigureWidget):
    """A picture or slide in the tiles of a plan: `Slicer(image, plan, model)`.

    `image` is anything that `open_image` takes. With a model (or the `recipe` of a `Training`), a slider selects one
    of its layers that read beyond their tiles. A module is first traced at the picture's size, which takes seconds.
    `fused_halos` compares halos with and without fusion; `plan` is the plan with the selected fusion. Controls can be
    set by code as well (`slicer.layer.value = 3`), and `figure` is the current figure.
    Raises PlanError, TraceError or ImageError.

    >>> from engines.images.sample_data import immunohistochemistry
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, Slicer
    >>> slicer = Slicer(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1())
    >>> slicer.layer.value = 3
    >>> slicer.figure.savefig("slicing.png")
    """

    def __init__(self, image: Source, plan: Plan, model: nn.Module | Recipe | ModelGraph | None = None) -> None:
        self._plan, self.rasters = plan, RasterCache(open_image(image))
        self._layers = None
        if model is not None:
            rows, cols = self.rasters.picture.shape()
            with show_status(f"Tracing {type(model).__name__} for images of {rows} × {cols} px ..."):
                self._layers = HaloLayers(resolve_graph(model, self.rasters.picture, plan), plan)
        self._zoom: int | None = None
        self._place: tuple[float, float] | None = None  # fractions of the image: another layer has another size
        self._settling = False
        stages = find_spatial_stages(plan)
        names = [(f"{stage}, in {get_stage_ranks(plan, stage).grid} tiles", stage) for stage in stages]
        together = plan.fused_layers if plan.halo_d2 else "auto"
        self.stage = make_dropdown("stage", names, stages[0], "one of the stages that are cut into tiles", "15em")
        self.layer = Slider("layer", 0, 0, 0, "among those that read beyond their tiles", "8em")
        self.tile = make_bounded_int("tile", 0, 0, 0, "whose halo is shown", "7em")
        fused = "one exchange for several layers"
        self.fused_halos = make_checkbox("fused halos (D2)", plan.halo_d2, fused, "12em")
        counts = [*dict.fromkeys((*TOGETHER, together))]
        self.together = make_dropdown("layers fused", counts, together, width="12em")
        self.receptive = make_checkbox("receptive field", False, "what one output pixel sees of the picture", "11em")
        self.row = make_bounded_int("output row", 0, 0, 0, width="11em")
        self.column = make_bounded_int("output column", 0, 0, 0, width="13em")
        self.note = ipywidgets.HTML()
        buttons = [
            make_button("zoom in", self.zoom_in, "show fewer pixels, larger (+)", "search-plus"),
            make_button("zoom out", self.zoom_out, "show more pixels (-)", "search-minus"),
            make_button("whole", self.zoom_to_whole, "show the whole layer (0)"),
            *(make_button(name, partial(self.go, way), "the next tile; close up, pan") for way, name in WAYS.items()),
        ]
        of_model = [self.fused_halos, self.together, self.receptive, self.row, self.column]
        rows = [[self.stage, self.layer, self.tile], of_model] if self._layers else [[self.stage, self.tile]]
        boxes = [ipywidgets.HBox(row, layout=ROW) for row in (*rows, [*buttons, self.note])]
        help_line = ipywidgets.HTML(f'<div style="max-width: 80em; line-height: 1.4">{escape(HELP)}</div>')
        super().__init__([*boxes, help_line], [*self._make_key_actions()], self._handle_key, self._handle_click)
        self._update_controls()
        for control in (self.stage, self.layer, self.tile, *of_model):
            control.observe(self._handle_change, "value")
        self._redraw()

    @property
    def plan(self) -> Plan:
        """The plan with the currently selected fusion of halos."""
        return with_fused_halos(self._plan, self._together)

    def zoom_in(self) -> None:
        """Show a quarter as many pixels across. From the whole layer, zoom to the seam nearest to the current pixel."""
        point = self._get_point()
        if self._zoom is None:
            at = self._get_pixel(point)
            if self._place:
                at = find_nearest_seam(point, self._get_rank(point), at)
            self._place = to_fractions(at, point.size_px)
        self._set_zoom(find_zoom(self._zoom, True, point.size_px))

    def zoom_out(self) -> None:
        """Show four times as many pixels across, up to the whole layer."""
        self._set_zoom(find_zoom(self._zoom, False, self._get_point().size_px))

    def zoom_to_whole(self) -> None:
        """Show the whole layer."""
        self._set_zoom(None)

    def go(self, way: str) -> None:
        """Move by an arrow key's name such as `ArrowLeft`: to the next tile or, zoomed in, by a quarter of the view."""
        point = self._get_point()
        if self._zoom is None:
            self.tile.value = get_neighbour(point.ranks.grid, self.tile.value, ARROWS[way])
        else:
            at = pan(self._get_pixel(point), ARROWS[way], self._zoom, point.size_px)
            self._place = to_fractions(at, point.size_px)
            self._redraw()

    def _make_key_actions(self) -> dict[str, Callable[[], None]]:
        return {
            **{way: partial(self.go, way) for way in ARROWS},
            **dict.fromkeys(("+", "="), self.zoom_in),  # the same key, with and without shift
            "-": self.zoom_out,
            "0": self.zoom_to_whole,
            "[": partial(self._step, -1),
            "]": partial(self._step, 1),
            "d": partial(self._switch, self.fused_halos),
            "r": partial(self._switch, self.receptive),
        }

    def _handle_key(self, key: str) -> None:
        with self.show_errors():
            self._make_key_actions()[key]()

    def _step(self, by: int) -> None:
        self.layer.value = add_clamped(self.layer.value, by, self.layer.most)

    def _switch(self, control: ipywidgets.Checkbox) -> None:
        if self._layers:
            control.value = not control.value

    def _handle_click(self, across: float, down: float) -> None:
        place = self.figure and self.figure.locate(across, down)
        if not place:
            return
        panel, x, y = place
        point, whole = self._get_point(), self._zoom is None
        at = get_pixel_at(x, y, point.size_px)
        #                main panel          side panel
        #   whole layer  select a tile       (a close view) zoom in there
        #   zoomed in    move to that pixel  (the whole layer) select a tile
        closely = (panel == "side") == whole  # within the framed region, or within a zoomed view
        with self._batch_changes():
            self._zoom = NEAR_PX if whole and closely else self._zoom
            if not closely:
                self.tile.value = find_owner(point.ranks.grid, at, point.size_px)
            self._place = to_fractions(at, point.size_px)

    @property
    def _together(self) -> int | str | None:
        return self.together.value if self._layers and self.fused_halos.value else None

    def _get_point(self) -> HaloPoint:
        stage = self.stage.value
        if not (self._layers and self._find_points(stage)):
            return make_picture_point(self.rasters.picture, self._plan, stage)
        return self._layers.select_point(stage, self.layer.value, self._together)

    def _find_points(self, stage: int) -> tuple[HaloPoint, ...]:
        """Return the layers of a stage. Show a note while they are compiled, which may take a second."""
        for together in (None, self._together):
            if not self._layers.is_compiled(together):
                self.note.value = f'<span role="status">{escape(COMPILING)}</span>'
                try:
                    self._layers.find_points(stage, together)
                finally:
                    self.note.value = ""
        return self._layers.find_points(stage)

    def _get_rank(self, point: HaloPoint) -> int:
        return point.ranks.ranks[self.tile.value]

    def _get_pixel(self, point: HaloPoint) -> tuple[int, int]:
        if self._place is None:
            return choose_seam(point, self._get_rank(point))
        return to_pixel(self._place, point.size_px)

    def _set_zoom(self, zoom: int | None) -> None:
        self._zoom = zoom
        self._redraw()

    def _handle_change(self, change: Any) -> None:
        if self._settling:
            return
        control = change["owner"]
        if control in (self.tile, self.stage):
            self._place = None  # the view goes to a seam of the new tile
        if control not in (self.row, self.column):
            self._redraw()
            return
        # Another output pixel: the view moves to it, and the tile that owns it is selected.
        point, at = self._get_point(), (self.row.value, self.column.value)
        out_px = self._layers.get_output_px(point)
        with self._batch_changes():
            self._place = to_fractions(at, out_px)
            self.tile.value = find_owner(point.ranks.grid, at, out_px)

    @contextmanager
    def _batch_changes(self) -> Iterator[None]:
        """Suppress redraws for controls that the body sets, and redraw once at the end."""
        self._settling = True
        try:
            yield
        finally:
            self._settling = False
        self._redraw()

    def _redraw(self) -> None:
        with self.show_errors():
            self._update_controls()
            point = self._get_point()
            field, remarks = None, ()
            if point.readers and self.receptive.value:
                field = self._layers.compute_field(point, self.row.value, self.column.value)
            if point.readers and self._together:
                remarks = (self._layers.describe_fusion(point.stage, self.tile.value, self._together),)
            view = LayerView(self._zoom, self._get_pixel(point), field, remarks)
            self.view.show(draw_slicing(self.rasters, point, self.tile.value, view))

    def _update_controls(self) -> None:
        """Set the limits of the controls, which depend on each other, and the current output pixel."""
        before, self._settling = self._settling, True  # new limits may change values; `_batch_changes` may be active
        try:
            stage = self.stage.value
            self.tile.max = add_clamped(get_stage_ranks(self._plan, stage).grid.tiles, -1)
            if self._layers:
                self.layer.set_range(0, add_clamped(len(self._find_points(stage)), -1))
                self.together.disabled = not self.fused_halos.value
                point, pixel_controls = self._get_point(), (self.row, self.column)
                follows = bool(self.receptive.value and point.readers)
                for control in pixel_controls:
                    control.disabled = not follows
                if follows:
                    out_px = self._layers.get_output_px(point)
                    at = to_pixel(to_fractions(self._get_pixel(point), point.size_px), out_px)
                    at = clamp_to_tile(point.ranks.grid, self.tile.value, at, out_px)
                    for control, limit, value in zip(pixel_controls, out_px, at, strict=True):
                        control.max, control.value = add_clamped(limit, -1), value
        finally:
            self._settling = before
