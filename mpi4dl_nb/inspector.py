"""What can be seen of a debugged step: requested from all ranks at once, and assembled here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engines.debug_step import MessageEffect, ViewRequest, ViewResult
from engines.errors import PlanError
from engines.pipeline.work import PipelineAction, Schedule
from engines.program.shards import Shard, ShardIndex, assemble_shards
from engines.program.step_labels import StepLabel
from mpi4dl_nb.step_events import RankEvent, RankPanel, StepEvent, StepView

__all__ = ["BOUND_PX", "SHOWN", "StepInspector"]

BOUND_PX = 160
"""Maximum side, in pixels, of the images that ranks send to be drawn."""

SHOWN = ("made", "activation", "gradient")
INPUT = "images"


@dataclass(frozen=True)
class _ViewTarget:
    """What a rank shows: a value of one micro-batch or its gradient, or nothing if there is no `extent`."""

    extent: Shard | None
    gradient: bool = False
    micro_batch: int = 0

    def make_request(self, channel: int, image: int, bound_px: int) -> ViewRequest | None:
        """Return the request to the rank, with the image index relative to the rank's own images."""
        extent = self.extent
        if extent is None:
            return None
        mine = image - extent.images.start if extent.images is not None else image
        return ViewRequest(extent.name, self.micro_batch, self.gradient, extent.axes, mine, channel, bound_px)

    def make_panel(self, rank: RankEvent, seen: ViewResult | None) -> RankPanel:
        """Return the panel for the rank's reply, or with the reason why there is nothing to show."""
        if seen is not None:
            why = ""
        elif rank.did is None:
            why = "nothing has come to it yet"
        elif self.extent is not None:
            why = f"no {'gradient' if self.gradient else 'activation'} of {self.extent.name} here now"
        elif rank.did.work is None:
            why = f"{rank.did.kind}: the weights, no image"
        else:
            why = "no single value to show"
        return RankPanel(rank.rank, self.extent, self.gradient, seen, why)


@dataclass(frozen=True)
class StepInspector:
    """Inspects a step: `steps` are each rank's instructions, `ask(what, per_rank)` calls its stepper on all ranks."""

    extents: ShardIndex
    steps: Sequence[Sequence[StepLabel]]
    schedule: Schedule
    ask: Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]

    def make_view(self, event: StepEvent, show: str, channel: int, image: int, bound_px: int) -> StepView:
        """See `mpi4dl_nb.step_debugger.StepDebugger.view`; `event` is the current position of the step."""
        if show not in SHOWN:
            raise PlanError(f"show={show!r} is unknown. Choose one of {', '.join(SHOWN)}.")
        asked = [self._choose_target(rank, show) for rank in event.ranks]
        answers = self.ask("view", [(each.make_request(channel, image, bound_px),) for each in asked])
        panels = tuple(
            each.make_panel(rank, seen) for rank, each, (seen, _) in zip(event.ranks, asked, answers, strict=True)
        )
        # The messages of the last instructions, each with its effect on the rank that received it. A rank tells of no
        # effect if the value is gone by now.
        effects = [landed for _, landed in answers]
        landed = tuple(
            (
                sent,
                next(
                    (each for each in effects[sent.target] if each.move == sent.move),
                    MessageEffect(sent.move, None, None, None),
                ),
            )
            for sent in event.transfers
        )
        return StepView(event, panels, landed, channel, image, self.schedule)

    def _choose_target(self, rank: RankEvent, show: str) -> _ViewTarget:
        did = rank.did
        if did is None:
            # The rank has executed nothing yet: it shows its part of the images of its first micro-batch.
            first: PipelineAction | None = next((place.work for place in self.steps[rank.rank] if place.work), None)
            if first is None:
                return _ViewTarget(None)
            extent = self.extents.find_shard(rank.rank, first.direction, first.stage, INPUT)
            return _ViewTarget(extent, False, first.micro_batch)
        if did.work is None:
            return _ViewTarget(None)
        gradient = did.phase_name == "backward" if show == "made" else show == "gradient"
        return _ViewTarget(self.extents.find_step_shard(rank.rank, did), gradient, did.work.micro_batch)

    def assemble_tensor(self, name: str, gradient: bool, micro_batch: int) -> Tensor:
        """See `mpi4dl_nb.step_debugger.StepDebugger.tensor`."""
        found = list(self.extents.find_shards(micro_batch, name))
        asked = {rank: extent.name for rank, extent in found}
        tensors = self.ask("get_tensor", [(asked.get(rank), micro_batch, gradient) for rank in range(len(self.steps))])
        there = [(extent, tensors[rank]) for rank, extent in found if tensors[rank] is not None]
        what = "the gradient of " * gradient + repr(name)
        # A gradient may be partial: ranks that have not contributed yet count as zero. A value must be complete.
        if not there or (not gradient and len(there) < len(found)):
            raise PlanError(
                f"Not all ranks hold {what} of micro-batch {micro_batch} now: it is not made yet, is gone "
                "already, or is never kept, being used up where it is made. Go on, or restart; layers keep their ends."
            )
        if found[0][1].axes is None and found[0][1].images is None and not gradient:
            return there[0][1]  # replicated: every rank holds the same
        return assemble_shards(there, adds=gradient)
