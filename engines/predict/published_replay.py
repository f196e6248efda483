"""Published results simulated: what a claim is made of, and the forecasts that stand beside it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from engines.errors import PlanError
from engines.plan import Plan
from engines.predict.forecast import Forecast, forecast
from engines.predict.machines import get_machine
from engines.trace_cache import TraceCache

__all__ = [
    "MEASURES",
    "ModelReference",
    "PublishedReplay",
    "PublishedResult",
    "ReplayOutcome",
    "RunResult",
    "RunVariant",
    "StudyRun",
]

NEAR = 0.2
"""Simulated and published agree where they differ by at most so much."""


@dataclass(frozen=True)
class ModelReference:
    """PACKAGE.MODULE:CALLABLE that returns a plain module, and its keywords."""

    path: str
    keywords: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class StudyRun:
    """A plan, `images` in a batch of it, of (3, image_px, image_px), on a machine known by name."""

    model: ModelReference
    image_px: int
    images: int
    plan: Plan
    machine: str


@dataclass(frozen=True)
class RunVariant:
    """The same row with something else in it, said in `words`; None: as in the row.

    `changes` are fields of the machine that are others, for both runs.
    """

    words: str
    run: StudyRun | None = None
    against: StudyRun | None = None
    changes: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class PublishedResult:
    """A published number, the `run` that it is of, and what that run is compared `against`.

    `measure` names how the number comes from the two, `assumed` says what its source does not. `variants` show how
    much hangs on that. `why`: the reason where the two disagree, as far as a variant has shown it.
    """

    name: str
    claim: str
    published: float
    measure: str
    source: str
    assumed: tuple[str, ...]
    run: StudyRun
    against: StudyRun | None = None
    variants: tuple[RunVariant, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class RunResult:
    """What is kept of a forecast: of the time of all ranks the parts in which they work, handle messages and wait."""

    images_per_s: float
    ranks: int
    peak_bytes: int
    work: float
    messages: float
    waiting: float

    @classmethod
    def of(cls, found: Forecast) -> RunResult:
        """Means over the ranks that were simulated."""
        uses = found.timeline.time_shares.values()
        sums = ([use.work for use in uses], [use.communication for use in uses], [use.waiting for use in uses])
        return cls(found.images_per_s, found.ranks, found.peak_bytes, *(sum(parts) / len(parts) for parts in sums))


MEASURES: Mapping[str, Callable[[RunResult, RunResult], float]] = {
    "times as fast": lambda run, against: run.images_per_s / against.images_per_s,
    "% of linear": lambda run, against: 100 * run.images_per_s / run.ranks / (against.images_per_s / against.ranks),
    "s per epoch": lambda run, _: 1_281_167 / run.images_per_s,
    "images/s": lambda run, _: run.images_per_s,
}
"""From a forecast, and the one that it is compared with. An epoch is of ImageNet-1k."""


@dataclass(frozen=True)
class ReplayOutcome:
    """What was simulated of a row, with its variants in their order; the forecasts are of the row itself."""

    row: PublishedResult
    simulated: float
    run: RunResult
    against: RunResult
    memory_bytes: int
    varied: tuple[tuple[str, float, bool], ...]

    @property
    def ratio(self) -> float:
        """Simulated by published."""
        return self.simulated / self.row.published

    @property
    def agrees(self) -> bool:
        """Within `NEAR`."""
        return abs(self.ratio - 1) <= NEAR

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank of both runs."""
        return max(self.run.peak_bytes, self.against.peak_bytes)

    @property
    def line(self) -> dict[str, Any]:
        """As data, to be printed as JSON."""
        row = self.row
        return {
            "row": row.name, "claim": row.claim, "published": row.published, "simulated": round(self.simulated, 3),
            "unit": row.measure, "ratio": round(self.ratio, 3), "agrees": self.agrees, "why": row.why,
            "ranks": self.run.ranks, "machine": row.run.machine, "plan": repr(row.run.plan),
            "against": repr(row.against.plan) if row.against else "",
            "images_per_s": [round(each.images_per_s, 3) for each in (self.run, self.against)],
            "work_messages_waiting": [
                [round(part, 3) for part in (each.work, each.messages, each.waiting)]
                for each in (self.run, self.against)
            ],
            "peak_gib": round(self.peak_bytes / 2**30, 2), "fits": self.peak_bytes <= self.memory_bytes,
            "variants": [
                {"words": words, "simulated": round(value, 3), "fits": fits} for words, value, fits in self.varied
            ],
            "assumed": list(row.assumed), "source": row.source,
        }  # fmt: skip


class PublishedReplay:
    """Simulates rows; models are traced once, and a run that several rows share is simulated once."""

    def __init__(self) -> None:
        self._traces: dict[tuple[ModelReference, int, int], TraceCache] = {}
        self._known: dict[tuple[StudyRun, str], RunResult] = {}

    def simulate_result(self, row: PublishedResult) -> ReplayOutcome:
        """Raises PlanError where a model's package is not installed."""
        run, against = self._forecast_pair(row, RunVariant("as it is"))
        varied = []
        for variant in row.variants:
            pair = self._forecast_pair(row, variant)
            value = MEASURES[row.measure](*pair)
            varied.append((variant.words, value, max(each.peak_bytes for each in pair) <= _get_memory_bytes(row.run)))
        return ReplayOutcome(
            row, MEASURES[row.measure](run, against), run, against, _get_memory_bytes(row.run), tuple(varied)
        )

    def _forecast_pair(self, row: PublishedResult, variant: RunVariant) -> tuple[RunResult, RunResult]:
        run, against = variant.run or row.run, variant.against or row.against
        found = self.forecast_run(run, variant.changes)
        return found, self.forecast_run(against, variant.changes) if against else found

    def forecast_run(self, run: StudyRun, changes: Mapping[str, Any] | None = None) -> RunResult:
        """Of one run, on its machine or on one that is changed so."""
        key = run, repr(sorted((changes or {}).items()))
        if key not in self._known:
            asked = replace(get_machine(run.machine), **(changes or {}))
            self._known[key] = RunResult.of(forecast(self._get_traces(run).get_graph(run.plan), run.plan, asked))
        return self._known[key]

    def _get_traces(self, run: StudyRun) -> TraceCache:
        key = run.model, run.image_px, run.images
        if key not in self._traces:
            shape = run.images, 3, run.image_px, run.image_px
            self._traces[key] = TraceCache(build_meta_model(run.model), shape, nn.CrossEntropyLoss())
        return self._traces[key]


def _get_memory_bytes(run: StudyRun) -> int:
    return get_machine(run.machine).memory_bytes or 0


def build_meta_model(model: ModelReference) -> nn.Module:
    """The model without memory, whose batch norms keep no running statistics.

    The published systems keep those of each replica by itself, without a message. Raises PlanError where the model's
    package is not installed.
    """
    path, _, name = model.path.partition(":")
    try:
        make = getattr(importlib.import_module(path), name)
    except ImportError as error:
        package = path.partition(".")[0]
        raise PlanError(f"{model.path} needs the package {package}: pip install {package}.") from error
    with torch.device("meta"):
        found: nn.Module = make(**model.keywords)
    for module in found.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return found
