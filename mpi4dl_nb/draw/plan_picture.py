"""What a page needs to draw a plan: the blocks of its stages, the load of each rank in words, and the gauges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpi4dl_nb.draw.packed_tables import pack_columns, pack_tables
from mpi4dl_nb.draw.rank_map import group_loads, list_values
from mpi4dl_nb.draw.sections import measure_stack, place_on_stack
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_number, format_seconds
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout, StageRanks
from mpi4dl_nb.engines.predict.forecast import Forecast, RankLoad
from mpi4dl_nb.engines.predict.machine import Machine

# The parts of the picture that need no compiling: which block of which image is whose.


BLOCK_COLUMNS = dict.fromkeys(("copy", "stage", "tile", "rank", "spans"), "i4") | {"sides": "f8"}
MOST_COPIES, MOST_BLOCKS = 12, 16_384


@dataclass(frozen=True)
class PlanShape:
    """The ranks, tiles and stages of a plan for a batch of images.

    `image` is the size of an image in words, and `size` are the rows and columns of the picture of all its tiles, of a
    volume with its planes of tiles on each other. `facts` are the counts as pairs of a number and what it counts.
    `stages` and `copies` are in words. `blocks` holds the `BLOCK_COLUMNS` of each role of each rank of the first copies
    of the model: the spans of its part of the image, and the sides of that in the picture. `left_out` is a sentence
    about what is not drawn, or empty.
    """

    image: str
    size: tuple[int, int]
    facts: tuple[tuple[str, str], ...]
    stages: tuple[dict[str, Any], ...]
    copies: tuple[str, ...]
    blocks: bytes
    left_out: str

    def to_json(self) -> dict[str, Any]:
        """Return all but the blocks."""
        return {name: value for name, value in asdict(self).items() if name != "blocks"}


def count_plan(plan: Plan, image_shape: Sequence[int]) -> PlanShape:
    """Return the ranks, tiles and stages of a plan for a batch of `image_shape`, such as (N, C, H, W).

    Nothing is compiled.

    Raises PlanError if the image has fewer pixels along an axis than the grid has tiles, or the batch cannot be cut.

    >>> count_plan(Plan(split_size=2, num_spatial_parts=4), (2, 3, 64, 96)).facts[:2]
    (('5', 'ranks'), ('4', 'tiles of 32 × 48 px'))
    """
    count, _, *sizes = image_shape
    few = plan if plan.replica_ranks <= MOST_BLOCKS else Plan(split_size=1, spatial_size=0)
    layout = Layout.of(replace(few, data_parallel=min(few.data_parallel, MOST_COPIES)))
    copies = min(len(layout.pipes), MOST_COPIES, max(1, MOST_BLOCKS // few.replica_ranks))
    size = measure_stack(sizes, layout.stages[0].grid.planes)
    tiles = [stage.grid.cut(*sizes) if stage.grid.tiles > 1 else (Tile.whole(*sizes),) for stage in layout.stages]
    places = [
        list(zip(cut, place_on_stack(cut, stage.grid.planes, size), strict=True)) * stage.shares
        for stage, cut in zip(layout.stages, tiles, strict=True)
    ]
    blocks = [
        (copy, stage_index, tile_index, rank, tile.sides, sides)
        for copy, pipe in enumerate(layout.pipes[:copies])
        for stage_index, stage in enumerate(pipe.stages)
        for tile_index, (rank, (tile, sides)) in enumerate(zip(stage.ranks, places[stage_index], strict=True))
    ]
    pairs = enumerate(zip(layout.stages, tiles, strict=True))
    stages = tuple(_describe_stage(index, stage, cut[0].shape) for index, (stage, cut) in pairs)
    names = tuple(
        f"replica {pipe.replica}, " * (plan.data_parallel > 1) + ("mirrored" if pipe.direction else "forward")
        for pipe in layout.pipes[:copies]
    )
    more = plan.data_parallel * layout.directions - copies
    left_out = f"{more} more copies of the model are not drawn: they are like these." if more > 0 else ""
    packed = pack_columns(BLOCK_COLUMNS, blocks)
    if few is not plan:
        left_out = f"{plan.replica_ranks:,} ranks of a replica are too many to be drawn."
        stages, names, packed = (), (), b""
    image = _format_px(sizes)
    return PlanShape(image, size, _count_facts(plan, count, sizes), stages, names, packed, left_out)


def _format_px(sizes: Sequence[int]) -> str:
    return f"{' × '.join(map(str, sizes))} px"


def _count_facts(plan: Plan, count: int, sizes: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Return the counts of a plan as pairs of a number and what it counts."""
    spatial = plan.grids[: plan.spatial_size]
    tiles = sum(grid.tiles for grid in spatial)
    size = f" of {_format_px(spatial[0].get_tile(0, *sizes).shape)}" if len(set(spatial)) == 1 else ""
    planes = max((grid.planes for grid in spatial), default=1)
    size += f", in {planes} planes below each other" if planes > 1 else ""
    micro = format_count(count // plan.parts, "image")
    facts = [
        _pair(plan.ranks, "rank"),
        _pair(tiles, "tile", f"tile{'s' * (tiles != 1)}{size}"),
        _pair(plan.split_size, "stage"),
        _pair(plan.micro_batches, "micro-batch", f"micro-batch{'es' * (plan.micro_batches > 1)} of {micro}"),
    ]
    return (*facts, *[_pair(plan.data_parallel, "replica")] * (plan.data_parallel > 1))


def _pair(count: int, name: str, words: str = "") -> tuple[str, str]:
    count_text, _, plain = format_count(count, name).partition(" ")
    return count_text, words or plain


def _describe_stage(number: int, stage: StageRanks, tile_px: Sequence[int]) -> dict[str, Any]:
    words = "whole images"
    if stage.grid.tiles > 1:
        words = f"{' × '.join(map(str, stage.grid))} tiles of {_format_px(tile_px)}"
    elif stage.shares > 1:
        words = f"{stage.shares} ranks share the images"
    return {
        "name": f"stage {number}",
        "words": words,
        "cols": stage.shares if stage.shares > 1 else stage.grid.cols,
        "spatial": stage.grid.tiles > 1,
        "shared": stage.shares > 1,
    }


def get_side(image_shape: Sequence[int]) -> int:
    """Return the side by which images of a batch are resized: their rows, or the positions of signals."""
    return image_shape[2:][-2:][0]


def resize_shape(image_shape: Sequence[int], side_px: int, images: int) -> tuple[int, ...]:
    """Return the shape of a batch of `images` images with `side_px` rows (signals: positions), in the same ratio.

    >>> resize_shape((2, 3, 64, 96), 128, 4), resize_shape((2, 1, 16, 64, 96), 128, 2)
    ((4, 3, 128, 192), (2, 1, 32, 128, 192))
    """
    _, channels, *sizes = image_shape
    return images, channels, *(max(1, round(size * side_px / get_side(image_shape))) for size in sizes)


# The load of each rank, in levels and in words.


LEVELS = ("under half full", "half to four fifths full", "nearly full", "does not fit", "no limit known")
UNCOUNTED = "being counted"
HALF, NEARLY = 0.5, 0.8


def judge_memory(peak_bytes: int | None, limit_bytes: int | None) -> int:
    """Return the index in `LEVELS` of a rank's memory against its limit; -1 if the memory is not counted yet.

    >>> [judge_memory(peak, 100) for peak in (49, 50, 80, 100, 101, None)], judge_memory(7, None)
    ([0, 1, 2, 2, 3, -1], 4)
    """
    if peak_bytes is None:
        return -1
    if not limit_bytes:
        return 4
    share = peak_bytes / limit_bytes
    return 3 if share > 1 else 2 if share >= NEARLY else 1 if share >= HALF else 0


def describe_load_groups(
    loads: Sequence[RankLoad], machine: Machine | None
) -> tuple[tuple[dict[str, Any], ...], bytes]:
    """Return the distinct loads of ranks, and for each rank the index of its load, packed.

    A load is a dict of its `level` of `LEVELS` and the `word` for it, its `share` of the memory of the fullest rank,
    and `lines` of text.
    """
    groups, limit = group_loads(loads), machine.get_rank_bytes(len(loads)) if machine else None
    most = max((load.peak_bytes or 0 for load in loads), default=0) or 1
    descriptions, of_rank = [], np.zeros(len(loads), np.int32)
    for index, (load, ranks) in enumerate(groups.items()):
        of_rank[list(ranks)] = index
        level, share = judge_memory(load.peak_bytes, limit), (load.peak_bytes or 0) / most
        word = UNCOUNTED if level < 0 else LEVELS[level]
        (_, weights), _, (_, sent), *times = list_values(load, UNCOUNTED)
        lines = [f"weights {weights}"]
        if load.kept_bytes is not None and load.halo_bytes is not None and load.peak_bytes is not None:
            lines.append(f"activations {format_bytes(load.kept_bytes - load.halo_bytes)}")
            lines.append(f"halos {format_bytes(load.halo_bytes)}")
            room = f" of {format_bytes(limit)}, {LEVELS[level]}" if limit else ""
            lines.append(f"memory {format_bytes(load.peak_bytes)}{room}")
        lines += [f"sends {sent}", *(f"works {time}" for _, time in times)]
        descriptions.append({"level": level, "word": word, "share": share, "lines": lines})
    return tuple(descriptions), pack_tables(of_rank)


# The gauges of a plan as a whole.


@dataclass(frozen=True)
class Gauge:
    """One number of a plan: what it is, its value and its limit, if there is one, as numbers and in words.

    `verdict` is `fits`, `does not fit`, or empty if nothing can be said, and `reason` by how much.
    """

    name: str
    label: str
    value: float | None
    text: str
    limit: float | None = None
    verdict: str = ""
    note: str = ""
    reason: str = ""


def measure_gauges(
    loads: Sequence[RankLoad], machine: Machine | None, found: Forecast | None, why_not: str
) -> tuple[dict[str, Any], ...]:
    """Return the gauges of memory, time and traffic as dicts. `why_not` says why there is no time, if there is none."""
    peaks = [load.peak_bytes for load in loads if load.peak_bytes is not None]
    peak = max(peaks, default=None) if len(peaks) == len(loads) else None
    limit = machine.get_rank_bytes(len(loads)) if machine else None
    sent_bytes, messages = sum(load.sent.bytes for load in loads), sum(load.sent.messages for load in loads)
    memory = Gauge("memory", "Memory of the fullest rank", peak, "", limit)
    if peak is not None:
        room = f" of {format_bytes(limit)}" if limit else ""
        memory = replace(memory, text=f"{format_bytes(peak)}{room}", note=why_not if not limit else "")
    if machine and peak is not None and limit:
        fits, times = peak <= limit, format_number(peak / limit, 2)
        reason = f"{format_bytes(limit - peak)} to spare" if fits else f"{times} times what a rank has"
        note = f"{machine.name}: {format_bytes(limit)} for each rank"
        memory = replace(memory, verdict="fits" if fits else "does not fit", note=note, reason=reason)
    seconds = found.seconds if found else None
    speed = f"{format_number(found.images_per_s)} images/s on {machine.name}" if found and machine else why_not
    time = Gauge("time", "Time of a step, predicted", seconds, format_seconds(seconds) if seconds else "", note=speed)
    words = f"{format_count(messages, 'message')} of all ranks"
    traffic = Gauge("traffic", "Traffic of a step", sent_bytes, format_bytes(sent_bytes), note=words)
    return tuple(asdict(gauge) for gauge in (memory, time, traffic))
