"""How a picture is cut: who owns which pixels, and what a layer borrows across the seams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import nn

from engines.errors import PlanError
from engines.images.picture import Picture, Source, open_image
from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.program.receptive import ReceptiveField, ReceptiveFields
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile
from engines.training import Recipe
from mpi4dl_nb.draw.field import FIELD, draw_field, field_words
from mpi4dl_nb.draw.figure import INK, Drawing, spoken_size
from mpi4dl_nb.draw.halos import HaloPoint, find_point, traced
from mpi4dl_nb.draw.layers import bare_point, layer_points, spatial_stages, stage_ranks
from mpi4dl_nb.draw.lettering import screen_box
from mpi4dl_nb.draw.panels import Panels, with_panels
from mpi4dl_nb.draw.places import around, pixel_at, usual_seam
from mpi4dl_nb.draw.rasters import Rasters
from mpi4dl_nb.draw.tilemap import (
    COMPUTED,
    HALO,
    LOOKS,
    OTHER_HALO,
    draw_borrowing,
    draw_halos,
    draw_picture,
    draw_tiles,
    tag_tiles,
)
from mpi4dl_nb.draw.words import at_most, close_words, cut_text, has_values, summary, title_of, values_of
from mpi4dl_nb.draw.zoom import draw_zoom, mark_zoom, name_owners, zoom_view

__all__ = ["View", "draw_slicing", "draw_tiles_only", "show_slicing"]

VISIBLE_PX = 6  # of the screen: a thinner halo is seen in the zoomed panel only
MOST_LINES = 8  # of the list of lenders
OUTLINE_GAP = 0.005  # of the picture's longer side


@dataclass(frozen=True)
class View:
    """How a layer is looked at: as a whole (`zoom` None), or so many pixels across, around `at` (row, column).

    `field` is a receptive field to be framed, `remarks` are lines to be added to the words.
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
    """The picture in the tiles of a stage (default: the first); with a model, also the halos of one of its layers.

    `layer` is a module's name (`"blocks.0"`), an operator's name in the graph, or which of the (stage's) layers that
    read beyond their tiles (0 is the first, and the default). `tile` is the tile whose borrowing is drawn (default:
    the one with most lenders). `zoom` shows so many pixels of the layer across, around the pixel `at` (row, column;
    default: where the tile borrows); up to 12 are so large that the picture's values are written in them.
    `receptive` is a pixel (row, column) of what the layer makes: what it sees of the picture is framed.

    A model is traced at the picture's size, which takes seconds; a `Recipe` or `ModelGraph` is not. All numbers are
    read from the ranks' programs. Raises PlanError, TraceError or ImageError.

    >>> from engines.images.samples import immunohistochemistry
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_slicing
    >>> figure = show_slicing(immunohistochemistry(), Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), tile=0)
    """
    rasters = Rasters(open_image(image))
    if model is None:
        return _bare(rasters, plan, tile, stage, View(zoom, at), layer if receptive is None else receptive)
    if stage is not None:
        stage_ranks(plan, stage)
    graph = traced(model, rasters.picture, plan)
    point = find_point(layer_points(graph, plan, stage), layer)
    field = ReceptiveFields(graph).of(point.readers[0].name, *receptive) if receptive else None
    return draw_slicing(rasters, point, tile, View(zoom, at, field))


def _bare(rasters: Rasters, plan: Plan, tile: int | None, stage: int | None, view: View, of_layer: object) -> Drawing:
    """Without a model."""
    if of_layer is not None:
        raise PlanError("layer and receptive are those of a model. Give the model too, or leave them out.")
    point = bare_point(rasters.picture, plan, spatial_stages(plan)[0] if stage is None else stage)
    return draw_tiles_only(rasters, point, tile) if view.zoom is None else draw_slicing(rasters, point, tile, view)


def draw_tiles_only(picture: Picture | Rasters, point: HaloPoint, tile: int | None = None) -> Drawing:
    """The picture in tiles, one of them perhaps with a thicker outline."""
    rasters, tiles = Rasters.of(picture), point.tiles
    chosen = None if tile is None else _rank_of(point, tile)
    told = [f"tile {point.numbers[rank]}, rank {rank}: {spoken_size(tile.shape)} px" for rank, tile in tiles.items()]
    chosen_words = [] if chosen is None else [f"Chosen: {told[point.numbers[chosen]]}"]
    words = [*chosen_words, *at_most(MOST_LINES, told)]
    panels = with_panels(rasters.picture.shape(), None, words)
    draw_picture(panels.main, rasters, point.size_px)
    draw_tiles(panels.main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), chosen)
    title = panels.titled(cut_text(rasters.picture, point.ranks))
    tag_tiles(panels.main, point.numbers, tiles, centre=tiles[point.ranks.ranks[-1]])  # all in the first corner
    panels.say(words)
    panels.figure.alt = ". ".join([f"{title}: {'; '.join(told)}", *chosen_words]) + "."
    return panels.figure


