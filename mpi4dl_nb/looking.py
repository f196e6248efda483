"""What can be seen of a step that is walked: asked of all ranks at once, and put together here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engines.errors import PlanError
from engines.pipeline.work import Schedule, Work
from engines.program.extents import Extent, Extents, joined
from engines.program.places import Place
from engines.walk import Landed, Look, Seen
from mpi4dl_nb.step_events import Panel, RankEvent, StepEvent, Transfer, View

__all__ = ["BOUND_PX", "SHOWN", "Looking"]

BOUND_PX = 160
"""No side of what is sent to be drawn is longer."""

SHOWN = ("made", "activation", "gradient")
INPUT = "images"


@dataclass(frozen=True)
class _Asked:
    """What a rank is to show: of one micro-batch, the value or its gradient; nothing where there is no `extent`."""

    extent: Extent | None
    gradient: bool = False
    micro_batch: int = 0

    def look(self, channel: int, image: int, bound_px: int) -> Look | None:
        """As the rank is asked for it, in its own numbers of images."""
        extent = self.extent
        if extent is None:
            return None
        mine = image - extent.images.start if extent.images is not None else image
        return Look(extent.name, self.micro_batch, self.gradient, extent.axes, mine, channel, bound_px)

    def panel(self, rank: RankEvent, seen: Seen | None) -> Panel:
        """What came of it."""
        return Panel(rank.rank, self.extent, self.gradient, seen, "" if seen is not None else self._why(rank))

    def _why(self, rank: RankEvent) -> str:
        """Why there is nothing to be seen."""
        if rank.did is None:
            return "nothing has come to it yet"
        if self.extent is not None:
            return f"no {'gradient' if self.gradient else 'activation'} of {self.extent.name} here now"
        return f"{rank.did.kind}: the weights, no image" if rank.did.work is None else "no single value to show"


@dataclass(frozen=True)
class Looking:
    """Looks at a step: `steps` are what each rank does in it, `ask(what, per_rank)` calls that of its walk on all."""

    extents: Extents
    steps: Sequence[Sequence[Place]]
    schedule: Schedule
    ask: Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]

    def view(self, event: StepEvent, show: str, channel: int, image: int, bound_px: int) -> View:
        """See `mpi4dl_nb.stepping.Stepping.view`; `event` is where the step is."""
        if show not in SHOWN:
            raise PlanError(f"show={show!r} is unknown. Choose one of {', '.join(SHOWN)}.")
        asked = [self._asked(rank, show) for rank in event.ranks]
        answers = self.ask("look", [(each.look(channel, image, bound_px),) for each in asked])
        panels = tuple(
            each.panel(rank, seen) for rank, each, (seen, _) in zip(event.ranks, asked, answers, strict=True)
        )
        landed = tuple(_landings(event, [landed for _, landed in answers]))
        return View(event, panels, landed, channel, image, self.schedule)

    def _asked(self, rank: RankEvent, show: str) -> _Asked:
        did = rank.did
        if did is None:
            return self._input(rank.rank)
        if did.work is None:
            return _Asked(None)
        gradient = did.way == "backward" if show == "made" else show == "gradient"
        return _Asked(self.extents.shown(rank.rank, did), gradient, did.work.micro_batch)

    def _input(self, rank: int) -> _Asked:
        """Of a rank that has done nothing yet, the images that it begins with."""
        first: Work | None = next((place.work for place in self.steps[rank] if place.work), None)
        if first is None:
            return _Asked(None)
        extent = self.extents.of(rank, first.direction, first.stage, INPUT)
        return _Asked(extent, False, first.micro_batch)

    def tensor(self, name: str, gradient: bool, micro_batch: int) -> Tensor:
        """See `mpi4dl_nb.stepping.Stepping.tensor`."""
        found = list(self.extents.find(micro_batch, name))
        asked = {rank: extent.name for rank, extent in found}
        tensors = self.ask("tensor", [(asked.get(rank), micro_batch, gradient) for rank in range(len(self.steps))])
        there = [(extent, tensors[rank]) for rank, extent in found if tensors[rank] is not None]
        what = "the gradient of " * gradient + repr(name)
        if not there or (not gradient and len(there) < len(found)):
            raise PlanError(
                f"Not all ranks hold {what} of micro-batch {micro_batch} now: it is not made yet, is gone "
                "already, or is never kept, being used up where it is made. Go on, or restart; layers keep their ends."
            )
        if found[0][1].axes is None and found[0][1].images is None and not gradient:
            return there[0][1]  # all hold the same
        return joined(there, adds=gradient)


def _landings(event: StepEvent, landed: Sequence[Sequence[Landed]]) -> Iterator[tuple[Transfer, Landed]]:
    """What each message of the last instructions did where it arrived."""
    for transfer in event.transfers:
        found = [each for each in landed[transfer.target] if each.move == transfer.move]
        yield transfer, found[0] if found else Landed(transfer.move, None, None, None)
