"""Timelines as columns of numbers and lists of words: what a page needs to draw a step, zoom and describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpi4dl_nb.draw.packed_tables import pack_columns
from mpi4dl_nb.draw.plain_text import cut_words
from mpi4dl_nb.draw.scaling import LOOKS as SHARE_LOOKS
from mpi4dl_nb.draw.timeline import LETTERS, ORDER, ROW_LOOKS, WAIT, format_timeline_title, get_style, make_row_labels
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import WORK, Timeline, compute_time_shares

Names = dict[str, int]
"""Each name's place in a list of names."""

COLUMNS = {
    **dict.fromkeys(("start", "end", "wait", "bytes"), "f8"),
    **dict.fromkeys(("row", "look", "name", "kind", "phase", "microBatch", "place"), "i4"),
}


@dataclass(frozen=True)
class TimelineRows:
    """The events of a measured and a predicted timeline, column by column, and the words that the columns refer to.

    `columns` holds `COLUMNS`: the start of each event, its end and its waiting time in seconds of the step, its bytes,
    its row, its places in `words["looks"]`, `["names"]`, `["kinds"]` and `["phases"]`, the micro-batch, and the event's
    place in its timeline. Events are sorted by row and start; those of the measured timeline come first.
    """

    words: dict[str, Any]
    columns: bytes


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
    >>> rows.words["counts"], rows.words["seconds"], rows.words["kinds"]
    ([2], [1.0], ['compute', 'all-reduce'])
    """
    charts = {"measured": timeline} | ({"predicted": predicted} if predicted is not None else {})
    labels = make_row_labels(charts, plan)
    places = {rank: row for row, rank in enumerate(timeline.ranks)}
    looks = {style: index for index, style in enumerate(ORDER)}
    names, kinds, phases, events = Names(), Names(), Names(), []
    for chart in charts.values():
        for index, event in sorted(enumerate(chart.events), key=lambda item: (item[1].rank, item[1].start_s)):
            span = event.start_s - chart.start_s, event.end_s - chart.start_s
            keys = (names, event.name), (kinds, event.kind), (phases, event.phase)
            numbers = [known.setdefault(key, len(known)) for known, key in keys]
            codes = places[event.rank], looks[get_style(event)], *numbers, event.micro_batch, index
            events.append((*span, event.wait_s, event.bytes, *codes))
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
    return TimelineRows(cut_words(words), pack_columns(COLUMNS, events))
