"""Replays published results in the simulator: the description of a claim, and the forecasts to compare it with."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, forecast
from mpi4dl_nb.engines.predict.machines import resolve_machine

NEAR = 0.2
"""The largest relative difference at which a simulated and a published number agree."""


@dataclass(frozen=True)
class ModelReference:
    """PACKAGE.MODULE:CALLABLE that returns a plain module, and its keyword arguments."""

    path: str
    keywords: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class StudyRun:
    """A plan with `images` images in a batch, of the shape (3, image_px, image_px), on a machine known by name."""

    model: ModelReference
    image_px: int
    images: int
    plan: Plan
    machine: str


@dataclass(frozen=True)
class RunVariant:
    """A variation of a row, described in `words`; None means as in the row.

    `changes` are fields of the machine that differ, for both runs.
    """

    words: str
    run: StudyRun | None = None
    against: StudyRun | None = None
    changes: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class PublishedResult:
    """A published number, the `run` that it describes, and the run `against` which that is compared.

    `measure` names how the number follows from the two. `assumed` lists what the source does not state, and `variants`
    show how sensitive the number is to that. `why` is the reason for a disagreement, as far as a variant has shown it.
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
    """The summary of a forecast: the fractions of time in which all ranks work, handle messages and wait."""

    images_per_s: float
    ranks: int
    peak_bytes: int
    work: float
    messages: float
    waiting: float

    @classmethod
    def of(cls, found: Forecast) -> RunResult:
        """Return the summary, with means over the simulated ranks."""
        uses = found.timeline.time_shares.values()
        sums = ([use.work for use in uses], [use.communication for use in uses], [use.waiting for use in uses])
        return cls(found.images_per_s, found.ranks, found.peak_bytes, *(sum(parts) / len(parts) for parts in sums))


MEASURES: Mapping[str, Callable[[RunResult, RunResult], float]] = {
    "times as fast": lambda run, against: run.images_per_s / against.images_per_s,
    "% of linear": lambda run, against: 100 * run.images_per_s / run.ranks / (against.images_per_s / against.ranks),
    "s per epoch": lambda run, _: 1_281_167 / run.images_per_s,
    "images/s": lambda run, _: run.images_per_s,
}
"""Functions of a run and the run that it is compared with. An epoch is that of ImageNet-1k."""


@dataclass(frozen=True)
class ReplayOutcome:
    """The simulated numbers of a row, with its variants in order; `run` and `against` belong to the row itself."""

    row: PublishedResult
    simulated: float
    run: RunResult
    against: RunResult
    memory_bytes: int
    varied: tuple[tuple[str, float, bool], ...]

    @property
    def ratio(self) -> float:
        """Simulated divided by published."""
        return self.simulated / self.row.published

    @property
    def agrees(self) -> bool:
        """Whether the ratio differs from 1 by at most `NEAR`."""
        return abs(self.ratio - 1) <= NEAR

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of the fullest rank of both runs."""
        return max(self.run.peak_bytes, self.against.peak_bytes)

    @property
    def line(self) -> dict[str, Any]:
        """The outcome as data, to be printed as JSON."""
        row, both = self.row, (self.run, self.against)
        return {
            "row": row.name,
            "claim": row.claim,
            "published": row.published,
            "simulated": round(self.simulated, 3),
            "unit": row.measure,
            "ratio": round(self.ratio, 3),
            "agrees": self.agrees,
            "why": row.why,
            "ranks": self.run.ranks,
            "machine": row.run.machine,
            "plan": repr(row.run.plan),
            "against": repr(row.against.plan) if row.against else "",
            "images_per_s": [round(run.images_per_s, 3) for run in both],
            "work_messages_waiting": [
                [round(part, 3) for part in (run.work, run.messages, run.waiting)] for run in both
            ],
            "peak_gib": round(self.peak_bytes / 2**30, 2),
            "fits": self.peak_bytes <= self.memory_bytes,
            "variants": [
                {"words": words, "simulated": round(value, 3), "fits": fits} for words, value, fits in self.varied
            ],
            "assumed": list(row.assumed),
            "source": row.source,
        }


class PublishedReplay:
    """Simulates rows. Models are traced once, and a run that several rows share is simulated once."""

    def __init__(self) -> None:
        self._traces: dict[tuple[ModelReference, int, int], TraceCache] = {}
        self._known: dict[tuple[StudyRun, str], RunResult] = {}

    def simulate_result(self, row: PublishedResult) -> ReplayOutcome:
        """Simulate a row and its variants. Raises PlanError if a model's package is not installed."""
        measure, memory_bytes = MEASURES[row.measure], resolve_machine(row.run.machine).memory_bytes or 0
        pairs = []
        for variant in (RunVariant("as it is"), *row.variants):
            run, against = variant.run or row.run, variant.against or row.against
            simulated = self.forecast_run(run, variant.changes)
            pairs.append((simulated, self.forecast_run(against, variant.changes) if against else simulated))
        base, *others = pairs
        varied = tuple(
            (variant.words, measure(*pair), max(side.peak_bytes for side in pair) <= memory_bytes)
            for variant, pair in zip(row.variants, others, strict=True)
        )
        return ReplayOutcome(row, measure(*base), *base, memory_bytes, varied)

    def forecast_run(self, run: StudyRun, changes: Mapping[str, Any] | None = None) -> RunResult:
        """Return the summary of one run, on its machine with `changes` applied."""
        # Rows share runs, mostly those that they compare with. Changes are a dict, which has no hash: its text has.
        key = run, repr(sorted((changes or {}).items()))
        if key not in self._known:
            asked = replace(resolve_machine(run.machine), **(changes or {}))
            traced = run.model, run.image_px, run.images
            if traced not in self._traces:
                shape = run.images, 3, run.image_px, run.image_px
                self._traces[traced] = TraceCache(build_meta_model(run.model), shape, nn.CrossEntropyLoss())
            self._known[key] = RunResult.of(forecast(self._traces[traced].get_graph(run.plan), run.plan, asked))
        return self._known[key]


def build_meta_model(model: ModelReference) -> nn.Module:
    """Return the model on the meta device, with batch norms that keep no running statistics.

    The published systems keep the running statistics of each replica without messages. Raises PlanError if the model's
    package is not installed.
    """
    try:
        make = pkgutil.resolve_name(model.path)
    except ImportError as error:
        package = model.path.partition(".")[0]
        raise PlanError(f"{model.path} needs the package {package}: pip install {package}.") from error
    with torch.device("meta"):
        network: nn.Module = make(**model.keywords)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return network
