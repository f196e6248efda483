"""Drawing of a picture in tiles: which rank owns which pixels, and the halos of a layer across the seams."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from torch import nn

from mpi4dl_nb.draw.figure import Drawing, format_size
from mpi4dl_nb.draw.halo_points import (
    HaloLayers,
    HaloPoint,
    Shown,
    find_point,
    find_spatial_stages,
    get_stage_ranks,
    make_picture_point,
    resolve_graph,
)
from mpi4dl_nb.draw.navigation import RasterCache, choose_seam, clamp_position, make_square, scale_position
from mpi4dl_nb.draw.picture_reach import explain_no_reach, make_reach
from mpi4dl_nb.draw.section_views import draw_sections, resolve_along
from mpi4dl_nb.draw.sections import limit_aspect, list_sections
from mpi4dl_nb.draw.slicing_parts import (
    OUTLINE_GAP,
    WHOLE,
    LayerView,
    check_zoom,
    draw_layer,
    draw_legend,
    draw_names,
    make_panels,
    resolve_rank,
    truncate_lines,
    wrap_lines,
)
from mpi4dl_nb.draw.tile_words import (
    describe_field,
    describe_region,
    describe_tile,
    describe_tiling,
    describe_values,
    format_title,
    has_values,
)
from mpi4dl_nb.draw.tilemap import (
    draw_field,
    draw_picture,
    draw_scale_bar,
    draw_tiles,
    draw_zoom,
    label_owners,
    label_tiles,
    mark_zoom,
)
from mpi4dl_nb.draw.volume import Volume, open_shown
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.images.picture import Source
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import Recipe

READINGS = ("layer", "picture")


def make_layer_view(
    place: Sequence[int],
    point: HaloPoint,
    picture: Shown,
    field: ReceptiveField | None,
    remarks: Sequence[str],
    position: Sequence[int] = (),
    large: int = 0,
) -> LayerView:
    """Return the view of a layer at a place of the picture: its row, column and side in pixels; whole without one.

    Of a volume, the place is one of the section `large` through `position`.
    """
    sizes, several = picture.shape(), len(picture.shape()) > 2
    at = scale_position(position, sizes, point.sizes) if several else None
    section = list_sections(at or (0,) * len(sizes))[large]
    along = section.across[0] if several else 0
    if not place:
        return LayerView(None, at, field, tuple(remarks), along)
    scene = limit_aspect(section.cut(Tile.whole(*sizes)).size_px)
    within = section.cut(Tile.whole(*point.sizes)).size_px
    middle = scale_position(place[:2], scene, within)[-len(section.axes) :]
    moved = dict(zip(section.axes, middle, strict=True))
    at = tuple(moved.get(axis, px) for axis, px in enumerate(section.at))
    side = max(1, round(place[2] * max(px / drawn for px, drawn in zip(within, scene, strict=True))))
    return LayerView(side, at, field, tuple(remarks), along)


def show_slicing(
    image: Source,
    plan: Plan,
    model: nn.Module | Recipe | ModelGraph | None = None,
    layer: str | int | None = None,
    tile: int | None = None,
    *,
    stage: int | None = None,
    zoom: int | None = None,
    at: tuple[int, ...] | None = None,
    receptive: tuple[int, ...] | None = None,
    reading: str = "layer",
    along: str | None = None,
    channel: int | None = None,
) -> Drawing:
    """Draw the picture in the tiles of a stage (default: the first); with a model, also the halos of a layer.

    `layer` is a module's name (`"blocks.0"`), an operator's name in the graph, or an index into the (stage's) layers
    that read beyond their tiles (default: 0, the first). `tile` is the tile whose halo is drawn (default: the one with
    most sources). `zoom` shows that many pixels of the layer across, around the pixel `at` (row, column; default:
    where the tile borrows). Up to 12 pixels are so large that the picture's values are written into them.
    `receptive` is a pixel (row, column) of the layer's output, whose receptive field in the picture is framed.
    `reading="picture"` shows, in the picture's pixels, all that the tile's outputs of this layer read of the picture,
    through the windows of all layers up to it. Of a picture that knows its scale, such as a slide, the figure has a
    scale bar and the halo's widths in micrometres.

    A tensor (C, D, H, W) is a volume, of which one `channel` is shown, in three views along its axes. They go through
    the pixel `at` (plane, row, column); the large one is seen `along` the "planes", "rows" or "columns". A tensor
    (C, L) is a signal: one strip.

    A model is traced at the picture's size, which takes seconds; a `Recipe` or `ModelGraph` is not. All numbers are
    read from the ranks' programs. Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_slicing
    >>> figure = show_slicing(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), tile=0)
    """
    picture, plan = open_shown(image, plan, channel)
    shown = picture if isinstance(picture, Volume) else RasterCache(picture)
    side = resolve_along(along, len(picture.shape()))
    if reading not in READINGS:
        raise PlanError(describe_unknown(f"reading={reading!r} is unknown", reading, READINGS))
    if model is None:
        if layer is not None or receptive is not None or reading != "layer":
            raise PlanError("layer, receptive and reading are of a model. Give the model too, or leave them out.")
        point = make_picture_point(picture, plan, find_spatial_stages(plan)[0] if stage is None else stage)
        return draw_slicing(shown, point, tile, LayerView(zoom, at, along=side))
    if stage is not None:
        get_stage_ranks(plan, stage)
    layers = HaloLayers(resolve_graph(model, picture, plan), plan)
    point = find_point(layers.find_points(stage, plan.fused_layers if plan.halo_d2 else None), layer)
    field = layers.compute_field(point, *receptive) if receptive else None
    if reading == "picture":
        reach = make_reach(layers, point, picture)
        if reach is None:
            problem = explain_no_reach(layers, point)
            raise PlanError(f"{problem}. Use reading='layer', or choose an earlier layer.")
        point = reach
    return draw_slicing(shown, point, tile, LayerView(zoom, at, field, along=side))


def _draw_tiles_only(rasters: RasterCache, point: HaloPoint, tile: int | None) -> Drawing:
    """Draw the picture in tiles, with a thicker outline around `tile` if given."""
    tiles, title = point.tiles, describe_tiling(rasters.picture, point.ranks)
    chosen = None if tile is None else resolve_rank(point, tile)
    numbered = enumerate(tiles.items())
    descriptions = [f"tile {index}, rank {rank}: {format_size(part.shape)} px" for index, (rank, part) in numbered]
    chosen_words = [] if chosen is None else [f"Chosen: {descriptions[point.numbers[chosen]]}"]
    words = [*chosen_words, *truncate_lines(descriptions)]
    figure, main, *_ = make_panels(rasters.picture.shape(), [], title, words)
    draw_picture(main, rasters, point.size_px)
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP, chosen)
    # No tile is right of or below the last one, so that all labels are in the upper left corners.
    label_tiles(main, point.numbers, tiles, centre=tiles[point.ranks.ranks[-1]])
    draw_scale_bar(main, rasters.picture, point.size_px)
    figure.alt = ". ".join([f"{title}: {'; '.join(descriptions)}", *chosen_words]) + "."
    return figure


def draw_slicing(
    shown: RasterCache | Volume, point: HaloPoint, tile: int | None = None, view: LayerView = WHOLE
) -> Drawing:
    """Draw the figure of `show_slicing` for one compiled layer, for callers that draw many."""
    check_zoom(view.zoom)
    if isinstance(shown, Volume):
        return draw_sections(shown, point, tile, view)
    return _draw_picture_slicing(shown, point, tile, view)


def _draw_picture_slicing(rasters: RasterCache, point: HaloPoint, tile: int | None, view: LayerView) -> Drawing:
    whole = view.zoom is None
    if whole and not point.readers:
        return _draw_tiles_only(rasters, point, tile)
    rank = resolve_rank(point, tile)
    pieces = [point.describe_move(move) for move in point.get_receives(rank)]
    if view.zoom is None:  # the place in the small panel: around a corner where the tile borrows, or around a seam
        across = 10 + 6 * max(point.compute_widths(rank).values())
        place = make_square(choose_seam(point, rank), across, point.size_px)
    else:
        at = choose_seam(point, rank) if view.at is None else view.at
        place = make_square(clamp_position(at, point.size_px), view.zoom, point.size_px)
    # The small panel shows the framed place (of a whole layer that reads across a seam), or the whole picture.
    lends = bool(point.find_halo(rank))
    beside = rasters.picture.shape() if not whole else place.shape if lends else None
    descriptions = describe_tile(point, rank, rasters.picture)
    descriptions += [] if whole else describe_region(point, rank, place, rasters)
    descriptions += [describe_field(point, view.field, rasters.picture.shape())] if view.field else []
    descriptions += view.remarks
    title, size = format_title(rasters.picture, point), rasters.picture.shape() if whole else place.shape
    sides = [beside] if beside else []
    figure, main, small, words = make_panels(size, sides, title, [*descriptions, *truncate_lines(pieces)])
    side = next(iter(small), None)
    values: list[str] = []
    if whole:
        if _draw_whole(main, side, rasters, point, rank, place):
            words.set_text(wrap_lines(descriptions))  # the labels of the arrows tell the sources, not a list
    elif side:  # the region large, and its position in the layer small
        draw_zoom(main, rasters, point, rank, place, has_values(point, place))
        if has_values(point, place):
            values = [describe_values(rasters, point, place)]
        else:
            label_owners(main, point, rank, place)
        draw_picture(side, rasters, point.size_px)
        side.set(xlabel=f"the place, {point.unit}", ylabel="")
        draw_tiles(side, point.ranks, point.tiles, OUTLINE_GAP, rank)
        mark_zoom(side, place)
    for axes in (main, *small):
        if view.field:
            draw_field(axes, point, view.field, rasters.picture.shape())
    draw_scale_bar(main, rasters.picture, point.size_px)
    draw_legend(figure, point, rank, bool(small), view.field is not None)
    figure.alt = ". ".join([title.replace("\n", ": "), *descriptions, "; ".join(pieces), *values])
    return figure


def _draw_whole(main: Axes, side: Axes | None, rasters: RasterCache, point: HaloPoint, rank: int, place: Tile) -> bool:
    """Draw the whole layer large and a seam of it small. Return whether the arrows could be labelled."""
    avoid = []
    draw_layer(main, rasters, point, rank, point.ranks.ranks)
    if side:
        draw_zoom(side, rasters, point, rank, place)
        label_owners(side, point, rank, place)
        avoid = mark_zoom(main, place)
    return draw_names(main, point, rank, avoid)  # labels avoid the frame of the zoomed place
