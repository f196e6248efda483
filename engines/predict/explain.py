"""The kinds of parallelism: classifies plans, and explains the best forecast of each kind in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import (
    FactTable,
    describe_unknown,
    format_bytes,
    format_count,
    format_number,
    format_percent,
)
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, compute_throughput
from mpi4dl_nb.engines.program.timeline import compute_time_shares

WORDS = {kind: f"{kind} parallelism" for kind in ("data", "layer", "pipeline", "bidirectional", "spatial")}
WORDS |= {"hybrid": "a hybrid of tiles and stages"}
"""The name of each kind in a sentence."""

KINDS = tuple(WORDS)


def classify_plan(plan: Plan) -> str:
    """Return the kind of a plan: what the ranks of one replica split.

    They split nothing (`data`), the layers, the micro-batches, both directions, or the image. `hybrid` splits the image
    in the first stages and something else in the later stages. Replicas do not change the kind.

    >>> (
    ...     classify_plan(Plan(split_size=1, spatial_size=0, data_parallel=4)),
    ...     classify_plan(Plan(split_size=1)),
    ...     classify_plan(Plan()),
    ... )
    ('data', 'spatial', 'hybrid')
    >>> classify_plan(Plan(split_size=4, spatial_size=0)), classify_plan(Plan(split_size=4, spatial_size=0, parts=2))
    ('layer', 'pipeline')
    """
    if any(grid.tiles > 1 for grid in plan.grids):
        return "spatial" if plan.spatial_size == plan.split_size and not plan.bidirectional else "hybrid"
    if plan.replica_ranks == 1 or plan.split_size == 1:
        return "data"
    if plan.bidirectional:
        return "bidirectional"
    return "pipeline" if plan.parts > 1 else "layer"


def describe_plan(plan: Plan) -> str:
    """Return a short description of a plan, unique among the plans that are searched for the same ranks.

    >>> from mpi4dl_nb import Plan
    >>> (
    ...     describe_plan(Plan(split_size=2, spatial_size=1)),
    ...     describe_plan(Plan(split_size=1, spatial_size=0, data_parallel=4)),
    ... )
    ('2x2 tiles + 1 stage', '4 replicas')
    """
    words = [f"{format_grids(plan)} tiles"] if plan.spatial_size else []
    stages = plan.split_size - plan.spatial_size
    if stages and (plan.spatial_size or stages > 1):
        words.append(format_count(stages, "stage"))
    words += [f"{plan.local_dp} ranks share"] if plan.local_dp > 1 else []
    words += [f"{plan.parts} parts, {plan.schedule}"] if plan.parts > 1 else []
    words += ["both ways"] if plan.bidirectional else []
    words += plan.phrases
    words += [f"{plan.data_parallel:,} replicas"] if plan.data_parallel > 1 else []
    return " + ".join(words) or "1 rank"


def format_grids(plan: Plan) -> str:
    """Return the grids of the spatial stages, or a dash if there are none."""
    return " ".join(str(grid) for grid in plan.grids[: plan.spatial_size]) or "–"


# The explanation of forecasts, kind by kind.


def format_rate(images: int, seconds: float, neutral_batch: int | None = None) -> str:
    """Return the throughput of steps of some images in words, with the images that count (`compute_throughput`).

    >>> format_rate(4, 2.0), format_rate(4, 2.0, neutral_batch=1)
    ('2.00 images/s in steps of 4 images', '0.5 images/s in steps of 4 images, of which 1 counts')
    """
    rate = format_number(compute_throughput(images, seconds, neutral_batch))
    words = f"{rate} images/s in steps of {format_count(images, 'image')}"
    if neutral_batch is None or images <= neutral_batch:
        return words
    return f"{words}, of which {neutral_batch:,} count{'s'[: neutral_batch == 1]}"


WORTH_SAYING = 0.05  # fraction of a step's time


@dataclass(frozen=True, repr=False)
class Verdict(FactTable):
    """The best plan of a kind; if none fits, the plan that needs least; if none can run, the `reason`.

    `looked_at` is the number of plans. `share` is its speed (see `neutral_batch` of `search`) relative to the best plan
    of all kinds that fits; by memory, the memory of that plan relative to its own. The best plan has 1.
    """

    kind: str
    looked_at: int
    best: Forecast | None = None
    fits: bool = False
    share: float = 0.0
    reason: str = ""

    @property
    def facts(self) -> dict[str, object]:
        plan = {} if self.best is None else {"plan": self.best.plan.summary}
        fits = {"fits": "yes" if self.fits else "no", "relative speed": format_percent(self.share)} if plan else {}
        why = {"reason": self.reason} if self.reason else {}
        return {"kind": WORDS[self.kind], **plan, **fits, "plans considered": self.looked_at, **why}

    @property
    def plan(self) -> Plan | None:
        """The best plan."""
        return self.best.plan if self.best else None

    @property
    def title(self) -> str:
        """`Pure data parallelism`, `Layer parallelism in 4 replicas`."""
        words = WORDS[self.kind]
        if self.kind == "data":
            words = f"pure {words}"
        elif self.plan and self.plan.data_parallel > 1:
            words += f" in {self.plan.data_parallel:,} replicas"
        return words[0].upper() + words[1:]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The verdicts of all kinds considered. `rank_bytes` is the memory that a rank may use (None: unlimited).

    Rates count images as `compute_throughput` does with `neutral_batch`. The plans are ordered `by` speed or memory.
    `measured` says what measurements of the best plans found; empty if there were none.
    """

    ranks: int
    verdicts: tuple[Verdict, ...]
    rank_bytes: int | None = None
    neutral_batch: int | None = None
    measured: str = ""
    by: str = "speed"

    @property
    def best(self) -> Verdict | None:
        """The verdict of the best kind that fits, or None."""
        fitting = (verdict for verdict in self.verdicts if verdict.fits)
        return max(fitting, key=lambda verdict: verdict.share, default=None)

    def get_verdict(self, kind: str) -> Verdict | None:
        """Return the verdict of a kind, or None if no plan of it was considered. Raises PlanError for other names."""
        if kind not in KINDS:
            raise PlanError(describe_unknown(f"kind={kind!r} is unknown", kind, KINDS))
        return next((verdict for verdict in self.verdicts if verdict.kind == kind), None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was measured, if anything; then a sentence for each kind, as predicted.

        The best kind is first, then the better ones before the worse ones, then those that do not fit.
        """
        chosen = self.best
        others = [verdict for verdict in self.verdicts if verdict is not chosen]
        others.sort(key=lambda verdict: (verdict.plan is None, not verdict.fits, -verdict.share))
        sentences = [self._describe_other(verdict) for verdict in others]
        if chosen and chosen.best:
            best, ranks = chosen.best, format_count(self.ranks, "rank")
            plan = f"{WORDS[chosen.kind]}, {describe_plan(best.plan)}"
            title = "The best" if self.by == "speed" else "What needs least memory"
            sentences.insert(0, f"{title} for {ranks}, as predicted, is {plan}: {self._format_numbers(best)}.")
        return (*[self.measured] * bool(self.measured), *sentences)

    @property
    def words(self) -> str:
        """All sentences, joined."""
        return " ".join(self.sentences)

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def __repr__(self) -> str:
        best = self.best.title if self.best else "nothing fits"
        return f"<Explanation for {self.ranks:,} ranks: {len(self.verdicts)} kinds; best: {best}>"

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        return f'<ul style="max-width: 60em; line-height: 1.4; margin: 0.3em 0">{items}</ul>'

    def _describe_other(self, verdict: Verdict) -> str:
        best = verdict.best
        if best is None:
            return f"{verdict.title} cannot run: {verdict.reason}"
        plan = f" ({describe_plan(best.plan)})"
        if not verdict.fits:
            least = "it needs" if verdict.looked_at == 1 else f"the least of {verdict.looked_at} plans{plan} needs"
            return f"{verdict.title} does not fit: {least} {self._format_memory(best)}."
        share, numbers = format_percent(verdict.share), self._format_numbers(best)
        if self.by == "memory":
            return f"{verdict.title}{plan} needs {format_number(1 / verdict.share)} times as much: {numbers}."
        return f"{verdict.title}{plan} reaches {share} of that: {numbers}."

    def _format_numbers(self, found: Forecast) -> str:
        """Return the speed, the memory, and the largest losses beside computing."""
        shares = {kind: share for kind, share in compute_time_shares(found.timeline).items() if kind != "compute"}
        large = [kind for kind in sorted(shares, key=lambda kind: -shares[kind]) if shares[kind] >= WORTH_SAYING]
        parts = [f"{format_percent(shares[kind])} {kind if 'waiting' in kind else f'on {kind}'}" for kind in large]
        losses = f"; of a rank's time {', '.join(parts)}" if parts else ""
        rate = format_rate(found.images, found.seconds, self.neutral_batch)
        return f"{rate}, {self._format_memory(found)}{losses}"

    def _format_memory(self, found: Forecast) -> str:
        """Return `3.1 GB of 16.0 GB`, for the fullest rank."""
        limit = f" of {format_bytes(self.rank_bytes)}" if self.rank_bytes else ""
        return f"{format_bytes(found.peak_bytes)}{limit}"


def explain(
    forecasts: Sequence[Forecast],
    refused: Sequence[tuple[Plan, str]] = (),
    rank_bytes: int | None = None,
    neutral_batch: int | None = None,
    by: str = "speed",
) -> Explanation:
    """Explain forecasts, and refused plans with their reasons, kind by kind.

    `rank_bytes`, `neutral_batch` and `by` are as in `search`, so that the best plan is the first one there.
    """

    def find_best(candidates: Iterable[Forecast]) -> Forecast | None:
        fitting = (forecast for forecast in candidates if forecast.can_fit(rank_bytes))
        return min(fitting, key=lambda forecast: forecast.get_sort_key(by, neutral_batch), default=None)

    best_of_all = find_best(forecasts)

    def compute_share(found: Forecast) -> float:
        mine, best = (forecast.get_sort_key(by, neutral_batch)[0] for forecast in (found, best_of_all or found))
        return best / mine if by == "memory" else mine / best

    verdicts = []
    for kind in KINDS:
        candidates = [forecast for forecast in forecasts if classify_plan(forecast.plan) == kind]
        reasons = [reason for plan, reason in refused if classify_plan(plan) == kind]
        count = len(candidates) + len(reasons)
        if best := find_best(candidates):
            verdicts.append(Verdict(kind, count, best, True, compute_share(best)))
        elif candidates:
            verdicts.append(Verdict(kind, count, min(candidates, key=lambda forecast: forecast.peak_bytes)))
        elif reasons:
            verdicts.append(Verdict(kind, count, reason=reasons[0]))
    plans = [*(forecast.plan for forecast in forecasts), *(plan for plan, _ in refused)]
    return Explanation(plans[0].ranks if plans else 0, tuple(verdicts), rank_bytes, neutral_batch, by=by)
