"""Who did what when: one training step as a chart, one row per rank."""

from __future__ import annotations

from collections import defaultdict

from matplotlib.axes import Axes

from engines.errors import PlanError
from engines.layout import Layout, Role
from engines.pipeline.bubble import bubble_of
from engines.plan import Plan
from engines.program.timeline import Event, Timeline
from mpi4dl_nb.draw.bars import Look, draw_bars, draw_legend, frame_rows, text_of_rows
from mpi4dl_nb.draw.figure import Drawing

__all__ = ["show_timeline"]

WORK = ("compute", "update")
HINT = "upper half of a row: own work; lower half: communication and waiting for others; white: neither"

FORWARD = Look("compute, forward", "#56b4e9", "")
BACKWARD = Look("compute, backward", "#e69f00", "//")
WEIGHTS = Look("compute, weights' gradient", "#bfbfbf", "++")
PASSES = {"forward": FORWARD, "weights": WEIGHTS}
OTHER = Look("other communication", "#d9d9d9", "ooo")
LOOKS = {
    "update": Look("update of the weights", "#4d4d4d", "**"),
    "halo": Look("halo", "#009e73", "xxx"),
    "stage": Look("stage transfer", "#cc79a7", "..."),
    "all-reduce": Look("all-reduce", "#f0e442", "|||"),
}


def look(event: Event) -> Look:
    """The look of an event's kind; of computation there are two, by direction."""
    if event.kind == "compute":
        return PASSES.get(event.phase, BACKWARD)
    return LOOKS.get(event.kind, OTHER)


def show_timeline(timeline: Timeline, plan: Plan | None = None) -> Drawing:
    """One step on all ranks: above in each row what the rank computes, below what it communicates.

    Communication includes waiting for the others; where a row is white, the rank did neither. `plan` adds
    each rank's stage and tile, and for a pipeline the share of time without computation beside the formula's.
    Raises PlanError where nothing happened, or on other ranks than the plan's.
    """
    rows = _rows(timeline, plan)
    row_in, end = text_of_rows(len(rows))
    figure = Drawing(figsize=(11, 1.6 + row_in * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    title = f"One training step: {timeline.seconds * 1e3:.4g} ms on {len(rows)} ranks{_idle(timeline, plan)}"
    axes.set_title(f"{title}\n{HINT}", loc="left", fontsize=10)
    draw_legend(figure, _draw_bars(axes, timeline, list(rows)))
    shares = {rank: _shares(timeline, rank) for rank in rows}
    texts = [[end.join(words) for words in side.values()] for side in (rows, shares)]
    frame_rows(axes, timeline.seconds * 1e3, "time, ms", *texts)
    told = [f"{', '.join(rows[rank])}: {', '.join(shares[rank])}" for rank in rows]
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure


def _idle(timeline: Timeline, plan: Plan | None) -> str:
    """How long ranks of a pipeline do not compute, and how long by formula if its stages were equal."""
    if plan is None or plan.micro_batches == 1 or plan.split_size == 1:
        return ""
    formula = bubble_of(plan)
    beside = "" if formula is None else f" ({plan.schedule} of equal stages: {formula:.0%})"
    return f"; idle or communicating {timeline.idle:.0%}{beside}"


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
    """Every event; the looks that occur, in the legend's order."""
    bars: dict[tuple[int, Look], list[tuple[float, float]]] = defaultdict(list)
    is_work: dict[Look, bool] = {}
    zero_s = timeline.start_s
    for event in timeline.events:
        bars[event.rank, look(event)].append(((event.start_s - zero_s) * 1e3, (event.end_s - zero_s) * 1e3))
        is_work[look(event)] = event.kind in WORK
    for (rank, style), spans in bars.items():
        top = ranks.index(rank) + (-0.42 if is_work[style] else 0.02)
        draw_bars(axes, rank, style, spans, top, 0.4)
    return [style for style in (FORWARD, BACKWARD, WEIGHTS, *LOOKS.values(), OTHER) if style in is_work]


def _shares(timeline: Timeline, rank: int) -> tuple[str, str]:
    """`compute 71%` and `communicate and wait 22%`."""
    kinds = {event.kind for event in timeline.events if event.rank == rank}
    work = sum(timeline.share(rank, kind) for kind in kinds if kind in WORK)
    traffic = sum(timeline.share(rank, kind) for kind in kinds if kind not in WORK)
    return f"compute {work:.0%}", f"communicate and wait {traffic:.0%}"
