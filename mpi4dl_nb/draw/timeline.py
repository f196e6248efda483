"""Who did what when: one training step as a chart, one row per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from engines.errors import PlanError
from engines.layout import Layout, Role
from engines.plan import Plan
from engines.program.timeline import Event, Timeline
from mpi4dl_nb.draw.figure import INK, Drawing

__all__ = ["show_timeline"]

WORK = ("compute", "update")
HINT = "upper half of a row: own work; lower half: communication and waiting for others; white: neither"
MANY = 12  # rows: more of them are lower, and have one line of text


@dataclass(frozen=True)
class Look:
    """How one kind of instruction is drawn: colour and hatch, and what the legend calls it."""

    name: str
    colour: str
    hatch: str


FORWARD = Look("compute, forward", "#56b4e9", "")
BACKWARD = Look("compute, backward", "#e69f00", "//")
OTHER = Look("other communication", "#d9d9d9", "ooo")
LOOKS = {
    "update": Look("update of the weights", "#4d4d4d", "++"),
    "halo": Look("halo", "#009e73", "xxx"),
    "stage": Look("stage transfer", "#cc79a7", "..."),
    "all-reduce": Look("all-reduce", "#f0e442", "|||"),
}


def look(event: Event) -> Look:
    """The look of an event's kind; of computation there are two, by direction."""
    if event.kind == "compute":
        return BACKWARD if event.phase == "backward" else FORWARD
    return LOOKS.get(event.kind, OTHER)


def show_timeline(timeline: Timeline, plan: Plan | None = None) -> Drawing:
    """One step on all ranks: above in each row what the rank computes, below what it communicates.

    Communication includes waiting for the others; where a row is white, the rank did neither. `plan` adds
    each rank's stage and tile. Raises PlanError where nothing happened, or on other ranks than the plan's.
    """
    rows = _rows(timeline, plan)
    row_in, end = (0.62, "\n") if len(rows) <= MANY else (0.3, ", ")
    figure = Drawing(figsize=(11, 1.6 + row_in * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    title = f"One training step: {timeline.seconds * 1e3:.4g} ms on {len(rows)} ranks"
    axes.set_title(f"{title}\n{HINT}", loc="left", fontsize=10)
    _legend(figure, _draw_bars(axes, timeline, list(rows)))
    shares = {rank: _shares(timeline, rank) for rank in rows}
    texts = [[end.join(words) for words in side.values()] for side in (rows, shares)]
    _frame(axes, timeline.seconds * 1e3, *texts)
    told = [f"{', '.join(rows[rank])}: {', '.join(shares[rank])}" for rank in rows]
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure


def _rows(timeline: Timeline, plan: Plan | None) -> dict[int, tuple[str, ...]]:
    """Each rank's name and role, ascending."""
    if not timeline.events:
        raise PlanError("The timeline holds no event: run a training step first.")
    if plan is None:
        return {rank: (f"rank {rank}",) for rank in timeline.ranks}
    roles = Layout.of(plan).roles
    if timeline.ranks != tuple(range(len(roles))):
        ranks = ", ".join(map(str, timeline.ranks))
        raise PlanError(
            f"The timeline is of ranks {ranks}, but the plan needs {len(roles)} ranks. "
            "Give the plan that was run, or none."
        )
    return {rank: (f"rank {rank}", *map(_told, who)) for rank, who in enumerate(roles)}


def _told(role: Role) -> str:
    return f"stage {role.stage}, tile {role.tile}{', mirrored' * role.direction}"


def _draw_bars(axes: Axes, timeline: Timeline, ranks: list[int]) -> list[Look]:
    """All events of one look and rank as one patch; the looks that occur, in the legend's order."""
    bars: dict[tuple[int, Look], list[tuple[float, float]]] = defaultdict(list)
    is_work: dict[Look, bool] = {}
    zero_s = timeline.start_s
    for event in timeline.events:
        bars[event.rank, look(event)].append(((event.start_s - zero_s) * 1e3, (event.end_s - zero_s) * 1e3))
        is_work[look(event)] = event.kind in WORK
    for (rank, style), spans in bars.items():
        top = ranks.index(rank) + (-0.42 if is_work[style] else 0.02)
        patch = PathPatch(_rectangles(spans, top, top + 0.4), facecolor=style.colour, hatch=style.hatch)
        patch.set(edgecolor=INK, linewidth=0, label=style.name, gid=f"rank {rank}: {style.name}")
        axes.add_patch(patch)
    return [style for style in (FORWARD, BACKWARD, *LOOKS.values(), OTHER) if style in is_work]


def _rectangles(spans: Sequence[tuple[float, float]], top: float, bottom: float) -> Path:
    """One path for thousands of bars: a hatch costs a millisecond for each path."""
    corners = [((a, top), (b, top), (b, bottom), (a, bottom), (a, top)) for a, b in spans]
    codes = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
    return Path([corner for bar in corners for corner in bar], codes * len(spans))


def _legend(figure: Drawing, looks: list[Look]) -> None:
    patches = [Patch(facecolor=each.colour, hatch=each.hatch, edgecolor=INK) for each in looks]
    names = [each.name for each in looks]
    figure.legend(patches, names, loc="outside lower left", ncols=len(looks), frameon=False, fontsize=9)


def _shares(timeline: Timeline, rank: int) -> tuple[str, str]:
    """`compute 71%` and `communicate and wait 22%`."""
    kinds = {event.kind for event in timeline.events if event.rank == rank}
    work = sum(timeline.share(rank, kind) for kind in kinds if kind in WORK)
    traffic = sum(timeline.share(rank, kind) for kind in kinds if kind not in WORK)
    return f"compute {work:.0%}", f"communicate and wait {traffic:.0%}"


def _frame(axes: Axes, length_ms: float, left: Sequence[str], right: Sequence[str]) -> None:
    """The axes; left and right of each row are its texts."""
    places = range(len(left))
    axes.set(xlim=(0, length_ms), ylim=(len(left) - 0.5, -0.5), xlabel="time, ms")
    axes.set_yticks(places, left, fontsize=9)
    for place in places[1:]:
        axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)
    opposite = axes.secondary_yaxis("right")
    opposite.set_yticks(places, right, fontsize=9)
    opposite.tick_params(length=0)
