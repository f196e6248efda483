"""The slicer: a widget that shows a picture in tiles and a layer's halos across the seams, down to single pixels."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets
from torch import nn

from mpi4dl_nb.draw.figure import TILE_COLOURS, Drawing, format_size
from mpi4dl_nb.draw.halo_points import (
    HaloLayers,
    HaloPoint,
    choose_borrower,
    find_spatial_stages,
    make_picture_point,
    resolve_graph,
    with_fused_halos,
)
from mpi4dl_nb.draw.layer_tables import build_layer_tables, describe_net, describe_sections
from mpi4dl_nb.draw.navigation import (
    RasterCache,
    count_levels,
    encode_pixels,
    find_owner,
    get_picked_output,
    make_nameless,
)
from mpi4dl_nb.draw.picture_reach import make_reach
from mpi4dl_nb.draw.plain_text import cut_words
from mpi4dl_nb.draw.prediction_map import PredictedMap, PredictionLayer, read_prediction
from mpi4dl_nb.draw.section_views import choose_image_position
from mpi4dl_nb.draw.slicing import draw_slicing, make_layer_view
from mpi4dl_nb.draw.volume import Volume, open_shown
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.images.picture import Source
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.status_line import show_status
from mpi4dl_nb.widgets.figure_widget import NOT_SAVED, PageWidget, make_bounded_int, make_checkbox, make_dropdown
from mpi4dl_nb.widgets.saved_view import SavedPart
from mpi4dl_nb.widgets.slicer_view import PictureTissue, SlicerView, VolumeTissue

TOGETHER = ("auto", 1, 2, 3, 4, 6, 8)  # layers fused
ROW = {"flex_flow": "row wrap", "align_items": "center"}
SEEN = ["place", "picked", "layer", "tile", "reading", "fields", "facts", "position", "large"]
"""What the figure of a slicer depends on: traits of its view."""
COMPILING = "Compiling the ranks' programs ..."


class Slicer(PageWidget):
    """A picture, slide or volume in the tiles of a plan: `Slicer(image, plan, model)`.

    `image` is anything that `open_image` takes, or a tensor (C, D, H, W) or (C, L): one `channel` of a volume, in three
    views along its axes with a slider for each, or of a signal. With a model (or the `recipe` of a `Training`), the
    strip above the picture selects one of its layers that read beyond their tiles. A module is first traced at the
    picture's size, which takes seconds. `fused_halos` compares halos with and without fusion; `plan` is the plan with
    the selected fusion. Layer and tile can be set by code as well (`slicer.layer.value = 3`), and `figure` is what is
    seen, drawn by `show_slicing`. `prediction` is a predicted map of classes, shown over the picture; its place and
    `class_names` are those of `show_prediction`. A notebook that is saved contains a readable picture and the file's
    name; not so with `save_picture=False`, where only a running kernel shows them. `max_height` is in px, by default
    that of the window.
    Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, Slicer
    >>> slicer = Slicer(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1())
    >>> slicer.layer.value = 3
    >>> slicer.figure.savefig("slicing.png")
    """

    frame_px = 780
    points: tuple[HaloPoint, ...] = ()

    def __init__(
        self,
        image: Source | Volume,
        plan: Plan,
        model: nn.Module | Recipe | ModelGraph | None = None,
        *,
        prediction: PredictedMap | None = None,
        class_names: Sequence[str] | None = None,
        save_picture: bool = True,
        max_height: int | None = None,
        channel: int | None = None,
    ) -> None:
        self.save_picture = save_picture
        self._layers = None
        self.image, self._plan = open_shown(image, plan, channel)
        self._named = self.image if save_picture or isinstance(self.image, Volume) else make_nameless(self.image)
        self.prediction = None if prediction is None else _read_map(self.image, prediction, class_names)
        if model is not None:
            size = format_size(self.image.shape())
            with show_status(f"Tracing {type(model).__name__} for images of {size} px ..."):
                self._layers = HaloLayers(resolve_graph(model, self.image, self._plan), self._plan)
        together = plan.fused_layers if plan.halo_d2 else "auto"
        self.layer = make_bounded_int("layer", 0, 0, 0, "among those that read beyond their tiles", "8em")
        self.tile = make_bounded_int("tile", 0, 0, 0, "whose halo is shown", "7em")
        fused = "one exchange for several layers"
        self.fused_halos = make_checkbox("fused halos (D2)", plan.halo_d2, fused, "12em")
        counts = [*dict.fromkeys((*TOGETHER, together))]
        self.together = make_dropdown("layers fused", counts, together, width="12em")
        self.note = ipywidgets.HTML()
        of_model = [self.fused_halos, self.together] if self._layers else []
        controls = [ipywidgets.HBox([self.layer, self.tile, *of_model, self.note], layout=ROW)]
        self._drawn: tuple[Any, Drawing] | None = None
        self._compiled: dict[int | str | None, tuple[tuple[HaloPoint, ...], dict[str, Any], bytes]] = {}
        super().__init__(controls, self._make_view())
        self.view.max_height = max_height
        self._compile()
        self.view.tile = choose_borrower(self.points[0])
        self.view.position = list(choose_image_position(self.image, self.points[0], self.view.tile))
        for name in ("layer", "tile"):
            ipywidgets.link((self.view, name), (getattr(self, name), "value"))
        self.view.observe(self._handle_layer, "layer")
        self.view.observe(lambda _: self.update_snapshot(), SEEN)
        for control in (self.fused_halos, self.together):
            control.observe(self._handle_fusion, "value")

    def _make_view(self) -> SlicerView:
        overlay = self.prediction.encode() if self.prediction else b""
        if isinstance(self.image, Volume):
            self._rasters: RasterCache | Volume = self.image
            return SlicerView(self.image, VolumeTissue(self.image), overlay, self.save_picture)
        self._rasters = rasters = RasterCache(self.image)
        return SlicerView(
            self.image, PictureTissue(self.image, encode_pixels(rasters.whole)), overlay, self.save_picture
        )

    def _make_saved_part(self, picture_bytes: int) -> SavedPart:
        view = self.view.save_pictures(picture_bytes)
        missing = view.values["facts"].get("left_out", NOT_SAVED)
        return SavedPart([view], remarks=[missing] if missing else [])

    @property
    def plan(self) -> Plan:
        """The plan with the currently selected fusion of halos."""
        return with_fused_halos(self._plan, self._together)

    @property
    def point(self) -> HaloPoint:
        """The layer that is shown."""
        return self.points[self.view.layer]

    @property
    def figure(self) -> Drawing:
        """What is seen, as a figure for paper: the layer, the tile, and the view of the picture."""
        state = {name: getattr(self.view, name) for name in SEEN if name != "facts"} | {"together": self._together}
        if self._drawn is None or self._drawn[0] != state:
            point, field = self.point, None
            if self._layers and point.readers:
                if self.view.fields and self.view.picked and self._layers.get_spans(point):
                    field = self._layers.compute_field(point, *get_picked_output(self.view.picked))
                if self.view.reading == "picture":
                    point = make_reach(self._layers, point, self.image) or point
            view, remarks = self.view, self._describe_fusion(point)
            shown = make_layer_view(view.place, point, self.image, field, remarks, view.position, view.large)
            self._drawn = state, draw_slicing(self._rasters, point, view.tile, shown)
        return self._drawn[1]

    def pick(self, *at: int) -> None:
        """Choose the tile that owns a pixel of what the layer reads, as a click does, and that pixel of its output."""
        self.view.picked = [*at, *at]
        self.view.tile = find_owner(self.point.ranks.grid, at, self.point.sizes)

    @property
    def _together(self) -> int | str | None:
        return self.together.value if self._layers and self.fused_halos.value else None

    def _describe_fusion(self, point: HaloPoint, tile: int | None = None) -> tuple[str, ...]:
        if not (self._together and self._layers and point.readers):
            return ()
        return (self._layers.describe_fusion(point.stage, self.view.tile if tile is None else tile, self._together),)

    def _handle_fusion(self, _change: Any) -> None:
        with self.show_errors():
            self._compile()

    def _compile(self) -> None:
        """Give the page all layers under the selected fusion: at once if they have been found before."""
        self.together.disabled = not self.fused_halos.value
        if self._together not in self._compiled:
            self.note.value = f'<span role="status">{escape(COMPILING)}</span>'  # it may take seconds
            try:
                self._compiled[self._together] = self._find_points()
            finally:
                self.note.value = ""
        self.points, facts, numbers = self._compiled[self._together]
        last = _get_last(self.points)
        self.view.layer = min(self.view.layer, last)
        self.layer.max = last
        self._handle_layer()
        with self.view.hold_sync():
            self.view.facts, self.view.numbers = facts, numbers

    def _find_points(self) -> tuple[tuple[HaloPoint, ...], dict[str, Any], bytes]:
        """Return the layers under the selected fusion, and what the page has of them: facts and numbers."""
        points = self._layers.select_points(self._together) if self._layers else ()
        points = points or tuple(
            make_picture_point(self.image, self._plan, stage) for stage in find_spatial_stages(self._plan)
        )
        picture = self._named
        layers, numbers = build_layer_tables(picture, self._layers, points)
        of_stage = {point.stage: point for point in points}
        facts: dict[str, Any] = {
            "layers": layers,
            "net": describe_net(self._layers.graph, self._plan, points) if self._layers else [],
            "bytes": len(numbers),
            "colours": TILE_COLOURS,
            "sections": describe_sections(picture.shape()),
            "remarks": {  # on each tile of a layer, the same for all layers of its stage
                str(stage): [self._describe_fusion(point, tile) for tile in range(point.ranks.grid.tiles)]
                for stage, point in of_stage.items()
            },
            "picture": {
                "name": picture.name,
                "sizes": picture.shape(),
                "axes": AXIS_NAMES[-len(picture.shape()) :],
                "span": picture.span if isinstance(picture, Volume) else None,
                "microns": picture.microns_per_px,
                "levels": 0 if isinstance(picture, Volume) else count_levels(picture),
                "saved": self.save_picture,
            },
            "prediction": self.prediction.describe() if self.prediction else None,
        }
        return points, cut_words(facts), numbers

    def _handle_layer(self, _change: Any = None) -> None:
        """Limit the tile to those of the layer's stage. The pixel that was picked is one of another layer."""
        self.tile.max, self.view.picked = _get_last(self.point.ranks.ranks), []


def _read_map(image: Picture | Volume, prediction: PredictedMap, names: Sequence[str] | None) -> PredictionLayer:
    if isinstance(image, Volume):
        raise PlanError("A predicted map lies over a picture, and not over a volume: leave out `prediction`.")
    return read_prediction(image, prediction, names)


def _get_last(items: Sequence[Any]) -> int:
    """Return the index of the last item."""
    return max(range(len(items)))
