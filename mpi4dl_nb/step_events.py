"""What is told of a step that is walked: where all ranks are, what has just moved, and what can be seen there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engines.debug_step import MessageEffect, ViewResult
from engines.pipeline.work import Schedule, Slot
from engines.plan import Plan
from engines.program.compile import Compiler
from engines.program.dependencies import StepCounts
from engines.program.instructions import Phase, get_received_exchange
from engines.program.shards import Shard
from engines.program.step_labels import StepLabel
from engines.spatial.moves import Move

__all__ = [
    "PanelGroup",
    "RankEvent",
    "RankPanel",
    "StepEvent",
    "StepView",
    "Transfer",
    "compute_schedule_time",
    "find_transfers",
    "make_schedule",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pixels that have just moved from one rank to another; `back`: their gradients, to be added at home."""

    name: str
    purpose: str
    source: int
    target: int
    move: Move
    bytes: int
    back: bool

    def __str__(self) -> str:
        rows, cols = self.move.tile.rows, self.move.tile.cols
        there = f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}"
        return f"rank {self.source} → rank {self.target}: {there}"


@dataclass(frozen=True, slots=True)
class RankEvent:
    """Where one rank is: what it `did` last, what is `next` and for whom it has to wait before.

    `moved`: it was its turn. `time` is where it is in the schedule, in its units. Bytes are those of
    `engines.debug_step.StepState`.
    """

    rank: int
    role: str
    did: StepLabel | None
    next: StepLabel | None
    waits_for: tuple[int, ...]
    moved: bool
    time: float
    activation_bytes: int
    weight_bytes: int
    process_bytes: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """All ranks after they went on: `number` times since the step began. `loss` is the mean of those known so far."""

    number: int
    ranks: tuple[RankEvent, ...]
    transfers: tuple[Transfer, ...]
    places: StepCounts
    done: bool
    loss: float | None


@dataclass(frozen=True, slots=True)
class RankPanel:
    """What a rank shows: `seen` of `extent`, or why there is nothing."""

    rank: int
    extent: Shard | None
    gradient: bool
    seen: ViewResult | None
    why: str = ""


@dataclass(frozen=True)
class PanelGroup:
    """Ranks that show parts of one value: they share a scale of colours, from `low` to `high`."""

    panels: tuple[RankPanel, ...]

    @property
    def name(self) -> str:
        """Of the value."""
        return self.panels[0].extent.title

    @property
    def gradient(self) -> bool:
        """Whether it is the value's gradient."""
        return self.panels[0].gradient

    @cached_property
    def span(self) -> tuple[float, float]:
        """The least and the greatest number of all ranks; of gradients as far from zero on both sides."""
        pixels = [panel.seen.pixels for panel in self.panels if panel.seen.pixels.numel()]
        low, high = (min(float(p.min()) for p in pixels), max(float(p.max()) for p in pixels)) if pixels else (0.0, 0.0)
        most = max(-low, high)
        return (-most, most) if self.gradient else (low, high)


@dataclass(frozen=True)
class StepView:
    """A channel of one image on all ranks, and what the last messages did: made to be drawn."""

    event: StepEvent
    panels: tuple[RankPanel, ...]
    landed: tuple[tuple[Transfer, MessageEffect], ...]
    channel: int
    image: int
    schedule: Schedule

    @cached_property
    def groups(self) -> tuple[PanelGroup, ...]:
        """The panels that show something, by value and stage."""
        found: dict[tuple[str, bool, int], list[RankPanel]] = {}
        for panel in self.panels:
            if panel.seen is not None:
                did = self.event.ranks[panel.rank].did
                stage = did.work.stage if did is not None else -1  # the images, before anything was done
                found.setdefault((panel.extent.name, panel.gradient, stage), []).append(panel)
        return tuple(PanelGroup(tuple(panels)) for panels in found.values())

    @property
    def last_channel(self) -> int:
        """Of the value that has most of them."""
        return max((panel.seen.channels for panel in self.panels if panel.seen is not None), default=1) - 1

    @property
    def last_image(self) -> int:
        """Of a micro-batch."""
        shown = (panel.extent for panel in self.panels if panel.seen is not None)
        return max((extent.shape[0] for extent in shown if extent.axes), default=1) - 1


def find_transfers(rank: int, did: StepLabel) -> Iterator[Transfer]:
    """What has arrived at a rank by its last instruction."""
    exchange = get_received_exchange(did.step.instruction)
    if exchange is not None:
        forward = did.step.phase is Phase.FORWARD
        for move in exchange.receives if forward else exchange.sends:
            source = move.source if forward else move.target
            size = exchange.compute_bytes([move])
            yield Transfer(exchange.name, exchange.purpose, source, rank, move, size, back=not forward)


def make_schedule(compiler: Compiler) -> Schedule:
    """The order of work of all replicas, one lane for each rank."""
    plan, one = compiler.plan, compiler.schedule
    return Schedule(one.name, tuple(_make_lane(one, plan, rank) for rank in range(plan.ranks)))


def _make_lane(one: Schedule, plan: Plan, rank: int) -> tuple[Slot, ...]:
    """A rank's; micro-batches of its replica follow those of the replica before."""
    replica, lane = divmod(rank, plan.replica_ranks)
    first = replica * plan.replica_batches * plan.parts
    return tuple(
        replace(slot, work=replace(slot.work, micro_batch=first + slot.work.micro_batch)) for slot in one.lanes[lane]
    )


def compute_schedule_time(lane: Sequence[Slot], steps: Sequence[StepLabel], done: int) -> float:
    """Where a rank is in its lane, in units of the schedule: inside of a slot by the share of its instructions."""
    if not done:
        return 0.0
    work = steps[done - 1].work
    slot = next((slot for slot in lane if slot.work == work), None)
    if slot is None:
        return float(lane[-1].stop) if lane else 0.0
    mine = [index for index, place in enumerate(steps) if place.work == work]
    return slot.start + (slot.stop - slot.start) * (mine.index(done - 1) + 1) / len(mine)
