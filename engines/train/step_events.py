"""Data of a debugged step: the positions of all ranks, the last transfers, and the values to be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from mpi4dl_nb.engines.checks import check_choice, is_integer
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.shards import Shard, ShardIndex, assemble_shards
from mpi4dl_nb.engines.compiler.steps import DependencyOrder, StepCounts, StepLabel
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import FactTable, format_bytes
from mpi4dl_nb.engines.geometry.tiles import Move, Plane
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.plan.schedule import PipelineAction, Schedule, Slot
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import ReceivedMessage
from mpi4dl_nb.engines.train.debug_step import SumResult, ViewRequest, ViewResult

BOUND_PX = 160
"""Maximum side, in pixels, of the images that ranks send to be drawn."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a value that was just sent from one rank to another, of which `plane` can be drawn.

    `back`: these are gradients, to be added on the rank that owns the values.
    """

    name: str
    purpose: str
    source: int
    target: int
    move: Move
    bytes: int
    back: bool
    plane: Plane

    def __str__(self) -> str:
        return f"rank {self.source} → rank {self.target}: {self.plane}"


@dataclass(frozen=True, slots=True, repr=False)
class RankEvent(FactTable):
    """Position of one rank: what it `did` last, what is `next`, and the ranks that it waits for before.

    `moved`: the rank executed an instruction. `time` is its position in the schedule, in the schedule's units. Bytes
    are those of `mpi4dl_nb.engines.train.debug_step.StepState`.
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

    @property
    def caption(self) -> str:
        return f"Rank {self.rank}: {self.role}"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "did": self.did.text if self.did else "nothing yet",
            "next": self.next.text if self.next else "nothing: its step is done",
            "waits for": ", ".join(f"rank {rank}" for rank in self.waits_for) or None,
            "activations": format_bytes(self.activation_bytes),
        }


@dataclass(frozen=True, slots=True, repr=False)
class StepEvent(FactTable):
    """All ranks after advance `number` of the step, in which each rank `ran` so many instructions.

    `loss` is the mean of the losses known so far.
    """

    number: int
    ranks: tuple[RankEvent, ...]
    transfers: tuple[Transfer, ...]
    places: StepCounts
    done: bool
    loss: float | None
    ran: StepCounts

    @property
    def caption(self) -> str:
        return f"Advance {self.number} of the step"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "instructions done": ", ".join(map(str, self.places)),
            "moved": ", ".join(f"rank {rank.rank}" for rank in self.ranks if rank.moved) or "no rank",
            "messages": len(self.transfers),
            "loss": None if self.loss is None else f"{self.loss:.6g}",
            "done": "yes" if self.done else "no",
        }


@dataclass(frozen=True, slots=True)
class RankPanel:
    """The part of a value that a rank shows: `seen` of `extent`."""

    rank: int
    extent: Shard
    gradient: bool
    seen: ViewResult


@dataclass(frozen=True, slots=True)
class EmptyPanel:
    """A rank that shows nothing, and the reason why."""

    rank: int
    why: str
    seen: None = None


@dataclass(frozen=True)
class PanelGroup:
    """Ranks that show parts of one value. They share a colour scale from `low` to `high`."""

    panels: tuple[RankPanel, ...]

    @property
    def name(self) -> str:
        """The name of the value."""
        return self.panels[0].extent.title

    @property
    def gradient(self) -> bool:
        """Whether the panels show the value's gradient."""
        return self.panels[0].gradient

    @cached_property
    def span(self) -> tuple[float, float]:
        """The minimum and maximum over all ranks, without infinite fills; for gradients symmetric about zero."""
        finite = (panel.seen.pixels[panel.seen.pixels.isfinite()] for panel in self.panels)
        pixels = [values for values in finite if values.numel()]
        low, high = (min(float(p.min()) for p in pixels), max(float(p.max()) for p in pixels)) if pixels else (0.0, 0.0)
        most = max(-low, high)
        return (-most, most) if self.gradient else (low, high)


