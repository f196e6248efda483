"""What a page needs to draw the layers of a model on a picture, as numbers: tiles, halos, owners, receptive fields.

All of it is on the page before anybody points at a pixel: the page looks it up, and asks the kernel for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi4dl_nb.draw.halo_points import HaloLayers, HaloPoint, Shown, find_spatial_stages
from mpi4dl_nb.draw.packed_tables import pack_tables
from mpi4dl_nb.draw.picture_reach import PictureReach, describe_reach, explain_no_reach, make_reach
from mpi4dl_nb.draw.sections import limit_aspect, list_sections
from mpi4dl_nb.draw.tile_words import describe_tile, format_title
from mpi4dl_nb.draw.tilemap import find_look
from mpi4dl_nb.engines.compiler.receptive import FieldSpans
from mpi4dl_nb.engines.compiler.stages import cut_stages, find_layers
from mpi4dl_nb.engines.geometry.tiles import Move, Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan


def build_layer_tables(
    picture: Shown, layers: HaloLayers | None, points: Sequence[HaloPoint]
) -> tuple[tuple[dict[str, Any], ...], bytes]:
    """Return facts of each of `points`, in plain values, and its tables of numbers, packed as a list of dicts.

        owned      (tiles, sides)     box that each tile owns, by its sides: a rectangle has four
        windows    (tiles, sides)     box that each tile reads, within the image
        sources, targets              numbers of the tiles between which a piece moves
        pieces     (pieces, sides)    box that is borrowed
        seen       (tiles, sides)     box of the picture that each tile's outputs depend on
        fields     [(out_rows, 2), (out_columns, 2)]    the picture's rows of each output row, and columns likewise

    An output without rows and columns has no fields: `out_sizes` is empty. Without "reach" the outputs are not cut into
    tiles, and `seen` are the tiles of the input. Without a model (`layers` None) the outputs are the pixels of the
    picture.
    """
    facts: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for point in points:
        of_model = layers if point.readers else None  # else the point is the picture itself
        reach = None if of_model is None else make_reach(of_model, point, picture)
        spans = tuple(map(FieldSpans.whole, point.sizes)) if of_model is None else of_model.get_spans(point)
        ranks = point.ranks.ranks
        pieces = [(move, rank) for rank in ranks for move in point.find_halo(rank)]
        why = "" if of_model is None else explain_no_reach(of_model, point)
        words = []
        for rank in ranks:
            lines = describe_tile(point, rank, picture)
            lines += describe_reach(reach, rank, picture.microns_per_px) if reach else filter(None, [why])
            words.append([f"{line}." for line in lines])
        facts.append(
            {
                "title": format_title(picture, point).replace("\n", " · "),
                "name": f"layer {point.name}" if point.readers else "the picture",
                "operator": point.operator if point.readers else "",
                "stage": point.stage,
                "ranks": list(ranks),
                "looks": [find_look(point.ranks, rank) for rank in ranks],
                "sizes": list(point.sizes),
                "out_sizes": [len(axis.starts) for axis in spans],
                "pixel_bytes": point.pixel_bytes,
                "moves": [] if point.computed else [point.describe_move(move) for move, _ in pieces],
                "computed": bool(point.computed),
                "reach": reach is not None or of_model is None,
                "words": words,
            }
        )
        # What depends on nothing has a start beyond its stop: here both are 0.
        fields = [np.where(axis.starts < axis.stops, (axis.starts, axis.stops), 0).T for axis in spans]
        tables.append(_make_tables(point, pieces, reach) | {"fields": [axis.astype(np.int32) for axis in fields]})
    return tuple(facts), pack_tables(tables)


def describe_sections(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the sections in which a picture of these sizes is shown: one of a picture, three of a volume.

    `axes` are drawn downwards and to the right, and `across` has one position only. `scene` are rows and columns as
    they are drawn: those of a flat stack are stretched.
    """
    return [
        {
            "axes": list(section.axes),
            "across": list(section.across),
            "names": [name.removesuffix("s") for name in section.names],
            "scene": list(limit_aspect(section.cut(Tile.whole(*sizes)).size_px)),
        }
        for section in list_sections([0] * len(sizes))
    ]


def _make_tables(
    point: HaloPoint, pieces: Sequence[tuple[Move, int]], reach: PictureReach | None
) -> dict[str, NDArray[np.int32]]:
    whole = Tile.whole(*point.sizes)
    return {
        "owned": _list_sides(point.tiles.values()),
        "windows": _list_sides(point.get_window(rank) & whole for rank in point.ranks.ranks),
        "sources": np.array([point.numbers[move.source] for move, _ in pieces], np.int32),
        "targets": np.array([point.numbers[rank] for _, rank in pieces], np.int32),
        "pieces": _list_sides(move.tile for move, _ in pieces),
        "seen": _list_sides((reach.seen if reach else point.tiles).values()),
    }


def _list_sides(tiles: Iterable[Tile]) -> NDArray[np.int32]:
    return np.array([tile.sides for tile in tiles], np.int32)


def describe_net(graph: ModelGraph, plan: Plan, points: Sequence[HaloPoint]) -> list[dict[str, Any]]:
    """Return the layers of the model in order: name, size, stage, number of tiles, and the numbers of its `points`.

    A layer without rows and columns, or in a stage that is one tile, has one tile.
    """
    dims = len(graph.inputs["images"].shape)
    layers = find_layers(graph)
    stages = cut_stages(layers, plan)
    spatial = set(find_spatial_stages(plan))
    net = []
    for layer in layers:
        nodes = graph.nodes[layer.nodes.start : layer.nodes.stop]
        shapes = [node.spec.shape for node in nodes if node.spec is not None]
        # The size that the layer works at: of its last value with rows and columns, or else of the last with channels.
        shape = max(reversed(shapes), key=lambda size: min(len(size), dims), default=())
        stage = next(index for index, span in enumerate(stages) if layer.nodes.start in span)
        names = {node.name for node in nodes}
        pixels = len(shape) == dims
        net.append(
            {
                "name": layer.name,
                "sizes": list(shape[2:]) if pixels else [1] * (dims - 2),
                "channels": shape[1] if len(shape) > 1 else 1,
                "stage": stage,
                "tiles": plan.grids[stage].tiles if pixels and stage in spatial else 1,
                "points": [n for n, point in enumerate(points) if names & {node.name for node in point.readers}],
            }
        )
    return net