def draw_slicing(
    picture: Picture | Rasters, point: HaloPoint, tile: int | None = None, view: View | None = None
) -> Drawing:
    """What `show_slicing` shows of one layer: for whoever keeps the layers to draw many."""
    rasters, rank, view = Rasters.of(picture), _rank_of(point, tile), view or View()
    whole, pieces = view.zoom is None, [point.piece_text(move) for move in point.borrowed(rank)]
    place = zoom_view(point, rank) if whole else _place(point, rank, view)
    lends = bool(point.borrowed(rank) or point.overlaps(rank))
    beside = rasters.picture.shape() if not whole else place.shape if lends else None
    told = [*summary(point, rank), *([] if whole else close_words(point, rank, place))]
    told += field_words(point, view.field, rasters.picture.shape()) if view.field else []
    told += view.remarks
    words = [*told, *at_most(MOST_LINES, pieces)]
    panels = with_panels(rasters.picture.shape() if whole else place.shape, beside, words)
    title = panels.titled(title_of(rasters.picture, point))
    draw = _draw_whole if whole else _draw_close
    labelled = draw(panels, rasters, point, rank, place)
    if view.field:
        for axes in (panels.main, panels.side):
            if axes:
                draw_field(axes, point, view.field, rasters.picture.shape())
    _legend(panels, point, rank, view.field is not None)
    panels.say(told if labelled else words)
    values = [] if whole or not has_values(point, place) else [values_of(rasters, point, place)]
    panels.figure.alt = ". ".join([title.replace("\n", ": "), *told, "; ".join(pieces), *values])
    return panels.figure


def _place(point: HaloPoint, rank: int, view: View) -> Tile:
    if view.zoom is None or view.zoom < 1:
        raise PlanError(f"zoom={view.zoom} is how many pixels are shown across: use 1 or more, or None for all.")
    at = usual_seam(point, rank) if view.at is None else view.at
    return around(pixel_at(at[1], at[0], point.size_px), view.zoom, point.size_px)


def _draw_whole(panels: Panels, rasters: Rasters, point: HaloPoint, rank: int, place: Tile) -> bool:
    """The whole layer large, a seam of it small; whether there was room to label the arrows."""
    main, tiles, avoid = panels.main, point.tiles, []
    draw_picture(main, rasters, point.size_px, unit="px of this layer")
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), rank)
    _hatch_visible(main, point, rank)
    if panels.side:
        draw_zoom(panels.side, rasters, point, rank, place)
        name_owners(panels.side, point, rank, place)
        avoid = mark_zoom(main, place)
    lettered = draw_borrowing(main, point, rank, avoid)
    untold = {owner: number for owner, number in point.numbers.items() if owner != rank or not lettered}
    tag_tiles(main, untold, tiles, tiles[rank], avoid)
    return bool(lettered)


def _draw_close(panels: Panels, rasters: Rasters, point: HaloPoint, rank: int, place: Tile) -> bool:
    """A place large, and small where it is; no arrow is labelled."""
    values = has_values(point, place)
    draw_zoom(panels.main, rasters, point, rank, place, values)
    if not values:
        name_owners(panels.main, point, rank, place)
    if panels.side:
        draw_picture(panels.side, rasters, point.size_px)
        panels.side.set(xlabel="the place in this layer, px", ylabel="")
        draw_tiles(panels.side, point.ranks, point.tiles, OUTLINE_GAP * max(point.size_px), rank)
        mark_zoom(panels.side, place)
    return False


def _hatch_visible(axes: Axes, point: HaloPoint, rank: int) -> None:
    """Halos, where they are more than a line on the screen."""
    for owner in point.tiles:
        mine = owner == rank
        draw_halos(axes, point.ranks, _visible(axes, point.borrowed(owner)), HALO if mine else OTHER_HALO)
        if mine:
            draw_halos(axes, point.ranks, _visible(axes, point.overlaps(owner)), COMPUTED)


def _visible(axes: Axes, pieces: Sequence[Move]) -> list[Move]:
    return [move for move in pieces if min(*screen_box(axes, move.tile).size) >= VISIBLE_PX]


def _rank_of(point: HaloPoint, tile: int | None) -> int:
    """The rank of a tile of the stage; None: of the tile with most lenders."""
    ranks = point.ranks.ranks
    if tile is None:
        return max(ranks, key=lambda rank: len(point.borrowed(rank)))
    if not 0 <= tile < len(ranks):
        raise PlanError(f"tile={tile}, but stage {point.stage} has tiles 0 to {len(ranks) - 1}.")
    return ranks[tile]


def _legend(panels: Panels, point: HaloPoint, rank: int, with_field: bool) -> None:
    outlines = tuple(Line2D([], [], color=tint, linestyle=line, linewidth=2.5) for tint, line in LOOKS)
    entries: dict[str, object] = {"what a rank owns": outlines}
    for name, pieces, look in (
        ("halo: what this tile borrows", point.borrowed(rank), HALO),
        ("what it computes though others own it", point.overlaps(rank), COMPUTED),
    ):
        if pieces:
            entries[name] = tuple(Patch(edgecolor=tint, **look) for tint, _ in LOOKS)
    if panels.side and len(entries) > 1:
        entries["whitened: not needed by this tile"] = Patch(facecolor="white", edgecolor="#bbbbbb")
    if any(patch.get_hatch() == OTHER_HALO["hatch"] for patch in panels.main.patches):
        entries["halos of the other tiles"] = Patch(**OTHER_HALO | {"linewidth": 0.5})
    if with_field:
        entries["receptive field"] = Patch(edgecolor=INK, linewidth=1.6, **FIELD)
    together = {tuple: HandlerTuple(ndivide=None)}
    look = {"loc": "lower left", "ncols": len(entries), "frameon": False, "fontsize": 9, "borderaxespad": 0.2}
    panels.figure.legend(entries.values(), entries.keys(), handler_map=together, **look)
