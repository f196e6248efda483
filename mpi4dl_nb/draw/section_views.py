"""Drawing of a volume in tiles: sections through one position, one of them large, each with the planes of the others.

A picture has one section only, itself; `slicing.py` draws that. A signal is one row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from mpi4dl_nb.draw.figure import CASING, INK, Drawing, Style
from mpi4dl_nb.draw.halo_points import HaloPoint, Shown
from mpi4dl_nb.draw.navigation import (
    Position,
    RasterCache,
    choose_seam,
    clamp_position,
    clamp_to_tile,
    make_square,
    scale_position,
)
from mpi4dl_nb.draw.sections import Section, SectionPoint, limit_aspect, list_sections
from mpi4dl_nb.draw.slicing_parts import (
    LayerView,
    draw_layer,
    draw_legend,
    draw_names,
    make_panels,
    resolve_rank,
    truncate_lines,
)
from mpi4dl_nb.draw.tile_words import (
    describe_field,
    describe_region,
    describe_tile,
    describe_values,
    format_title,
    has_values,
)
from mpi4dl_nb.draw.tilemap import draw_field, draw_zoom, label_owners, label_tiles, mark_zoom
from mpi4dl_nb.draw.volume import Volume
from mpi4dl_nb.engines.compiler.receptive import ReceptiveField
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.geometry.tiles import AXIS_NAMES, Tile


def resolve_along(name: str | None, axes: int) -> int:
    """Return the number of the axis of this name, along which the large view is seen; None: of the first."""
    names = AXIS_NAMES[-axes:]
    if name is None:
        return 0
    if axes < 3 or name not in names:
        problem = f"along={name!r} is none of the axes of a volume"
        raise PlanError(describe_unknown(problem, name, names if axes > 2 else (), "Leave it out." * (axes < 3)))
    return names.index(name)


@dataclass(frozen=True)
class SectionView:
    """A section of a layer, what it shows of the layer's point, and the volume's grey there."""

    section: Section
    point: SectionPoint
    rasters: RasterCache

    @property
    def middle(self) -> tuple[int, ...]:
        """The row and the column of the position through which the section goes."""
        return (0, *(self.section.at[axis] for axis in self.section.axes))[-2:]

    @property
    def aspect(self) -> tuple[float, float]:
        """The sides of a panel for the whole section."""
        return limit_aspect(self.point.size_px)


def make_views(volume: Volume, point: HaloPoint, at: Position, along: int) -> list[SectionView]:
    """Return the sections of a layer through a position, first that which is seen along the axis `along`."""
    there = scale_position(at, point.sizes, volume.shape())
    return [
        SectionView(section, SectionPoint.of(point, section), volume.get_rasters(Section(section.axes, there)))
        for section in sorted(list_sections(at), key=lambda section: along in section.axes)
    ]


def draw_sections(volume: Volume, point: HaloPoint, tile: int | None, view: LayerView) -> Drawing:
    """Draw the figure of `show_slicing` for one compiled layer of a volume or signal."""
    rank = resolve_rank(point, tile)
    at = choose_position(volume, point, rank, view)
    views = make_views(volume, point, at, view.along)
    first, place = views[0], None
    if view.zoom is not None:
        place = make_square(first.middle, view.zoom, first.point.size_px)
    small = views[1:] if place is None else views  # the place of a close view is framed in the whole of its section
    words = _describe_views(volume, point, rank, view, first, place)
    pieces = [point.describe_move(move) for move in point.get_receives(rank)]
    title, values = format_title(volume, point), []
    large = first.aspect if place is None else limit_aspect(place.size_px)
    listed = [*words, *truncate_lines(pieces)]
    figure, main, sides, _ = make_panels(large, [other.aspect for other in small], title, listed)
    panels = [*zip(sides, small, strict=True)]
    if place is None:
        panels.insert(0, (main, first))
    elif draw_close(main, first, rank, place):
        values = [describe_values(first.rasters, first.point, place)]
    for axes, shown in panels:
        # Not the halos of others: where a section is beside a seam, all of it is lent to the tile behind it.
        draw_layer(axes, shown.rasters, shown.point, rank, [rank])
        mark_position(axes, shown.section)
        if view.field:
            _draw_field_part(axes, shown, view.field, volume)
        avoid = mark_zoom(axes, place) if place and shown is first else []
        if axes is main:
            draw_names(axes, shown.point, rank, avoid)
        else:
            label_tiles(axes, point.numbers, shown.point.tiles, shown.point.tiles[rank], avoid)
    draw_legend(figure, point, rank, place is not None, view.field is not None)
    figure.alt = ". ".join([title.replace("\n", ": "), *words, "; ".join(pieces), *values])
    return figure


def choose_position(volume: Volume, point: HaloPoint, rank: int, view: LayerView) -> Position:
    """Return where the sections meet: as asked, or in the receptive field, or where the tile borrows most corners."""
    sizes = volume.shape()
    if view.at is not None:
        if len(view.at) != len(sizes):
            raise PlanError(f"at={view.at} has {len(view.at)} numbers, but the {volume.name} has {len(sizes)} axes.")
        return clamp_position(view.at, point.sizes)
    if view.field and view.field.image:
        middle = [(span.start + span.stop) // 2 for span in view.field.image]
        return scale_position(middle, sizes, point.sizes)
    return choose_tile_position(point, rank)


def choose_tile_position(point: HaloPoint, rank: int) -> Position:
    """Return the pixel of a tile where it borrows from most: all sections show the tile and its neighbours there."""
    return clamp_to_tile(point.ranks.grid, point.numbers[rank], choose_seam(point, rank), point.sizes)


def choose_image_position(image: Shown, point: HaloPoint, tile: int) -> Position:
    """Return that pixel of the image itself."""
    return scale_position(choose_tile_position(point, point.ranks.ranks[tile]), point.sizes, image.shape())


def _describe_views(
    volume: Volume, point: HaloPoint, rank: int, view: LayerView, first: SectionView, place: Tile | None
) -> list[str]:
    words, at = describe_tile(point, rank, volume), name_position(first.section)
    words += [f"The views go through {at}: dotted lines"] if len(first.section.at) > 2 else []
    words += [] if place is None else describe_region(first.point, rank, place, first.rasters)
    words += [describe_field(point, view.field, volume.shape())] if view.field else []
    return [*words, volume.scale_words, *view.remarks]


def name_position(section: Section) -> str:
    """Return a text such as `plane 4, row 2, column 7`."""
    return ", ".join(f"{name.removesuffix('s')} {px}" for name, px in zip(section.all_names, section.at, strict=True))


def draw_close(axes: Axes, view: SectionView, rank: int, place: Tile) -> bool:
    """Draw a close view of a place of a section. Return whether numbers are written into its pixels."""
    written = has_values(view.point, place)
    draw_zoom(axes, view.rasters, view.point, rank, place, written)
    if not written:
        label_owners(axes, view.point, rank, place)
    return written


def mark_position(axes: Axes, section: Section) -> None:
    """Draw the planes of the other sections as lines, each with its name, and name the position of this section."""
    if not section.across:
        axes.set(yticks=[], ylabel="")  # the row of a signal
        return
    names = [name.removesuffix("s") for name in section.all_names]
    here = ", ".join(f"{names[axis]} {section.at[axis]}" for axis in section.across)
    axes.set_xlabel(f"{axes.get_xlabel()} · at {here}", fontsize=9)
    down, across = section.axes
    look: Style = {"color": INK, "linewidth": 1.2, "linestyle": (0, (1, 2)), "zorder": 8, "path_effects": CASING}
    axes.axhline(section.at[down] + 0.5, **look)
    axes.axvline(section.at[across] + 0.5, **look)
    text: Style = {"fontsize": 8, "color": INK, "clip_on": False}
    right, above = axes.get_yaxis_transform(), axes.get_xaxis_transform()
    axes.text(1.01, section.at[down] + 0.5, f"{names[down]} {section.at[down]}", va="center", transform=right, **text)
    words = f"{names[across]} {section.at[across]}"
    axes.text(section.at[across] + 0.5, 1.01, words, ha="center", va="bottom", transform=above, **text)


def _draw_field_part(axes: Axes, view: SectionView, field: ReceptiveField, volume: Volume) -> None:
    """Frame the part of a receptive field that a section meets."""
    section = Section(view.section.axes, scale_position(view.section.at, view.point.solid.sizes, volume.shape()))
    if part := section.cut(field.image):
        draw_field(axes, view.point, replace(field, image=part), section.cut(Tile.whole(*volume.shape())).size_px)
