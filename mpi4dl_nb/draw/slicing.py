"""How a picture is cut: who owns which pixels, and what a layer borrows across the seams."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import nn

from engines.errors import PlanError
from engines.images.picture import Picture, Source, open_image
from engines.layer.graph import ModelGraph
from engines.layout import Layout, StageRanks
from engines.plan import Plan
from engines.training import Recipe
from mpi4dl_nb.draw.figure import INK, Drawing, spoken_bytes, spoken_size
from mpi4dl_nb.draw.halos import HaloPoint, find_point, halo_points, traced
from mpi4dl_nb.draw.lettering import screen_box
from mpi4dl_nb.draw.tilemap import (
    HALO,
    LOOKS,
    OTHER_HALO,
    draw_borrowing,
    draw_halos,
    draw_picture,
    draw_tiles,
    tag_tiles,
)
from mpi4dl_nb.draw.zoom import draw_zoom, mark_zoom, name_owners, zoom_view

__all__ = ["draw_slicing", "show_slicing"]

VISIBLE_PX = 6  # of the screen: a thinner halo is seen in the zoomed panel only
MOST_LINES = 8  # of the list of lenders
OUTLINE_GAP = 0.005  # of the picture's longer side


def show_slicing(
    image: Source,
    plan: Plan,
    model: nn.Module | Recipe | ModelGraph | None = None,
    layer: str | int | None = None,
    tile: int | None = None,
) -> Drawing:
    """The picture in the tiles of the first stage; with a model, also the halos of one of its layers.

    `layer` is a module's name (`"blocks.0"`), an operator's name in the graph, or which of the layers that
    borrow (0 is the first, and the default). `tile` is the tile whose borrowing is drawn (default: the one
    with most lenders). A model is traced at the picture's size, which takes seconds; a `Recipe` or
    `ModelGraph` is not. All numbers are read from the ranks' programs. Raises PlanError, TraceError or
    ImageError.
    """
    picture = open_image(image)
    if model is None:
        return _tiles_only(picture, plan)
    point = find_point(halo_points(traced(model, picture, plan), plan), layer)
    return draw_slicing(picture, point, tile)


def _tiles_only(picture: Picture, plan: Plan) -> Drawing:
    stage = Layout.of(plan).stages[0]
    tiles = dict(zip(stage.ranks, stage.grid.cut(*picture.shape()), strict=True))
    names = {rank: number for number, rank in enumerate(stage.ranks)}
    figure = Drawing(figsize=(7, _height_in(picture)), layout="constrained")
    axes = figure.add_subplot()
    draw_picture(axes, picture, picture.shape())
    draw_tiles(axes, stage, tiles, OUTLINE_GAP * max(picture.shape()))
    axes.set_title(title := _cut_text(picture, stage), loc="left", fontsize=10)
    figure.settle()
    tag_tiles(axes, names, tiles, centre=tiles[stage.ranks[-1]])  # so all are in the first corner
    owned = [f"tile {names[rank]}, rank {rank}: {spoken_size(tile.shape)} px" for rank, tile in tiles.items()]
    figure.alt = f"{title}: {'; '.join(owned)}."
    return figure


def draw_slicing(picture: Picture, point: HaloPoint, tile: int | None = None) -> Drawing:
    """What `show_slicing` shows of one halo point: for whoever keeps the points to draw many."""
    rank = _rank_of(point, tile)
    figure = Drawing(figsize=(11, _height_in(picture)), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.6, 1), height_ratios=(2.2, 1))
    main, words = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[1, 1])
    zoom = figure.add_subplot(grid[0, 1]) if point.borrowed(rank) else None
    main.set_title(title := _title(picture, point), loc="left", fontsize=10)
    words.axis("off")
    labelled = _draw_panels(figure, main, zoom, picture, point, rank)
    summary, pieces = _summary(point, rank), [point.piece_text(move) for move in point.borrowed(rank)]
    listed = [] if labelled else _at_most(MOST_LINES, pieces)
    words.text(0, 0.93, "\n".join([*summary, *listed]), ha="left", va="top", fontsize=9, color=INK)
    figure.alt = ". ".join([title.replace("\n", ": "), *summary, "; ".join(pieces)])
    return figure


def _draw_panels(figure: Drawing, main: Axes, zoom: Axes | None, picture: Picture, point: HaloPoint, rank: int) -> bool:
    """The large panel and the zoomed one; whether there was room to label the arrows."""
    tiles, avoid = point.tiles, []
    draw_picture(main, picture, point.size_px, unit="px of this layer")
    draw_tiles(main, point.ranks, tiles, OUTLINE_GAP * max(point.size_px), rank)
    figure.draw_without_rendering()  # now it is known how large a pixel is
    _legend(figure, with_others=_hatch_visible(main, point, rank))
    if zoom is not None:
        view = zoom_view(point, rank)
        draw_zoom(zoom, picture, point, rank, view)
    figure.settle()
    if zoom is not None:
        name_owners(zoom, point, rank, view)
        avoid = mark_zoom(main, view)
    lettered = draw_borrowing(main, point, rank, avoid)
    untold = {owner: number for owner, number in point.numbers.items() if owner != rank or not lettered}
    tag_tiles(main, untold, tiles, tiles[rank], avoid)
    return bool(lettered)


def _hatch_visible(axes: Axes, point: HaloPoint, rank: int) -> bool:
    """Halos, where they are more than a line on the screen; whether those of other tiles are among them."""
    others = False
    for owner in point.tiles:
        pieces = point.borrowed(owner)
        wide = [move for move in pieces if min(*screen_box(axes, move.tile).size) >= VISIBLE_PX]
        draw_halos(axes, wide, HALO if owner == rank else OTHER_HALO)
        others |= bool(wide) and owner != rank
    return others


def _rank_of(point: HaloPoint, tile: int | None) -> int:
    """The rank of a tile of the stage; None: of the tile with most lenders."""
    ranks = point.ranks.ranks
    if tile is None:
        return max(ranks, key=lambda rank: len(point.borrowed(rank)))
    if not 0 <= tile < len(ranks):
        raise PlanError(f"tile={tile}, but stage {point.stage} has tiles 0 to {len(ranks) - 1}.")
    return ranks[tile]


def _cut_text(picture: Picture, stage: StageRanks) -> str:
    """`picture, 512 × 512 px, in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    return f"{picture.name}, {spoken_size(picture.shape())} px, in {stage.grid} {where}"


def _title(picture: Picture, point: HaloPoint) -> str:
    layer, channels = f"layer {point.name} ({point.operator})", point.spec.shape[1]
    size = spoken_size(point.size_px)
    return f"{_cut_text(picture, point.ranks)}\n{layer} reads {channels} channels of {size} px"


def _summary(point: HaloPoint, rank: int) -> list[str]:
    """What a tile owns, borrows, and how wide its halo is."""
    pieces, own = point.borrowed(rank), spoken_size(point.tiles[rank].shape)
    count, total = sum(move.tile.pixels for move in pieces), spoken_bytes(point.bytes(pieces))
    images, channels = point.spec.shape[:2]
    batch = f"{channels} channels" if images == 1 else f"{channels} channels of {images} images"
    halo = ", ".join(f"{width} {side}" for side, width in point.widths(rank).items())
    lines = [
        f"Tile {point.numbers[rank]} (rank {rank}) owns {own} px of what this layer reads",
        f"It borrows {count} px more from {len(pieces)} ranks: {total} in {batch}",
        f"Its halo in px: {halo}",
    ]
    fill = point.fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which nobody lends"]


def _at_most(count: int, lines: list[str]) -> list[str]:
    """
    >>> _at_most(2, ["a", "b", "c", "d"])
    ['a', 'b', '... and 2 more']
    """
    return lines if len(lines) <= count else [*lines[:count], f"... and {len(lines) - count} more"]


def _height_in(picture: Picture) -> float:
    """Inches, so that a picture of any sides fills its panel."""
    rows, cols = picture.shape()
    return min(9.0, max(4.5, 6.2 * rows / cols)) + 0.8


def _legend(figure: Drawing, with_others: bool) -> None:
    outlines = tuple(Line2D([], [], color=tint, linestyle=line, linewidth=2.5) for tint, line in LOOKS)
    entries = {
        "what a rank owns": outlines,
        "halo: what this tile borrows": Patch(**HALO),
        "whitened: not needed by this tile": Patch(facecolor="white", edgecolor="#bbbbbb"),
    }
    if with_others:
        entries["halos of the other tiles"] = Patch(**OTHER_HALO | {"linewidth": 0.5})
    look = {"loc": "outside lower left", "ncols": len(entries), "frameon": False, "fontsize": 9}
    together = {tuple: HandlerTuple(ndivide=None)}
    figure.legend(entries.values(), entries.keys(), handler_map=together, **look)
