"""Drawing of a picture in tiles: which rank owns which pixels, and the halos of a layer across the seams."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from torch import nn

from mpi4dl_nb.draw.figure import INK, Drawing, format_size
from mpi4dl_nb.draw.halo_points import (
    HaloLayers,
    HaloPoint,
    choose_borrower,
    find_point,
    find_spatial_stages,
    get_stage_ranks,
    make_picture_point,
    resolve_graph,
)
from mpi4dl_nb.draw.navigation import (
    RasterCache,
    choose_seam,
    compute_layer_microns,
    get_pixel_at,
    make_square,
    scale_pixel,
)
from mpi4dl_nb.draw.picture_reach import PictureReach, describe_reach, explain_no_reach, make_reach
from mpi4dl_nb.draw.tilemap import (
    COMPUTED,
    FIELD,
    HALO,
    LOOKS,
    OTHER_HALO,
    draw_field,
    draw_halo_arrows,
    draw_halos,
    draw_picture,
    draw_scale_bar,
    draw_tiles,
    draw_zoom,
    get_screen_box,
    label_owners,
    label_tiles,
    mark_zoom,
    tint_halo,
)
from mpi4dl_nb.engines.checks import is_integer
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown, format_bytes, format_count, format_microns
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.images.picture import Source, open_image
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import StageRanks
from mpi4dl_nb.engines.train.recipe import Recipe

READINGS = ("layer", "picture")
UP_TO_PX = 12  # across a view whose values are written; three numbers would be illegible in smaller cells

# Captions of the drawings of a tiling, in words and numbers.


def describe_tiling(picture: Picture, stage: StageRanks) -> str:
    """Return a text such as `picture, 512 × 512 px (rows × columns), in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    if stage.shares > 1:
        where = f"tile on each of {stage.shares} ranks, which share the images"
    return f"{picture.name}, {format_size(picture.shape())} px (rows × columns), in {stage.grid} {where}"


def format_title(picture: Picture, point: HaloPoint) -> str:
    if not point.readers:
        return describe_tiling(picture, point.ranks)
    layer, channels = f"layer {point.name} ({point.operator})", point.spec.shape[1]
    size = format_size(point.size_px)
    if isinstance(point, PictureReach):
        return f"{describe_tiling(picture, point.ranks)}\ncumulative halo of {layer}, in the picture"
    return f"{describe_tiling(picture, point.ranks)}\n{layer} reads {channels} channels of {size} px"


def describe_tile(point: HaloPoint, rank: int, picture: Picture) -> list[str]:
    """Describe the pixels that a tile owns, and those that it borrows or computes redundantly, and its halo widths.

    Where the picture knows its scale, widths are also given in micrometres of the picture.
    """
    sentence = f"Tile {point.numbers[rank]} (rank {rank}) owns {format_size(point.tiles[rank].shape)} px"
    if not point.readers:
        return [sentence]
    if isinstance(point, PictureReach):
        return [f"{sentence} of the picture", *describe_reach(point, rank, picture.microns_per_px)]
    pieces = point.find_redundant_moves(rank) if point.computed else point.get_receives(rank)
    count, owners = sum(move.tile.pixels for move in pieces), format_count(len(pieces), "rank")
    if point.computed:
        owned = f"{owners} own{'s' * (len(pieces) == 1)}"
        more = f"It computes {count} px more, which {owned}: nothing travels here, halos are fused"
    else:
        images, channels = point.spec.shape[:2]
        batch = f"{channels} channels" if images == 1 else f"{channels} channels of {images} images"
        more = f"It borrows {count} px more from {owners}: {format_bytes(point.count_bytes(pieces))} in {batch}"
    widths = point.compute_widths(rank)
    halo = ", ".join(f"{width} {side}" for side, width in widths.items())
    if any(widths.values()) and (microns := compute_layer_microns(picture, point.size_px)):
        far = max(width * microns[side in ("left", "right")] for side, width in widths.items())
        halo += f" (up to {format_microns(far)} of the picture)"
    lines = [f"{sentence} of this layer's input", more, f"Its halo in px: {halo}"]
    fill = point.get_fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which is padding"]


def describe_region(point: HaloPoint, rank: int, place: Tile) -> list[str]:
    """Describe which pixels are shown, and how many of them are owned, borrowed or computed redundantly."""
    rows, cols = place.rows, place.cols
    lent = sum((move.tile & place).pixels for move in point.find_halo(rank))
    owned = (point.tiles[rank] & place).pixels
    there = f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}"
    words = [f"Shown: {there}. {owned} px are its own, {lent} {point.verb}, {place.pixels - owned - lent} not needed"]
    # Only the image itself is at hand here. The values of inner layers exist on the ranks, during a step.
    if has_values(point, place):
        words.append("In each pixel: the picture's red, green, blue (0 to 255)")
    elif max(place.shape) <= UP_TO_PX:
        words.append("Colours are the picture's there: this layer's own values are on the ranks only")
    return words


def has_values(point: HaloPoint, place: Tile) -> bool:
    """Return whether pixel values can be written into `place`: it is small, and the layer reads the picture itself."""
    return point.reads_image and max(place.shape) <= UP_TO_PX


def describe_field(point: HaloPoint, field: ReceptiveField, picture_px: tuple[int, int]) -> str:
    """Describe the receptive field of an output pixel, and its share on each tile."""
    image, (row, col) = field.image, field.pixel
    if not image:
        return f"Output pixel ({row}, {col}) depends on no pixel of the picture"
    tiles = zip(point.ranks.ranks, point.ranks.grid.cut(*picture_px), strict=True)
    parts = {rank: (tile & image).pixels for rank, tile in tiles if tile & image}
    share = ", ".join(f"tile {point.numbers[rank]} {count / image.pixels:.0%}" for rank, count in parts.items())
    rows, cols = image.rows, image.cols
    return (
        f"Output pixel ({row}, {col}) of this layer depends on {format_size(image.shape)} px of the picture (dashed): "
        f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}. They lie on {share}"
    )


def describe_values(rasters: RasterCache, point: HaloPoint, place: Tile) -> str:
    """Return red, green and blue of the pixels of a place, row by row."""
    rows = [
        f"row {index}: {', '.join(' '.join(map(str, pixel)) for pixel in row)}"
        for index, row in enumerate(rasters.render_region(point.size_px, place), start=place.rows.start)
    ]
    return f"Pixel values (red green blue) from column {place.cols.start} on: {'; '.join(rows)}"


def _truncate_lines(lines: list[str]) -> list[str]:
    most = 8
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]


# Panels at computed positions, since the room of a panel on the screen decides how it is labelled.


WIDTH_IN, LEFT_IN, TOP_IN = 11.0, 0.75, 0.9
MAIN_IN, TALLEST_IN = 5.6, 7.6  # of the large panel
BESIDE_IN, SIDE_LEFT_IN, SIDE_IN = 7.0, 7.5, 2.7  # left edges of words and small panel; its longer side
BELOW_IN = 0.95  # below the large panel: ticks, label, legend
UNDER_SIDE_IN, LINE_IN = 0.7, 0.167
LEGEND_IN = 0.45
LINE = 59  # characters in a line of the words


def _make_panels(
    main: Sequence[int], side: Sequence[int] | None, title: str, words: Sequence[str]
) -> tuple[Drawing, Axes, Axes | None, Text]:
    """Create a large panel and a small one with the aspect ratios of `main` and `side` (rows, columns), and the words.

    Return the figure, the panels and the words.
    """
    #     LEFT_IN                     SIDE_LEFT_IN
    #     |title                      |
    #     |+--------------------+     |+-----------+   TOP_IN
    #     ||                    |     ||   side    |
    #     ||        main        |     |+-----------+
    #     ||                    |     UNDER_SIDE_IN: its ticks and label
    #     |+--------------------+     words (BESIDE_IN)
    #     BELOW_IN: ticks, label, legend of the figure
    #
    # The figure is as high as the higher one of its two columns.
    main_in, side_in = _fit_sides(main, MAIN_IN, TALLEST_IN), _fit_sides(side or (0, 1), SIDE_IN, SIDE_IN)
    text, beside = _wrap_lines(words), side_in[0] + UNDER_SIDE_IN * bool(side)
    below = max(main_in[0] + BELOW_IN, beside + LINE_IN * (1 + text.count("\n")) + LEGEND_IN)
    high = TOP_IN + below
    figure = Drawing(figsize=(WIDTH_IN, high))

    def add_axes(left: float, size: tuple[float, float], name: str) -> Axes:
        bottom = 1 - (TOP_IN + size[0]) / high
        return figure.add_axes((left / WIDTH_IN, bottom, size[1] / WIDTH_IN, size[0] / high), label=name)

    large = add_axes(LEFT_IN, main_in, "main")
    small = add_axes(SIDE_LEFT_IN, side_in, "side") if side else None
    figure.text(LEFT_IN / WIDTH_IN, 1 - 0.14 / high, title, va="top", fontsize=10, color=INK)
    top = 1 - (TOP_IN + beside) / high
    return figure, large, small, figure.text(BESIDE_IN / WIDTH_IN, top, text, va="top", fontsize=9, color=INK)


def _wrap_lines(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, LINE, subsequent_indent="   ") for line in lines)


def _fit_sides(shape: Sequence[int], width: float, height: float) -> tuple[float, float]:
    """Return the largest (height, width) with the aspect ratio of `shape` that fits into `width` and `height`."""
    scale = min(width / shape[1], height / max(1, shape[0]))
    return shape[0] * scale, shape[1] * scale


VISIBLE_PX = 6  # of the screen; a thinner halo is drawn in the zoomed panel only
OUTLINE_GAP = 0.005  # fraction of the picture's longer side


@dataclass(frozen=True)
class LayerView:
    """A view of a layer: the whole (`zoom` None), or `zoom` pixels across, around `at` (row, column).

    `field` is a receptive field to be framed, `remarks` are additional lines of text.
    """

    zoom: int | None = None
    at: tuple[int, int] | None = None
    field: ReceptiveField | None = None
    remarks: tuple[str, ...] = ()


def make_layer_view(
    place: Sequence[int], point: HaloPoint, picture: Picture, field: ReceptiveField | None, remarks: Sequence[str]
) -> LayerView:
    """Return the view of a layer at a place of the picture: its row, column and side in pixels; whole without one."""
    if not place:
        return LayerView(None, None, field, tuple(remarks))
    at = scale_pixel((place[0], place[1]), picture.shape(), point.size_px)
    side = max(1, round(place[2] * point.size_px[0] / picture.shape()[0]))
    return LayerView(side, at, field, tuple(remarks))


def show_slicing(
    image: Source,
    plan: Plan,
    model: nn.Module | Recipe | ModelGraph | None = None,
    layer: str | int | None = None,
    tile: int | None = None,
    *,
    stage: int | None = None,
    zoom: int | None = None,
    at: tuple[int, int] | None = None,
    receptive: tuple[int, int] | None = None,
    reading: str = "layer",
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

    A model is traced at the picture's size, which takes seconds; a `Recipe` or `ModelGraph` is not. All numbers are
    read from the ranks' programs. Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_slicing
    >>> figure = show_slicing(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), tile=0)
    """
    rasters = RasterCache(open_image(image))
    if reading not in READINGS:
        raise PlanError(describe_unknown(f"reading={reading!r} is unknown", reading, READINGS))
    if model is None:
        if layer is not None or receptive is not None or reading != "layer":
            raise PlanError("layer, receptive and reading are of a model. Give the model too, or leave them out.")
        point = make_picture_point(rasters.picture, plan, find_spatial_stages(plan)[0] if stage is None else stage)
        return draw_slicing(rasters, point, tile, LayerView(zoom, at))
    if stage is not None:
        get_stage_ranks(plan, stage)
    layers = HaloLayers(resolve_graph(model, rasters.picture, plan), plan)
    point = find_point(layers.find_points(stage, plan.fused_layers if plan.halo_d2 else None), layer)
    field = layers.compute_field(point, *receptive) if receptive else None
    if reading == "picture":
        reach = make_reach(layers, point, rasters.picture)
        if reach is None:
            problem = explain_no_reach(layers, point)
            raise PlanError(f"{problem}. Use reading='layer', or choose an earlier layer.")
        point = reach
    return draw_slicing(rasters, point, tile, LayerView(zoom, at, field))


def _draw_tiles_only(rasters: RasterCache, point: HaloPoint, tile: int | None) -> Drawing:
    """Draw the picture in tiles, with a thicker outline around `tile` if given."""
    tiles, title = point.tiles, describe_tiling(rasters.picture, point.ranks)
    chosen = None if tile is None else _resolve_rank(point, tile)
    numbered = enumerate(tiles.items())
    descriptions = [f"tile {index}, rank {rank}: {format_size(part.shape)} px" for index, (rank, part) in numbered]
    chosen_words = [] if chosen is None else [f"Chosen: {descriptions[point.numbers[chosen]]}"]
    words = [*chosen_words, *_truncate_lines(descriptions)]
    figure, main, *_ = _make_panels(rasters.picture.shape(), None, title, words)
    draw_picture(main, rasters, point.size_px)
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), chosen)
    # No tile is right of or below the last one, so that all labels are in the upper left corners.
    label_tiles(main, point.numbers, tiles, centre=tiles[point.ranks.ranks[-1]])
    draw_scale_bar(main, rasters.picture, point.size_px)
    figure.alt = ". ".join([f"{title}: {'; '.join(descriptions)}", *chosen_words]) + "."
    return figure


def draw_slicing(
    rasters: RasterCache, point: HaloPoint, tile: int | None = None, view: LayerView = LayerView()
) -> Drawing:
    """Draw the figure of `show_slicing` for one compiled layer, for callers that draw many."""
    whole = view.zoom is None
    if whole and not point.readers:
        return _draw_tiles_only(rasters, point, tile)
    rank = _resolve_rank(point, tile)
    pieces = [point.describe_move(move) for move in point.get_receives(rank)]
    if whole:  # the place in the small panel: around a corner where the tile borrows, or around a seam
        across = 10 + 6 * max(point.compute_widths(rank).values())
        place = make_square(choose_seam(point, rank), across, point.size_px)
    elif not is_integer(view.zoom) or view.zoom < 1:
        raise PlanError(
            f"zoom={view.zoom!r} is how many pixels are shown across: give a whole number, or None for all."
        )
    else:
        row, col = choose_seam(point, rank) if view.at is None else view.at
        place = make_square(get_pixel_at(col, row, point.size_px), view.zoom, point.size_px)
    # The small panel shows the framed place (of a whole layer that reads across a seam), or the whole picture.
    lends = bool(point.find_halo(rank))
    beside = rasters.picture.shape() if not whole else place.shape if lends else None
    descriptions = describe_tile(point, rank, rasters.picture)
    descriptions += [] if whole else describe_region(point, rank, place)
    descriptions += [describe_field(point, view.field, rasters.picture.shape())] if view.field else []
    descriptions += view.remarks
    title, size = format_title(rasters.picture, point), rasters.picture.shape() if whole else place.shape
    figure, main, side, words = _make_panels(size, beside, title, [*descriptions, *_truncate_lines(pieces)])
    values: list[str] = []
    if whole:
        if _draw_whole(main, side, rasters, point, rank, place):
            words.set_text(_wrap_lines(descriptions))  # the labels of the arrows tell the sources, not a list
    elif side:  # the region large, and its position in the layer small
        draw_zoom(main, rasters, point, rank, place, has_values(point, place))
        if has_values(point, place):
            values = [describe_values(rasters, point, place)]
        else:
            label_owners(main, point, rank, place)
        draw_picture(side, rasters, point.size_px)
        side.set(xlabel=f"the place, {point.unit}", ylabel="")
        draw_tiles(side, point.ranks, point.tiles, OUTLINE_GAP * max(point.size_px), rank)
        mark_zoom(side, place)
    for axes in (main, side):
        if axes and view.field:
            draw_field(axes, point, view.field, rasters.picture.shape())
    draw_scale_bar(main, rasters.picture, point.size_px)
    _draw_legend(figure, point, rank, view.field is not None)
    figure.alt = ". ".join([title.replace("\n", ": "), *descriptions, "; ".join(pieces), *values])
    return figure


def _draw_whole(main: Axes, side: Axes | None, rasters: RasterCache, point: HaloPoint, rank: int, place: Tile) -> bool:
    """Draw the whole layer large and a seam of it small. Return whether the arrows could be labelled."""
    tiles, avoid = point.tiles, []
    draw_picture(main, rasters, point.size_px, unit=point.unit)
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), rank)
    for owner in tiles:
        mine = owner == rank
        redundant = point.find_redundant_moves(owner) if mine else ()
        for pieces, look in ((point.get_receives(owner), HALO if mine else OTHER_HALO), (redundant, COMPUTED)):
            visible = [move for move in pieces if min(*get_screen_box(main, move.tile).size) >= VISIBLE_PX]
            draw_halos(main, point.ranks, visible, look)
    if side:
        draw_zoom(side, rasters, point, rank, place)
        label_owners(side, point, rank, place)
        avoid = mark_zoom(main, place)
    # Labels avoid the frame of the zoomed place, which is therefore drawn first. If the arrows are labelled, the chosen
    # tile has a label already, with what it borrows.
    lettered = draw_halo_arrows(main, point, rank, avoid)
    untold = {owner: tile_number for owner, tile_number in point.numbers.items() if owner != rank or not lettered}
    label_tiles(main, untold, tiles, tiles[rank], avoid)
    return bool(lettered)


def _resolve_rank(point: HaloPoint, tile: int | None) -> int:
    """Return the rank of a tile of the stage; None: of the tile with most sources."""
    ranks = point.ranks.ranks
    if tile is None:
        return ranks[choose_borrower(point)]
    if not 0 <= tile < len(ranks):
        raise PlanError(f"tile={tile}, but stage {point.stage} has tiles 0 to {len(ranks) - 1}.")
    return ranks[tile]


def _draw_legend(figure: Drawing, point: HaloPoint, rank: int, with_field: bool) -> None:
    outlines = tuple(Line2D([], [], color=tint, linestyle=line, linewidth=2.5) for tint, line in LOOKS)
    # A look that alternates from tile to tile has an entry with a handle for each of its colours, side by side.
    entries: dict[str, Any] = {"what a rank owns": outlines}
    for name, pieces, look in (
        (point.halo_words, point.get_receives(rank), HALO),
        ("what it computes though others own it", point.find_redundant_moves(rank), COMPUTED),
    ):
        if pieces:
            entries[name] = tuple(Patch(**tint_halo(tint, look)) for tint, _ in LOOKS)
    if len(figure.axes) > 1 and len(entries) > 1:
        entries["grey: not needed by this tile"] = Patch(facecolor="#9a9da1", edgecolor="#777777")
    # Whether the halos of others are wide enough to be drawn depends on the screen: the figure itself tells.
    if any(patch.get_hatch() == OTHER_HALO["hatch"] for patch in figure.axes[0].patches):
        entries["halos of the other tiles"] = Patch(**OTHER_HALO | {"linewidth": 0.5})
    if with_field:
        entries["receptive field"] = Patch(edgecolor=INK, linewidth=1.6, **FIELD)
    together = {tuple: HandlerTuple(ndivide=None)}
    look = {"loc": "lower left", "ncols": len(entries), "frameon": False, "fontsize": 9, "borderaxespad": 0.2}
    figure.legend(entries.values(), entries.keys(), handler_map=together, **look)
