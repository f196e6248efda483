"""Frames of a debugged step, as a page draws them: one JSON description and the values of all ranks in one buffer.

A page keeps the frames of all instructions that have run, so that it can go back without asking the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from torch import Tensor

from mpi4dl_nb.draw.packed_tables import pack_tables
from mpi4dl_nb.draw.plain_text import cut_words
from mpi4dl_nb.draw.sections import measure_stack
from mpi4dl_nb.draw.stepper import (
    DONE,
    MAPS,
    NOTHING,
    describe_event,
    describe_group,
    describe_message,
    describe_next,
    format_range,
    format_short_label,
    format_step_label,
    is_square,
    name_strips,
)
from mpi4dl_nb.draw.timeline import SLOTS
from mpi4dl_nb.engines.formatting import format_bytes, format_ranks
from mpi4dl_nb.engines.program.exchange_runner import ReceivedMessage
from mpi4dl_nb.engines.train.step_events import DebuggedStep, RankEvent, RankPanel, StepView, Transfer

FRAME_PX = 96
"""Largest height or width of the values in a frame, for each rank; larger ones are means."""

RECORD_BYTES = 64 << 20
"""The memory of all frames of a step, in the kernel and on each page."""


@dataclass(frozen=True)
class StepFrame:
    """All ranks after an advance: `meta` for JSON, and `values`, which are packed.

    In `meta`, values are given by their place in that list, and tiles as [top, left, bottom, right].
    """

    meta: dict[str, Any]
    values: bytes

    @property
    def number(self) -> int:
        """The number of the advance, from 0 at the start of the step."""
        return self.meta["number"]


class _Values(list[dict[str, Any]]):
    """The values of a frame."""

    def add(self, tensor: Tensor | None) -> int | None:
        """Add (h, w) or (w) values and return their place; None if there are none."""
        if tensor is None or not tensor.numel():
            return None
        rows = tensor.numpy().reshape(-1, tensor.shape[-1]).astype("f4")
        self.append({"high": rows.shape[0], "wide": rows.shape[1], "numbers": rows})
        return len(self) - 1


def pack_frame(view: StepView, step: str) -> StepFrame:
    """Pack a view for a page. `step` distinguishes the frames of this step from those of earlier ones."""
    values, event = _Values(), view.event
    groups = [
        {
            "title": describe_group(view, group, "\n").split("\n"),
            "gradient": group.gradient,
            "span": list(group.span),
            "size": list(group.panels[0].extent.whole_plane.shape),
            "panels": [_pack_panel(panel, values) for panel in group.panels],
        }
        for group in view.groups
    ]
    meta = {
        "step": step,
        "number": event.number,
        "title": describe_event(event),
        # One frame may stand for several instructions on each rank that went on.
        "merged": f"The last {format_range(event.ran)} of them ran at once." if max(event.ran) > 1 else "",
        "done": event.done,
        "total": sum(event.places),
        "ranks": [_pack_rank(view, rank) for rank in event.ranks],
        "groups": groups,
        "empty": {panel.rank: panel.why for panel in view.panels if panel.seen is None},
        "messages": [_pack_message(transfer, landed, values) for transfer, landed in view.landed],
        "sums": list(_list_sums(view, values)),
    }
    return StepFrame(cut_words(meta), pack_tables(values))


def _pack_rank(view: StepView, rank: RankEvent) -> dict[str, Any]:
    schedule, did = view.schedule, rank.did
    return {
        "did": format_short_label(schedule, did, NOTHING),
        "didWords": format_step_label(did, NOTHING),
        "next": describe_next(rank, format_short_label(schedule, rank.next, DONE)),
        "nextWords": describe_next(rank, format_step_label(rank.next, DONE)),
        "work": schedule.format_action(did.work) if did is not None and did.work else "",
        "kind": did.kind if did is not None else "",
        "phase": did.phase_name if did is not None else "",
        "moved": rank.moved,
        "waits": list(rank.waits_for),
        "time": rank.time,
        "done": view.event.places[rank.rank],
        "memory": f"{format_bytes(rank.activation_bytes)} | {format_bytes(rank.process_bytes)}",
    }


def _pack_panel(panel: RankPanel, values: _Values) -> dict[str, Any]:
    extent, held = panel.extent, panel.extent.plane.tile
    return {
        "rank": panel.rank,
        "held": list(held.sides),
        "own": list((extent.own & held if extent.axes else held).sides),
        "square": bool(extent.axes) and is_square(held),
        "blockPx": list(panel.seen.block_px),
        "values": values.add(panel.seen.pixels),
    }


def _pack_message(transfer: Transfer, landed: ReceivedMessage, values: _Values) -> dict[str, Any]:
    arrived = values.add(landed.arrived)
    copied = arrived is not None and landed.before is None
    return {
        "source": transfer.source,
        "target": transfer.target,
        "tile": list(transfer.plane.tile.sides),
        "back": transfer.back,
        "words": describe_message(transfer).split("\n"),
        "names": name_strips(transfer),
        "before": values.add(landed.before),
        "arrived": arrived,
        "after": arrived if copied else values.add(landed.after),  # pixels that are copied are what arrived
    }


def _list_sums(view: StepView, values: _Values) -> Iterator[dict[str, Any]]:
    """Iterate over the sums over ranks of the last instructions, each once, with what the ranks hold of it."""
    met = set()
    for rank in view.event.ranks:
        if not rank.moved or rank.did is None:
            continue
        for reduction in rank.did.step.instruction.get_effects(rank.did.step.phase).reductions:
            key = reduction.name, reduction.starts, reduction.waits
            if key in met or len(reduction.group) < 2:
                continue
            met.add(key)
            ends = "" if reduction.waits else ": begun, and waited for at the update"
            ends = ends if reduction.starts else ": what was begun in the backward pass has arrived"
            who = format_ranks(reduction.group)
            words = f"sum of {format_bytes(reduction.bytes)} over {who}, {rank.did.phase_name}{ends}"
            held = ((who, view.sums[who]) for who in reduction.group)
            known = {who: summed for who, summed in held if summed is not None and summed.name == reduction.name}
            add = values.add
            terms = [{"rank": who, "before": add(term.before), "after": add(term.after)} for who, term in known.items()]
            yield {
                "group": list(reduction.group),
                "starts": reduction.starts,
                "waits": reduction.waits,
                "words": words,
                "count": max((summed.count for summed in known.values()), default=0),
                "terms": terms,
            }


# What a page needs once: the places of the ranks, the schedule, and the colours.


def describe_scene(stepping: DebuggedStep) -> dict[str, Any]:
    """Describe, for JSON, where ranks are drawn, the schedule, and how many instructions each rank has.

    A rank is drawn where its first role is: a box for each stage of each replica, with its tiles as in the image.
    """
    layout, schedule = stepping.layout, stepping.schedule
    boxes: list[dict[str, Any]] = []
    homes: dict[int, dict[str, int]] = {}
    several = len({pipe.replica for pipe in layout.pipes}) > 1
    for pipe in layout.pipes:
        for index, stage in enumerate(pipe.stages):
            new = [rank for rank in stage.ranks if rank not in homes]
            if pipe.direction or not new:
                continue  # its ranks are drawn as those of another stage
            names = [f"stage {index}"] + [f"replica {pipe.replica}"] * several
            rows, cols = (stage.grid.rows, stage.grid.cols) if stage.shares == 1 else (stage.shares, 1)
            for tile, rank in enumerate(stage.ranks):
                row, col = divmod(tile, cols)
                homes[rank] = {"box": len(boxes), "row": row, "col": col}
            boxes.append({"title": ", ".join(names), "rows": rows, "cols": cols, "replica": pipe.replica})
    looks = {key: index for index, key in enumerate(SLOTS)}
    lanes = [
        [
            (slot.start, slot.stop, schedule.format_action(slot.work), looks[slot.work.kind, slot.work.direction > 0])
            for slot in lane
        ]
        for lane in schedule.lanes
    ]
    return {
        "boxes": boxes,
        "ranks": [homes[rank] | {"role": role.role} for rank, role in enumerate(stepping.event.ranks)],
        "schedule": {"name": schedule.name, "length": schedule.length, "lanes": lanes},
        "looks": [asdict(look) for look in SLOTS.values()],
        "ends": list(stepping.order.ends),
        "size": list(measure_stack(stepping.image_shape[2:], layout.stages[0].grid.planes)),
    }


def is_volume(image_shape: Sequence[int]) -> bool:
    """Return whether images of this shape are volumes."""
    return len(image_shape) == 5


def find_planes(image_shape: Sequence[int]) -> tuple[int, int]:
    """Return the middle plane of images of this shape, and the last one: both 0 unless they are volumes.

    >>> find_planes((1, 1, 9, 16, 16)), find_planes((1, 3, 16, 16))
    ((4, 8), (0, 0))
    """
    planes = image_shape[2] if is_volume(image_shape) else 1
    return planes // 2, planes - 1


def describe_progress(stepping: DebuggedStep) -> str:
    """Return how many instructions of how many are done on each rank, in words."""
    done, of = format_range(stepping.event.places), format_range(stepping.order.ends)
    return f"{done} of {of} instructions done on each rank"


def make_palettes() -> bytes:
    """Return the colours of values and of gradients, packed: 256 each, of red, green, blue and opacity (uint8)."""
    colours = [mpl.colormaps[MAPS[gradient]](np.linspace(0, 1, 256)) for gradient in (False, True)]
    return pack_tables([(each * 255).round().astype("u1") for each in colours])


# The frames of a step.


@dataclass
class StepRecord:
    """The frames of a step, oldest first, within `most_bytes`: of the older half, every second one is dropped.

    >>> record = StepRecord(most_bytes=40)
    >>> [record.add(StepFrame({"step": "a", "number": number}, bytes(10))) for number in range(5)]
    [[], [], [], [], [1]]
    >>> [frame.number for frame in record.frames], record.dropped
    ([0, 2, 3, 4], 1)
    """

    most_bytes: int = RECORD_BYTES
    frames: list[StepFrame] = field(default_factory=list)
    dropped: int = 0

    def add(self, frame: StepFrame) -> list[int]:
        """Add a frame, or replace the one of its number, and return the numbers of those dropped for it."""
        if self.frames and self.frames[-1].meta["step"] != frame.meta["step"]:
            self.frames, self.dropped = [], 0
        self.frames = [stored for stored in self.frames if stored.number != frame.number]
        self.frames.append(frame)
        gone: list[int] = []
        while len(self.frames) > 2 and sum(len(stored.values) for stored in self.frames) > self.most_bytes:
            half = max(3, len(self.frames) // 2)
            thinned = [stored.number for stored in self.frames[1:half:2]]  # the start of the step stays
            self.frames = [stored for stored in self.frames if stored.number not in thinned]
            gone += thinned
        self.dropped += len(gone)
        return gone

    def shorten(self, most_bytes: int) -> StepRecord:
        """Return a record of the same step within `most_bytes`.

        >>> record = StepRecord(frames=[StepFrame({"step": "a", "number": number}, bytes(10)) for number in range(5)])
        >>> shorter = record.shorten(40)
        >>> [frame.number for frame in shorter.frames], shorter.dropped
        ([0, 2, 3, 4], 1)
        """
        shorter = StepRecord(most_bytes, dropped=self.dropped)
        for frame in self.frames:
            shorter.add(frame)
        return shorter

    @property
    def note(self) -> str:
        """What is missing in the record, in words; empty if nothing is."""
        if not self.dropped:
            return ""
        return f"{self.dropped} older frames were dropped, to stay within {format_bytes(self.most_bytes)}"
