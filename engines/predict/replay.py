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
from engines.predict.machines import machine
from engines.traces import Traces

__all__ = ["MEASURES", "Found", "Model", "Outcome", "Replay", "Row", "Run", "Variant"]

NEAR = 0.2
"""Simulated and published agree where they differ by at most so much."""


@dataclass(frozen=True)
class Model:
    """PACKAGE.MODULE:CALLABLE that returns a plain module, and its keywords."""

    path: str
    keywords: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A plan, `images` in a batch of it, of (3, image_px, image_px), on a machine known by name."""

    model: Model
    image_px: int
    images: int
    plan: Plan
    machine: str


@dataclass(frozen=True)
class Variant:
    """The same row with something else in it, said in `words`; None: as in the row.

    `changes` are fields of the machine that are others, for both runs.
    """

    words: str
    run: Run | None = None
    against: Run | None = None
    changes: Mapping[str, Any] = field(hash=False, default_factory=dict)


@dataclass(frozen=True)
class Row:
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
    run: Run
    against: Run | None = None
    variants: tuple[Variant, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Found:
    """What is kept of a forecast: of the time of all ranks the parts in which they work, handle messages and wait."""

    images_per_s: float
    ranks: int
    peak_bytes: int
    work: float
    messages: float
    waiting: float

    @classmethod
    def of(cls, found: Forecast) -> Found:
        """Means over the ranks that were simulated."""
        uses = found.timeline.uses.values()
        sums = ([use.work for use in uses], [use.communication for use in uses], [use.waiting for use in uses])
        return cls(found.images_per_s, found.ranks, found.peak_bytes, *(sum(parts) / len(parts) for parts in sums))


MEASURES: Mapping[str, Callable[[Found, Found], float]] = {
    "times as fast": lambda run, against: run.images_per_s / against.images_per_s,
    "% of linear": lambda run, against: 100 * run.images_per_s / run.ranks / (against.images_per_s / against.ranks),
    "s per epoch": lambda run, _: 1_281_167 / run.images_per_s,
    "images/s": lambda run, _: run.images_per_s,
}
"""From a forecast, and the one that it is compared with. An epoch is of ImageNet-1k."""


@dataclass(frozen=True)
class Outcome:
    """What was simulated of a row, with its variants in their order; the forecasts are of the row itself."""

    row: Row
    simulated: float
    run: Found
    against: Found
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


class Replay:
    """Simulates rows; models are traced once, and a run that several rows share is simulated once."""

    def __init__(self) -> None:
        self._traces: dict[tuple[Model, int, int], Traces] = {}
        self._known: dict[tuple[Run, str], Found] = {}

    def outcome(self, row: Row) -> Outcome:
        """Raises PlanError where a model's package is not installed."""
        run, against = self._pair(row, Variant("as it is"))
        varied = []
        for variant in row.variants:
            pair = self._pair(row, variant)
            value = MEASURES[row.measure](*pair)
            varied.append((variant.words, value, max(each.peak_bytes for each in pair) <= _memory(row.run)))
        return Outcome(row, MEASURES[row.measure](run, against), run, against, _memory(row.run), tuple(varied))

    def _pair(self, row: Row, variant: Variant) -> tuple[Found, Found]:
        run, against = variant.run or row.run, variant.against or row.against
        found = self.forecast(run, variant.changes)
        return found, self.forecast(against, variant.changes) if against else found

    def forecast(self, run: Run, changes: Mapping[str, Any] | None = None) -> Found:
        """Of one run, on its machine or on one that is changed so."""
        key = run, repr(sorted((changes or {}).items()))
        if key not in self._known:
            asked = replace(machine(run.machine), **(changes or {}))
            self._known[key] = Found.of(forecast(self._traced(run).graph(run.plan), run.plan, asked))
        return self._known[key]

    def _traced(self, run: Run) -> Traces:
        key = run.model, run.image_px, run.images
        if key not in self._traces:
            shape = run.images, 3, run.image_px, run.image_px
            self._traces[key] = Traces(built(run.model), shape, nn.CrossEntropyLoss())
        return self._traces[key]


def _memory(run: Run) -> int:
    return machine(run.machine).memory_bytes or 0


def built(model: Model) -> nn.Module:
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
