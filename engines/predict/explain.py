"""Explains the result of a search: the best plan of each kind of parallelism, in words and numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from engines.formatting import format_bytes, format_number, format_percent
from engines.plan import Plan
from engines.predict.forecast import Forecast
from engines.predict.lower_bound import PlanBound
from engines.predict.parallelism import KINDS, WORDS, classify_plan, describe_plan
from engines.predict.search import SearchResult
from engines.program.timeline import compute_time_shares

__all__ = ["Explanation", "Verdict", "explain", "explain_forecasts"]

WORTH_SAYING = 0.05  # fraction of a step's time


@dataclass(frozen=True)
class Verdict:
    """The best plan of a kind; if none fits, the plan that needs least; if none can run, the `reason`.

    If none was simulated, `best` is None, and `bound` is the best plan by its bounds. `looked_at` is the number of
    plans, `share` the images per second relative to the best plan of all kinds that fits.
    """

    kind: str
    looked_at: int
    best: Forecast | None = None
    fits: bool = False
    share: float = 0.0
    reason: str = ""
    bound: PlanBound | None = None

    @property
    def plan(self) -> Plan | None:
        """The best plan, simulated or not."""
        found = self.best or self.bound
        return found.plan if found else None

    @property
    def title(self) -> str:
        """`Pure data parallelism`, `Layer parallelism in 4 replicas`."""
        words = WORDS[self.kind]
        if self.kind == "data":
            words = f"pure {words}"
        elif self.plan and self.plan.data_parallel > 1:
            words += f" in {self.plan.data_parallel:,} replicas"
        return words[0].upper() + words[1:]


@dataclass(frozen=True)
class Explanation:
    """The verdicts of all kinds considered. `rank_bytes` is the memory that a rank may use (None: unlimited)."""

    ranks: int
    verdicts: tuple[Verdict, ...]
    rank_bytes: int | None = None

    @property
    def best(self) -> Verdict | None:
        """The verdict of the fastest kind that fits, or None."""
        return max(
            (each for each in self.verdicts if each.fits and each.best), key=lambda each: each.share, default=None
        )

    def get_verdict(self, kind: str) -> Verdict | None:
        """Return the verdict of a kind, or None if no plan of the kind was considered."""
        return next((each for each in self.verdicts if each.kind == kind), None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence for each kind: the best first, then the faster before the slower, then those that do not fit."""
        chosen = self.best
        others = sorted(
            (each for each in self.verdicts if each is not chosen),
            key=lambda each: (each.plan is None, not each.fits, -each.share),
        )
        told = [self._describe_other(each) for each in others]
        if chosen and chosen.best:
            best, ranks = chosen.best, f"{self.ranks:,} rank{'s'[: self.ranks > 1]}"
            plan = f"{WORDS[chosen.kind]}, {describe_plan(best.plan)}"
            told.insert(0, f"The best for {ranks} is {plan}: {self._format_numbers(best)}.")
        return tuple(told)

    @property
    def words(self) -> str:
        """All sentences, joined."""
        return " ".join(self.sentences)

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        return f'<ul style="max-width: 60em; line-height: 1.4; margin: 0.3em 0">{items}</ul>'

    def _describe_other(self, verdict: Verdict) -> str:
        found = verdict.best or verdict.bound
        if found is None:
            return f"{verdict.title} cannot run: {verdict.reason}"
        plan = f" ({describe_plan(found.plan)})"
        if not verdict.fits:
            least = "it needs" if verdict.looked_at == 1 else f"the least of {verdict.looked_at} plans{plan} needs"
            more = "" if verdict.best else " at least"
            return f"{verdict.title} does not fit: {least}{more} {self._format_memory(found)}."
        if verdict.best is None:
            rate = format_number(found.images_per_s)
            return f"{verdict.title}{plan} is slower: at most {rate} images/s, which is known without simulating it."
        share, numbers = format_percent(verdict.share), self._format_numbers(verdict.best)
        return f"{verdict.title}{plan} reaches {share} of that: {numbers}."

    def _format_numbers(self, found: Forecast) -> str:
        """Return the speed, the memory, and the largest losses beside computing."""
        images = f"{found.images:,} image{'s'[: found.images > 1]}"
        shares = {kind: share for kind, share in compute_time_shares(found.timeline).items() if kind != "compute"}
        large = sorted(
            (kind for kind, share in shares.items() if share >= WORTH_SAYING), key=lambda kind: -shares[kind]
        )
        told = [f"{format_percent(shares[kind])} {kind if 'waiting' in kind else f'on {kind}'}" for kind in large]
        losses = f"; of a rank's time {', '.join(told)}" if told else ""
        rate = format_number(found.images_per_s)
        return f"{rate} images/s in steps of {images}, {self._format_memory(found)}{losses}"

    def _format_memory(self, found: Forecast | PlanBound) -> str:
        """Return `3.1 GB of 16.0 GB`, for the fullest rank."""
        limit = f" of {format_bytes(self.rank_bytes)}" if self.rank_bytes else ""
        return f"{format_bytes(found.peak_bytes)}{limit}"