@dataclass(frozen=True, repr=False)
class StepView(FactTable):
    """One channel of one image on all ranks, and the effects of the last messages, to be drawn.

    `sums` holds for each rank the first numbers of its last sum over ranks; None if it has just done something else.
    """

    event: StepEvent
    panels: tuple[RankPanel | EmptyPanel, ...]
    landed: tuple[tuple[Transfer, ReceivedMessage], ...]
    channel: int
    image: int
    schedule: Schedule
    sums: tuple[SumResult | None, ...]

    caption = "View of a debugged step"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "values": ", ".join(dict.fromkeys(group.name for group in self.groups)) or "none",
            "channel": self.channel,
            "image": self.image,
            "ranks": len(self.panels),
            "messages": len(self.landed),
        }

    @cached_property
    def groups(self) -> tuple[PanelGroup, ...]:
        """The panels that show something, grouped by value and stage."""
        groups: dict[tuple[str, bool, int], list[RankPanel]] = {}
        for panel in self.panels:
            if isinstance(panel, RankPanel):
                did = self.event.ranks[panel.rank].did
                stage = did.work.stage if did and did.work else -1  # the input images, before the first instruction
                groups.setdefault((panel.extent.name, panel.gradient, stage), []).append(panel)
        return tuple(PanelGroup(tuple(panels)) for panels in groups.values())

    @property
    def last_channel(self) -> int:
        """The last channel of the value with the most channels."""
        return max((panel.seen.channels for panel in self.panels if isinstance(panel, RankPanel)), default=1) - 1

    @property
    def last_image(self) -> int:
        """The last image of a micro-batch."""
        shown = (panel.extent for panel in self.panels if isinstance(panel, RankPanel))
        return max(((extent.split_shape or extent.shape)[0] for extent in shown if extent.axes), default=1) - 1


class DebuggedStep(Protocol):
    """A debugged step as drawings read it: its position, what all ranks will do, and views of their values."""

    @property
    def event(self) -> StepEvent:
        """The current position."""

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule of the step."""

    @property
    def order(self) -> DependencyOrder:
        """The instructions of all ranks, with what each depends on."""

    @property
    def layout(self) -> Layout:
        """Which rank holds which tile of which stage."""

    @property
    def image_shape(self) -> Sequence[int]:
        """The shape of a micro-batch of images."""

    def view(
        self, channel: int = 0, image: int = 0, show: str = "made", bound_px: int = BOUND_PX, plane: int | None = None
    ) -> StepView:
        """Return one channel of one image of each rank's last value, or a plane of it, and the last messages."""


def find_transfers(rank: int, did: StepLabel) -> Iterator[Transfer]:
    """Iterate over the transfers that a rank received in its last instruction."""
    exchange, back = did.step.instruction, did.step.phase is not Phase.FORWARD
    messages = exchange.get_effects(did.step.phase).messages
    if isinstance(exchange, Exchange) and messages and messages.waits:
        # In the backward pass an exchange runs in reverse: gradients arrive along the moves that the rank sent forward.
        #
        #     forward   rank 0 ── edge pixels ──> rank 1
        #     backward  rank 0 <── their gradients ── rank 1, added to the rank's own
        for message in messages.receives:
            plane = exchange.get_plane(message.move.tile)
            yield Transfer(exchange.key, exchange.kind, message.peer, rank, message.move, message.bytes, back, plane)


