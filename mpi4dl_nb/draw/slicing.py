"""Drawing of a picture in tiles: which rank owns which pixels, and the halos of a layer across the seams."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import nn

from engines.errors import PlanError
from engines.graph.model_graph import ModelGraph
from engines.images.picture import Picture, Source, open_image
from engines.plan import Plan
from engines.program.receptive import ReceptiveField, ReceptiveFields
from engines.spatial.layout import StageRanks
from engines.spatial.tiles import Tile
from engines.train.training import Recipe
from mpi4dl_nb.draw.figure import INK, Drawing, FigurePanels, format_bytes, format_rank_count, format_size, make_panels
from mpi4dl_nb.draw.halo_points import (
    HaloPoint,
    find_layer_points,
    find_point,
    find_spatial_stages,
    get_stage_ranks,
    make_picture_point,
    resolve_graph,
)
from mpi4dl_nb.draw.navigation import choose_seam, get_pixel_at, make_square
from mpi4dl_nb.draw.raster_cache import UP_TO_PX, RasterCache, format_values
from mpi4dl_nb.draw.tilemap import (
    COMPUTED,
    HALO,
    LOOKS,
    OTHER_HALO,
    draw_halo_arrows,
    draw_halos,
    draw_picture,
    draw_tiles,
    get_screen_box,
    label_tiles,
)
from mpi4dl_nb.draw.zoom import FIELD, choose_zoom_view, describe_field, draw_field, draw_zoom, label_owners, mark_zoom

__all__ = [
    "LayerView",
    "describe_region",
    "describe_tile",
    "describe_tiling",
    "describe_values",
    "draw_slicing",
    "draw_tiles_only",
    "format_title",
    "has_values",
    "show_slicing",
    "truncate_lines",
]

# Captions of the drawings of a tiling, in words and numbers.


def describe_tiling(picture: Picture, stage: StageRanks) -> str:
    """Return a text such as `picture, 512 × 512 px (rows × columns), in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    return f"{picture.name}, {format_size(picture.shape())} px (rows × columns), in {stage.grid} {where}"


def format_title(picture: Picture, point: HaloPoint) -> str:
    if not point.readers:
        return describe_tiling(picture, point.ranks)
    layer, channels = f"layer {point.name} ({point.operator})", point.spec.shape[1]
    size = format_size(point.size_px)
    return f"{describe_tiling(picture, point.ranks)}\n{layer} reads {channels} channels of {size} px"


def describe_tile(point: HaloPoint, rank: int) -> list[str]:
    """Describe the pixels that a tile owns, and those that it borrows or computes redundantly, and its halo widths."""
    own = f"Tile {point.numbers[rank]} (rank {rank}) owns {format_size(point.tiles[rank].shape)} px"
    if not point.readers:
        return [own]
    pieces = point.find_redundant_moves(rank) if point.computed else point.get_receives(rank)
    count, owners = sum(move.tile.pixels for move in pieces), format_rank_count(len(pieces))
    if point.computed:
        owned = f"{owners} own{'s' * (len(pieces) == 1)}"
        more = f"It computes {count} px more, which {owned}: nothing travels here, halos are fused"
    else:
        images, channels = point.spec.shape[:2]
        batch = f"{channels} channels" if images == 1 else f"{channels} channels of {images} images"
        more = f"It borrows {count} px more from {owners}: {format_bytes(point.count_bytes(pieces))} in {batch}"
    halo = ", ".join(f"{width} {side}" for side, width in point.compute_widths(rank).items())
    lines = [f"{own} of this layer's input", more, f"Its halo in px: {halo}"]
    fill = point.get_fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which nobody lends"]


def describe_region(point: HaloPoint, rank: int, place: Tile) -> list[str]:
    """Describe which pixels are shown, and how many of them are owned, borrowed or computed redundantly."""
    rows, cols = place.rows, place.cols
    lent = sum((move.tile & place).pixels for move in point.find_halo(rank))
    own = (point.tiles[rank] & place).pixels
    verb = "computed twice" if point.computed else "borrowed"
    shown = (
        f"Shown: rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}. "
        f"{own} px are its own, {lent} {verb}, {place.pixels - own - lent} not needed"
    )
    words = [shown]
    # Only the image itself is at hand here. The values of inner layers exist on the ranks, during a step.
    if has_values(point, place):
        return [*words, "In each pixel: the picture's red, green, blue (0 to 255)"]
    if max(place.shape) <= UP_TO_PX:
        return [*words, "Colours are the picture's there: this layer's own values are on the ranks only"]
    return words


def has_values(point: HaloPoint, place: Tile) -> bool:
    """Return whether pixel values can be written into `place`: it is small, and the layer reads the picture itself."""
    return point.reads_image and max(place.shape) <= UP_TO_PX


def describe_values(rasters: RasterCache, point: HaloPoint, place: Tile) -> str:
    told = "; ".join(format_values(rasters.render_region(point.size_px, place), place))
    return f"Pixel values (red green blue) from column {place.cols.start} on: {told}"


def truncate_lines(count: int, lines: list[str]) -> list[str]:
    """
    >>> truncate_lines(2, ["a", "b", "c", "d"])
    ['a', 'b', '... and 2 more']
    """
    return lines if len(lines) <= count else [*lines[:count], f"... and {len(lines) - count} more"]


VISIBLE_PX = 6  # of the screen; a thinner halo is drawn in the zoomed panel only
MOST_LINES = 8  # of the list of sources
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
) -> Drawing:
    """Draw the picture in the tiles of a stage (default: the first); with a model, also the halos of a layer.

    `layer` is a module's name (`"blocks.0"`), an operator's name in the graph, or an index into the (stage's) layers
    that read beyond their tiles (default: 0, the first). `tile` is the tile whose halo is drawn (default: the one with
    most sources). `zoom` shows that many pixels of the layer across, around the pixel `at` (row, column; default:
    where the tile borrows). Up to 12 pixels are so large that the picture's values are written into them.
    `receptive` is a pixel (row, column) of the layer's output, whose receptive field in the picture is framed.

    A model is traced at the picture's size, which takes seconds; a `Recipe` or `ModelGraph` is not. All numbers are
    read from the ranks' programs. Raises PlanError, TraceError or ImageError.

    >>> from engines.images.stains import immunohistochemistry
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_slicing
    >>> figure = show_slicing(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), tile=0)
    """
    rasters = RasterCache(open_image(image))
    if model is None:
        if layer is not None or receptive is not None:
            raise PlanError("layer and receptive are those of a model. Give the model too, or leave them out.")
        point = make_picture_point(rasters.picture, plan, find_spatial_stages(plan)[0] if stage is None else stage)
        if zoom is None:
            return draw_tiles_only(rasters, point, tile)
        return draw_slicing(rasters, point, tile, LayerView(zoom, at))
    if stage is not None:
        get_stage_ranks(plan, stage)
    graph = resolve_graph(model, rasters.picture, plan)
    point = find_point(find_layer_points(graph, plan, stage), layer)
    field = ReceptiveFields(graph).compute_field(point.readers[0].name, *receptive) if receptive else None
    return draw_slicing(rasters, point, tile, LayerView(zoom, at, field))


def draw_tiles_only(picture: Picture | RasterCache, point: HaloPoint, tile: int | None = None) -> Drawing:
    """Draw the picture in tiles, with a thicker outline around `tile` if given."""
    rasters, tiles = RasterCache.of(picture), point.tiles
    chosen = None if tile is None else _resolve_rank(point, tile)
    told = [f"tile {point.numbers[rank]}, rank {rank}: {format_size(tile.shape)} px" for rank, tile in tiles.items()]
    chosen_words = [] if chosen is None else [f"Chosen: {told[point.numbers[chosen]]}"]
    words = [*chosen_words, *truncate_lines(MOST_LINES, told)]
    panels = make_panels(rasters.picture.shape(), None, words)
    draw_picture(panels.main, rasters, point.size_px)
    draw_tiles(panels.main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), chosen)
    title = panels.draw_title(describe_tiling(rasters.picture, point.ranks))
    # No tile is right of or below the last one, so that all labels are in the upper left corners.
    label_tiles(panels.main, point.numbers, tiles, centre=tiles[point.ranks.ranks[-1]])
    panels.draw_lines(words)
    panels.figure.alt = ". ".join([f"{title}: {'; '.join(told)}", *chosen_words]) + "."
    return panels.figure


def draw_slicing(
    picture: Picture | RasterCache, point: HaloPoint, tile: int | None = None, view: LayerView | None = None
) -> Drawing:
    """Draw the figure of `show_slicing` for one compiled layer, for callers that draw many."""
    rasters, rank, view = RasterCache.of(picture), _resolve_rank(point, tile), view or LayerView()
    whole, pieces = view.zoom is None, [point.describe_move(move) for move in point.get_receives(rank)]
    if whole:
        place = choose_zoom_view(point, rank)
    elif view.zoom < 1:
        raise PlanError(f"zoom={view.zoom} is how many pixels are shown across: use 1 or more, or None for all.")
    else:
        row, col = choose_seam(point, rank) if view.at is None else view.at
        place = make_square(get_pixel_at(col, row, point.size_px), view.zoom, point.size_px)
    # The small panel shows the framed place (of a whole layer that reads across a seam), or the whole picture.
    lends = bool(point.find_halo(rank))
    beside = rasters.picture.shape() if not whole else place.shape if lends else None
    told = [*describe_tile(point, rank), *([] if whole else describe_region(point, rank, place))]
    told += describe_field(point, view.field, rasters.picture.shape()) if view.field else []
    told += view.remarks
    words = [*told, *truncate_lines(MOST_LINES, pieces)]
    panels = make_panels(rasters.picture.shape() if whole else place.shape, beside, words)
    title = panels.draw_title(format_title(rasters.picture, point))
    # Arrows with labels tell the sources on the picture; without them the list is written beside it.
    draw = _draw_whole if whole else _draw_close
    labelled = draw(panels, rasters, point, rank, place)
    for axes in (panels.main, panels.side):
        if axes and view.field:
            draw_field(axes, point, view.field, rasters.picture.shape())
    _draw_legend(panels, point, rank, view.field is not None)
    panels.draw_lines(told if labelled else words)
    values = [] if whole or not has_values(point, place) else [describe_values(rasters, point, place)]
    panels.figure.alt = ". ".join([title.replace("\n", ": "), *told, "; ".join(pieces), *values])
    return panels.figure


def _draw_whole(panels: FigurePanels, rasters: RasterCache, point: HaloPoint, rank: int, place: Tile) -> bool:
    """Draw the whole layer large and a seam of it small. Return whether the arrows could be labelled."""
    main, tiles, avoid = panels.main, point.tiles, []
    draw_picture(main, rasters, point.size_px, unit="px of this layer")
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), rank)
    for owner in tiles:
        mine = owner == rank
        redundant = point.find_redundant_moves(owner) if mine else ()
        for pieces, look in ((point.get_receives(owner), HALO if mine else OTHER_HALO), (redundant, COMPUTED)):
            visible = [move for move in pieces if min(*get_screen_box(main, move.tile).size) >= VISIBLE_PX]
            draw_halos(main, point.ranks, visible, look)
    if panels.side:
        draw_zoom(panels.side, rasters, point, rank, place)
        label_owners(panels.side, point, rank, place)
        avoid = mark_zoom(main, place)
    # Labels avoid the frame of the zoomed place, which is therefore drawn first. If the arrows are labelled, the chosen
    # tile has a label already, with what it borrows.
    lettered = draw_halo_arrows(main, point, rank, avoid)
    untold = {owner: number for owner, number in point.numbers.items() if owner != rank or not lettered}
    label_tiles(main, untold, tiles, tiles[rank], avoid)
    return bool(lettered)


def _draw_close(panels: FigurePanels, rasters: RasterCache, point: HaloPoint, rank: int, place: Tile) -> bool:
    """Draw a region large, and its position in the layer small. Return False: no arrow is labelled."""
    values = has_values(point, place)
    draw_zoom(panels.main, rasters, point, rank, place, values)
    if not values:
        label_owners(panels.main, point, rank, place)
    if panels.side:
        draw_picture(panels.side, rasters, point.size_px)
        panels.side.set(xlabel="the place in this layer, px", ylabel="")
        draw_tiles(panels.side, point.ranks, point.tiles, OUTLINE_GAP * max(point.size_px), rank)
        mark_zoom(panels.side, place)
    return False


def _resolve_rank(point: HaloPoint, tile: int | None) -> int:
    """Return the rank of a tile of the stage; None: of the tile with most sources."""
    ranks = point.ranks.ranks
    if tile is None:
        return max(ranks, key=lambda rank: len(point.get_receives(rank)))
    if not 0 <= tile < len(ranks):
        raise PlanError(f"tile={tile}, but stage {point.stage} has tiles 0 to {len(ranks) - 1}.")
    return ranks[tile]


def _draw_legend(panels: FigurePanels, point: HaloPoint, rank: int, with_field: bool) -> None:
    outlines = tuple(Line2D([], [], color=tint, linestyle=line, linewidth=2.5) for tint, line in LOOKS)
    # A look that alternates from tile to tile has an entry with a handle for each of its colours, side by side.
    entries: dict[str, object] = {"what a rank owns": outlines}
    for name, pieces, look in (
        ("halo: what this tile borrows", point.get_receives(rank), HALO),
        ("what it computes though others own it", point.find_redundant_moves(rank), COMPUTED),
    ):
        if pieces:
            entries[name] = tuple(Patch(edgecolor=tint, **look) for tint, _ in LOOKS)
    if panels.side and len(entries) > 1:
        entries["whitened: not needed by this tile"] = Patch(facecolor="white", edgecolor="#bbbbbb")
    # Whether the halos of others are wide enough to be drawn depends on the screen: the figure itself tells.
    if any(patch.get_hatch() == OTHER_HALO["hatch"] for patch in panels.main.patches):
        entries["halos of the other tiles"] = Patch(**OTHER_HALO | {"linewidth": 0.5})
    if with_field:
        entries["receptive field"] = Patch(edgecolor=INK, linewidth=1.6, **FIELD)
    together = {tuple: HandlerTuple(ndivide=None)}
    look = {"loc": "lower left", "ncols": len(entries), "frameon": False, "fontsize": 9, "borderaxespad": 0.2}
    panels.figure.legend(entries.values(), entries.keys(), handler_map=together, **look)