def explain(found: SearchResult, rank_bytes: int | None = None) -> Explanation:
    """Explain the result of a search, kind by kind; `rank_bytes` as in the search."""
    return explain_forecasts((*found.fitting, *found.too_large), found.refused, rank_bytes, found.bounded)


def explain_forecasts(
    forecasts: Iterable[Forecast],
    refused: Sequence[tuple[Plan, str]] = (),
    rank_bytes: int | None = None,
    bounded: Sequence[PlanBound] = (),
) -> Explanation:
    """Explain forecasts, refused plans with their reasons, and bounded plans, kind by kind."""
    found, bounds, reasons = (
        _group_by_kind((each.plan, each) for each in forecasts),
        _group_by_kind((each.plan, each) for each in bounded),
        _group_by_kind(refused),
    )
    ranks = next((each.plan.ranks for of in (*found.values(), *bounds.values()) for each in of), 0)
    ranks = ranks or (refused[0][0].ranks if refused else 0)
    rates = [each.images_per_s for of in found.values() for each in of if _can_fit(each, rank_bytes)]
    fastest = max(rates, default=0.0)
    verdicts = []
    for kind in KINDS:
        # Plans that were simulated and fit come first. Bounds are used only where there are none: they say that a kind
        # is slower, or does not fit, but not by how much.
        everything = [*found[kind], *bounds[kind]]
        count = len(everything) + len(reasons[kind])
        if fitting := [each for each in found[kind] if _can_fit(each, rank_bytes)]:
            best = max(fitting, key=lambda each: each.images_per_s)
            verdicts.append(Verdict(kind, count, best, True, best.images_per_s / fastest))
        elif slower := [each for each in bounds[kind] if _can_fit(each, rank_bytes)]:
            verdicts.append(Verdict(kind, count, fits=True, bound=max(slower, key=lambda each: each.images_per_s)))
        elif everything:
            least = min(everything, key=lambda each: each.peak_bytes)
            is_simulated = isinstance(least, Forecast)
            verdicts.append(Verdict(kind, count, least) if is_simulated else Verdict(kind, count, bound=least))
        elif count:
            verdicts.append(Verdict(kind, count, reason=reasons[kind][0]))
    return Explanation(ranks, tuple(verdicts), rank_bytes)


def _group_by_kind(pairs: Iterable[tuple[Plan, Any]]) -> defaultdict[str, list[Any]]:
    """Return the items of (plan, item) pairs, grouped by the kind of the plan."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for plan, item in pairs:
        found[classify_plan(plan)].append(item)
    return found


def _can_fit(each: Forecast | PlanBound, rank_bytes: int | None) -> bool:
    return rank_bytes is None or each.peak_bytes <= rank_bytes