def make_schedule(compiler: Compiler) -> Schedule:
    """Return the schedule of all replicas, with one lane per rank."""
    plan, schedule = compiler.plan, compiler.schedule
    lanes = []
    for rank in range(plan.ranks):
        # All replicas have this schedule; the micro-batches of each are numbered after those of the ones before.
        #
        #     rank 0  replica 0, lane 0    micro-batches 0 1
        #     rank 1  replica 0, lane 1    micro-batches 0 1
        #     rank 2  replica 1, lane 0    micro-batches 2 3
        #     rank 3  replica 1, lane 1    micro-batches 2 3
        replica, lane = divmod(rank, plan.replica_ranks)
        first = replica * plan.replica_batches * plan.parts
        works = (replace(slot.work, micro_batch=first + slot.work.micro_batch) for slot in schedule.lanes[lane])
        lanes.append(tuple(replace(slot, work=work) for slot, work in zip(schedule.lanes[lane], works, strict=True)))
    return Schedule(schedule.name, tuple(lanes))


def compute_schedule_time(lane: Sequence[Slot], steps: Sequence[StepLabel], done: int) -> float:
    """Return a rank's position in its lane, in schedule units; in a slot, by the fraction of instructions done."""
    if not done:
        return 0.0
    work = steps[done - 1].work
    slot = next((slot for slot in lane if slot.work == work), None)
    if slot is None:
        return float(lane[-1].stop) if lane else 0.0
    # A slot is as long as the schedule says, however many instructions it has:
    #
    #     lane    | F0         | F1         |           1 of 4 instructions of F1 are done:
    #     steps     a  b  c  d   e  f  g  h             1 + (2 - 1) * 1 / 4 = 1.25
    mine = [index for index, label in enumerate(steps) if label.work == work]
    return slot.start + (slot.stop - slot.start) * (mine.index(done - 1) + 1) / len(mine)


# What can be seen of a debugged step: requested from all ranks at once, and assembled here.


def choose_depth(image_shape: Sequence[int], plane: int | None) -> float:
    """Return how deep a plane of images (N, C, D, H, W) is, from 0 to 1; by default the middle one.

    Raises PlanError if there is no such plane, or if the images are signals.

    >>> choose_depth((1, 1, 8, 16, 16), 2), choose_depth((1, 3, 16, 16), None)
    (0.3125, 0.5)
    """
    axes, planes = len(image_shape) - 2, image_shape[2]
    if axes == 1:
        raise PlanError(
            f"The values of signals of shape {tuple(image_shape)} have no rows to be drawn. stepping.tensor(name) "
            "returns them, and show_slicing draws the signal in tiles."
        )
    if plane is None:
        return 0.5
    if axes != 3:
        raise PlanError(f"plane={plane!r} is of volumes, but these are images of shape {tuple(image_shape)}.")
    if not is_integer(plane) or not 0 <= plane < planes:
        raise PlanError(f"plane={plane!r} is none of the {planes} planes: use 0 to {planes - 1}.")
    return (plane + 0.5) / planes


SHOWN = ("made", "activation", "gradient")
INPUT = "images"


@dataclass(frozen=True)
class _ViewTarget:
    """What a rank shows: a value of one micro-batch or its gradient, or nothing if there is no `extent`."""

    extent: Shard | None
    gradient: bool = False
    micro_batch: int = 0

    def make_request(self, channel: int, image: int, bound_px: int, share: float) -> ViewRequest | None:
        """Return the request to the rank."""
        extent = self.extent
        if extent is None:
            return None
        look = extent.plane.cut(share), image, channel, bound_px, extent.held_shape, share
        return ViewRequest(extent.name, self.micro_batch, self.gradient, *look)

    def make_panel(self, rank: RankEvent, seen: ViewResult | None, image: int, share: float) -> RankPanel | EmptyPanel:
        """Return the panel for the rank's reply, or the reason why there is nothing to show."""
        if seen is not None and self.extent is not None:
            extent = self.extent.cut(share)
            if extent.depth and not extent.held:
                planes = f"planes {self.extent.held[0].start} to {self.extent.held[0].stop - 1}"
                return EmptyPanel(rank.rank, f"{planes} of {extent.name}, not plane {extent.depth.at}")
            return RankPanel(rank.rank, extent, self.gradient, seen)
        if self.extent is not None and self.extent.images is not None and image not in self.extent.images:
            why = f"image {image} is on another rank"
        elif rank.did is None:
            why = "nothing has come to it yet"
        elif self.extent is not None:
            why = f"no {'gradient' if self.gradient else 'activation'} of {self.extent.name} here now"
        elif rank.did.work is None:
            why = f"{rank.did.kind}: the weights, no image"
        else:
            why = "no single value to show"
        return EmptyPanel(rank.rank, why)


