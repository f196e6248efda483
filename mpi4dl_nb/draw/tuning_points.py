"""Candidate plans as points of time against memory: which of them no other plan beats in both, and facts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpi4dl_nb.engines.formatting import format_bytes, format_number, format_percent, format_seconds
from mpi4dl_nb.engines.predict.candidates import Candidate
from mpi4dl_nb.engines.predict.explain import KINDS, WORDS, classify_plan, describe_plan
from mpi4dl_nb.engines.predict.forecast import Forecast
from mpi4dl_nb.engines.program.timeline import compute_time_shares


@dataclass(frozen=True)
class KindLook:
    """Name, colour and shape of the points of one kind of parallelism; `marker` is the shape's name in Matplotlib."""

    name: str
    colour: str
    shape: str
    marker: str


_LOOKS = (
    ("#0072b2", "circle", "o"),
    ("#d55e00", "square", "s"),
    ("#b8860b", "triangle", "^"),
    ("#a3527f", "diamond", "D"),
    ("#00805c", "cross", "P"),
    ("#555555", "star", "*"),
)
KIND_LOOKS = {kind: KindLook(WORDS[kind], *look) for kind, look in zip(KINDS, _LOOKS, strict=True)}


@dataclass(frozen=True)
class TuningPoint:
    """One candidate: seconds for an image and bytes of the fullest rank, predicted and (else None) measured.

    `on_front` tells whether no other candidate needs less of one without needing more of the other; where a candidate
    was measured, that counts. `number` is its place in the table, from 1; 0 for a plan that needs too much memory.
    `plan` is the plan as text, which tells it from all others wherever it is in the table.
    """

    number: int
    plan: str
    name: str
    kind: str
    image_s: float
    bytes: int
    measured_image_s: float | None = None
    measured_bytes: int | None = None
    failure: str = ""
    on_front: bool = False
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def cost(self) -> tuple[float, int]:
        """Seconds for an image and bytes, measured if it was."""
        return self.measured_image_s or self.image_s, self.measured_bytes or self.bytes


def find_pareto_front(costs: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of the costs that no other cost beats in one number without being worse in the other.

    >>> sorted(find_pareto_front([(1, 9), (2, 5), (3, 6), (4, 1), (4, 1)]))
    [0, 1, 3, 4]
    """
    front: set[int] = set()
    least: tuple[float, float] | None = None
    for index in sorted(range(len(costs)), key=lambda index: costs[index]):
        if least is None or costs[index][1] < least[1] or costs[index] == least:
            front.add(index)
            least = costs[index]
    return front


def make_points(
    candidates: Sequence[Candidate],
    neutral_batch: int | None = None,
    rank_bytes: int | None = None,
    too_large: Sequence[Forecast] = (),
) -> tuple[TuningPoint, ...]:
    """Return a point for each candidate, in their order, then one for each forecast that is `too_large` for a rank.

    An image's time is that of `compute_throughput` with `neutral_batch`. `rank_bytes` is what a rank may hold.
    """
    # A plan that is too large is a candidate that is never measured.
    numbered = [*enumerate(candidates, 1), *((0, Candidate(forecast)) for forecast in too_large)]
    points = [
        TuningPoint(
            position,
            repr(candidate.plan),
            describe_plan(candidate.plan),
            classify_plan(candidate.plan),
            1 / candidate.forecast.compute_throughput(neutral_batch),
            candidate.predicted_bytes,
            1 / candidate.compute_pace(neutral_batch) if candidate.measured else None,
            candidate.peak_bytes,
            candidate.failure,
        )
        for position, candidate in numbered
    ]
    works = [point for point in points if point.number and not point.failure]
    front = {works[index].number for index in find_pareto_front([point.cost for point in works])}
    return tuple(
        _add_facts(point, candidate.forecast, point.number in front, rank_bytes)
        for point, (_, candidate) in zip(points, numbered, strict=True)
    )


def _add_facts(point: TuningPoint, forecast: Forecast, on_front: bool, rank_bytes: int | None) -> TuningPoint:
    limit = f" of {format_bytes(rank_bytes)}" if rank_bytes else ""
    rate, memory = f"{format_number(forecast.images_per_s)} images/s", f"{format_bytes(point.bytes)}{limit}"
    facts = [
        ("kind", WORDS[point.kind]),
        ("predicted", f"{rate} ({format_seconds(forecast.seconds)} for {forecast.images:,} images), {memory}"),
    ]
    if point.measured_image_s is not None and point.measured_bytes is not None:
        speed = point.image_s / point.measured_image_s
        # Per step, as the predicted number: the time of an image may count those of a neutral batch only.
        images_per_s = format_number(forecast.images_per_s * speed)
        facts += [
            ("measured", f"{images_per_s} images/s, {format_bytes(point.measured_bytes)}"),
            ("speed", f"{format_percent(speed)} of what was predicted"),
        ]
    shares = compute_time_shares(forecast.timeline)
    facts.append(("time", ", ".join(f"{kind} {format_percent(part)}" for kind, part in shares.items() if part > 0)))
    if point.failure:
        facts.append(("failed", point.failure))
    elif not point.number:
        facts.append(("does not fit", f"a rank may hold {format_bytes(rank_bytes or 0)}"))
    elif on_front:
        facts.append(("front", "no other plan is faster without more memory"))
    return replace(point, on_front=on_front, facts=tuple(facts))


def pack_points(points: Sequence[TuningPoint], rank_bytes: int | None = None) -> dict[str, Any]:
    """Return points as JSON, with the kinds that occur and the limit of a rank's memory."""
    kinds = {point.kind for point in points}
    return {
        "points": [asdict(point) | {"cost": list(point.cost)} for point in points],
        "kinds": {kind: asdict(look) for kind, look in KIND_LOOKS.items() if kind in kinds},
        "rank_bytes": rank_bytes,
    }
