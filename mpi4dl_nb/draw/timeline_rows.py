"""Timelines as arrays of numbers and lists of words: what a page needs to draw a step, zoom into it and describe it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpi4dl_nb.draw.plain_text import cut_words
from mpi4dl_nb.draw.scaling import LOOKS as SHARE_LOOKS
from mpi4dl_nb.draw.timeline import LETTERS, ORDER, ROW_LOOKS, WAIT, format_timeline_title, get_style, make_row_labels
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import WORK, Timeline, compute_time_shares

Names = dict[str, int]
"""Each name's place in a list of names."""


@dataclass(frozen=True)
class TimelineRows:
    """The events of a measured and a predicted timeline, column by column, and the words that the columns refer to.

    `times` holds little-endian float64 numbers: the starts of all events in seconds of the step, then their ends, their
    waiting times in seconds, and their bytes. `codes` holds little-endian int32 numbers: the row of each event, then
    places in `words["looks"]`, `["names"]`, `["kinds"]` and `["phases"]`, the micro-batch, and the event's place in its
    timeline. Events are sorted by row and start; those of the measured timeline come first.
    """

    words: dict[str, Any]
    times: bytes
    codes: bytes


def make_timeline_rows(
    timeline: Timeline,
    plan: Plan | None = None,
    predicted: Timeline | None = None,
    layers: Mapping[str, str] | None = None,
) -> TimelineRows:
    """Return the rows of a timeline, one per rank, and of `predicted` on the same ranks.

    `layers` is the module or layer of each instruction, by its name. Raises PlanError if a timeline is empty, or has
    other ranks than the plan, or if `predicted` has ranks that were not measured.

    >>> events = (
    ...     TimelineEvent(0, "conv", "compute", "forward", 0, 5.0, 5.5, 0),
    ...     TimelineEvent(0, "sum", "all-reduce", "update", 0, 5.5, 6.0, 8, 0.25),
    ... )
    >>> rows = make_timeline_rows(Timeline(events))
    >>> np.frombuffer(rows.times, "<f8").reshape(4, 2).tolist()
    [[0.0, 0.5], [0.5, 1.0], [0.0, 0.25], [0.0, 8.0]]
    """
    charts = {"measured": timeline} | ({"predicted": predicted} if predicted is not None else {})
    labels = make_row_labels(charts, plan)
    places = {rank: row for row, rank in enumerate(timeline.ranks)}
    looks = {style: index for index, style in enumerate(ORDER)}
    names, kinds, phases = Names(), Names(), Names()
    times, codes = [], []
    for chart in charts.values():
        for index, event in sorted(enumerate(chart.events), key=lambda item: (item[1].rank, item[1].start_s)):
            span = event.start_s - chart.start_s, event.end_s - chart.start_s
            times.append((*span, event.wait_s, event.bytes))
            keys = (names, event.name), (kinds, event.kind), (phases, event.phase)
            numbers = [known.setdefault(key, len(known)) for known, key in keys]
            codes.append((places[event.rank], looks[get_style(event)], *numbers, event.micro_batch, index))
    words = {
        "looks": [asdict(style) for style in ORDER],
        "wait": looks[WAIT],
        "row_looks": [looks[style] for style in ROW_LOOKS],
        "names": list(names),
        "layers": [(layers or {}).get(name, "") for name in names],
        "kinds": list(kinds),
        "work": [kind in WORK for kind in kinds],
        "phases": list(phases),
        "letters": [LETTERS.get(phase, "B") for phase in phases],
        "counts": [len(chart.events) for chart in charts.values()],
        "seconds": [chart.seconds for chart in charts.values()],
        "titles": [format_timeline_title(name, charts, plan) for name in charts],
        "rows": [
            {"rank": rank, "roles": "; ".join(texts[1:]), "shares": [use.work, use.communication, use.waiting]}
            for (rank, texts), use in zip(labels["measured"].items(), timeline.time_shares.values(), strict=True)
        ],
        # Of all ranks' time, each part with the look that it has in other figures.
        "shares": [
            asdict(SHARE_LOOKS[kind]) | {"kind": kind, "share": share}
            for kind, share in compute_time_shares(timeline).items()
        ],
    }
    return TimelineRows(cut_words(words), _pack_columns(times, "<f8"), _pack_columns(codes, "<i4"))


def _pack_columns(rows: Iterable[tuple[float, ...]], kind: str) -> bytes:
    """Return the numbers of equally long rows, column after column."""
    return np.array(list(rows), kind).T.tobytes()