@dataclass(frozen=True)
class StepInspector:
    """Inspects a step: `steps` are each rank's instructions, `ask(what, per_rank)` calls its stepper on all ranks."""

    extents: ShardIndex
    steps: Sequence[Sequence[StepLabel]]
    schedule: Schedule
    ask: Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]

    def make_view(
        self, event: StepEvent, show: str, channel: int, image: int, bound_px: int, share: float = 0.5
    ) -> StepView:
        """See `mpi4dl_nb.training.step_debugger.StepDebugger.view`; `event` is the current position of the step.

        Of a volume, `share` is how deep the plane is in it.
        """
        check_choice("show", show, SHOWN)
        asked = [self._choose_target(rank, show) for rank in event.ranks]
        answers = self.ask("view", [(target.make_request(channel, image, bound_px, share),) for target in asked])
        triples = zip(event.ranks, asked, answers, strict=True)
        panels = tuple(target.make_panel(rank, seen, image, share) for rank, target, (seen, *_) in triples)
        # The messages of the last instructions, each with its effect on the rank that received it. A rank tells of no
        # effect if the value is gone by now.
        effects = [landed for _, landed, _ in answers]
        landed = tuple(
            (
                replace(sent, plane=sent.plane.cut(share)),
                next(
                    (effect for effect in effects[sent.target] if effect.move == sent.move),
                    ReceivedMessage(sent.move, None, None, None),
                ),
            )
            for sent in event.transfers
        )
        sums = tuple(summed for _, _, summed in answers)
        return StepView(event, panels, landed, channel, image, self.schedule, sums)

    def _choose_target(self, rank: RankEvent, show: str) -> _ViewTarget:
        did = rank.did
        if did is None:
            # The rank has executed nothing yet: it shows its part of the images of its first micro-batch.
            first: PipelineAction | None = next((label.work for label in self.steps[rank.rank] if label.work), None)
            if first is None:
                return _ViewTarget(None)
            extent = self.extents.find_shard(rank.rank, first.direction, first.stage, INPUT)
            return _ViewTarget(extent, False, first.micro_batch)
        if did.work is None:
            return _ViewTarget(None)
        gradient = did.phase_name == "backward" if show == "made" else show == "gradient"
        return _ViewTarget(self.extents.find_step_shard(rank.rank, did), gradient, did.work.micro_batch)

    def assemble_tensor(self, name: str, gradient: bool, micro_batch: int) -> Tensor:
        """See `mpi4dl_nb.training.step_debugger.StepDebugger.tensor`."""
        shards = list(self.extents.find_shards(micro_batch, name))
        asked = {rank: extent.name for rank, extent in shards}
        tensors = self.ask("get_tensor", [(asked.get(rank), micro_batch, gradient) for rank in range(len(self.steps))])
        there = [(extent, tensors[rank]) for rank, extent in shards if tensors[rank] is not None]
        what = "the gradient of " * gradient + repr(name)
        # A gradient may be partial: ranks that have not contributed yet count as zero. A value must be complete.
        if not there or (not gradient and len(there) < len(shards)):
            raise PlanError(
                f"Not all ranks hold {what} of micro-batch {micro_batch} now: it is not made yet, is gone "
                "already, or is never kept, being used up where it is made. Go on, or restart; layers keep their ends."
            )
        if not shards[0][1].axes and shards[0][1].images is None and not gradient:
            return there[0][1]  # replicated: every rank holds the same
        return assemble_shards(there, adds=gradient)
