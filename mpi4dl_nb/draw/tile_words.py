"""Words about a picture, volume or signal in tiles: what a tile owns and borrows at a layer, and what a view shows."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4dl_nb.draw.figure import format_size
from mpi4dl_nb.draw.halo_points import HaloPoint, Shown
from mpi4dl_nb.draw.navigation import RasterCache, compute_layer_microns
from mpi4dl_nb.draw.picture_reach import PictureReach, describe_reach
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_microns
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Tile
from mpi4dl_nb.engines.plan.layout import StageRanks

UP_TO_PX = 12  # across a view whose values are written; three numbers would be illegible in smaller cells


def describe_tiling(picture: Shown, stage: StageRanks) -> str:
    """Return a text such as `picture, 512 × 512 px (rows × columns), in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    if stage.shares > 1:
        where = f"tile on each of {stage.shares} ranks, which share the images"
    sizes = picture.shape()
    names = f" ({' × '.join(AXIS_NAMES[-len(sizes) :])})" if len(sizes) > 1 else ""
    return f"{picture.name}, {format_size(sizes)} px{names}, in {stage.grid} {where}"


def format_title(picture: Shown, point: HaloPoint) -> str:
    if not point.readers:
        return describe_tiling(picture, point.ranks)
    layer, channels = f"layer {point.name} ({point.operator})", format_count(point.spec.shape[1], "channel")
    size = format_size(point.sizes)
    if isinstance(point, PictureReach):
        return f"{describe_tiling(picture, point.ranks)}\ncumulative halo of {layer}, in the picture"
    return f"{describe_tiling(picture, point.ranks)}\n{layer} reads {channels} of {size} px"


def describe_tile(point: HaloPoint, rank: int, picture: Shown) -> list[str]:
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
        images, batch = point.spec.shape[0], format_count(point.spec.shape[1], "channel")
        batch += f" of {images} images" * (images > 1)
        more = f"It borrows {count} px more from {owners}: {format_bytes(point.count_bytes(pieces))} in {batch}"
    widths = point.compute_widths(rank)
    halo = ", ".join(f"{width} {side}" for side, width in widths.items())
    if any(widths.values()) and (microns := compute_layer_microns(picture, point.sizes)):
        far = max(width * microns[side in ("left", "right")] for side, width in widths.items())
        halo += f" (up to {format_microns(far)} of the picture)"
    lines = [f"{sentence} of this layer's input", more, f"Its halo in px: {halo}"]
    fill = point.get_fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which is padding"]


def describe_region(point: HaloPoint, rank: int, place: Tile, rasters: RasterCache) -> list[str]:
    """Describe which pixels are shown, and how many of them are owned, borrowed or computed redundantly."""
    lent = sum((move.tile & place).pixels for move in point.find_halo(rank))
    owned = (point.tiles[rank] & place).pixels
    shares = f"{owned} px are its own, {lent} {point.verb}, {place.pixels - owned - lent} not needed"
    words = [f"Shown: {place.describe(point.axis_names)}. {shares}"]
    # Only the image itself is at hand here. The values of inner layers exist on the ranks, during a step.
    if has_values(point, place):
        words.append(f"In each pixel: the {rasters.picture.name}'s {rasters.cell_words}")
    elif max(place.shape) <= UP_TO_PX:
        words.append("Colours are the picture's there: this layer's own values are on the ranks only")
    return words


def has_values(point: HaloPoint, place: Tile) -> bool:
    """Return whether pixel values can be written into `place`: it is small, and the layer reads the picture itself."""
    return point.reads_image and max(place.shape) <= UP_TO_PX


def describe_field(point: HaloPoint, field: ReceptiveField, sizes: Sequence[int]) -> str:
    """Describe the receptive field of an output pixel in a picture of these sizes, and its share on each tile."""
    image, pixel = field.image, f"Output pixel ({', '.join(map(str, field.pixel))})"
    if not image:
        return f"{pixel} depends on no pixel of the picture"
    tiles = zip(point.ranks.ranks, point.ranks.grid.cut(*sizes), strict=True)
    parts = {rank: (tile & image).pixels for rank, tile in tiles if tile & image}
    share = ", ".join(f"tile {point.numbers[rank]} {count / image.pixels:.0%}" for rank, count in parts.items())
    return (
        f"{pixel} of this layer depends on {format_size(image.shape)} px of the picture (dashed): "
        f"{image.describe()}. They lie on {share}"
    )


def describe_values(rasters: RasterCache, point: HaloPoint, place: Tile) -> str:
    """Return the values of the pixels of a place, row by row: red, green and blue of a picture."""
    down, across = (name.removesuffix("s") for name in point.axis_names)
    rows = [
        f"{down} {index}: {', '.join(' '.join(cell) for cell in row)}"
        for index, row in enumerate(rasters.list_cells(point.size_px, place), start=place.rows.start)
    ]
    return f"Pixel values{rasters.cell_order} from {across} {place.cols.start} on: {'; '.join(rows)}"
