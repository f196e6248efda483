"""Compares the kinds of parallelism over image sizes: which fit into a machine's memory, and how fast they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import (
    FactTable,
    describe_unknown,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_shares,
)
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.explain import KINDS, Explanation, Verdict, classify_plan, explain
from mpi4dl_nb.engines.predict.forecast import Forecast, check_order, forecast
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import resolve_machine
from mpi4dl_nb.engines.predict.search import generate_plans
from mpi4dl_nb.engines.predict.sizes import Sizes
from mpi4dl_nb.engines.program.timeline import compute_time_shares

SIZES_PX = (256, 512, 1024, 2048, 4096, 8192, 16384)
EACH = 6
"""The number of plans of each kind that are considered."""


@dataclass(frozen=True, repr=False)
class Capabilities(FactTable):
    """One explanation for each size of square images, in batches of `batch`; a rank may use `rank_bytes`."""

    model: str
    machine: str
    ranks: int
    batch: int
    rank_bytes: int | None
    by_size: Mapping[int, Explanation]
    by: str = "speed"

    @property
    def caption(self) -> str:
        best = "the fastest" if self.by == "speed" else "the least memory"
        return f"{self.model} on {self.ranks:,} ranks of {self.machine}, {best} by the side of an image"

    @property
    def facts(self) -> dict[str, object]:
        bests = {size: explanation.best for size, explanation in self.by_size.items()}
        return {
            f"{size:,} px": "nothing fits"
            if best is None or best.best is None
            else f"{best.title}, {format_number(best.best.images_per_s)} images/s, {format_bytes(best.best.peak_bytes)}"
            for size, best in bests.items()
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of which there is a plan."""
        known = {verdict.kind for explanation in self.by_size.values() for verdict in explanation.verdicts}
        return tuple(kind for kind in KINDS if kind in known)

    def get_verdict(self, kind: str, size_px: int) -> Verdict | None:
        return self.by_size[size_px].get_verdict(kind)


def capabilities(
    model: nn.Module | Sizes,
    machine: Machine | str,
    ranks: int,
    sizes_px: Sequence[int] = SIZES_PX,
    batch: int = 4,
    channels: int = 3,
    loss: Loss | None = None,
    optimiser_states: int = 1,
    asked: Sequence[Plan] | None = None,
    rank_bytes: int | None = None,
    seen: Callable[[int, int], None] = lambda done, of: None,
    by: str = "speed",
) -> Capabilities:
    """Return the best plan of each kind for all ranks at each image size, by forecasts of the model itself.

    The best plan is the fastest one that fits into `rank_bytes` of each rank (None: the machine's memory), such as
    `rank_bytes=8 * 10**9`; `by="memory"` it is the one whose fullest rank needs least. Of each kind some plans are
    considered, evenly sampled from all that are searched, or else the plans `asked`. `seen(done, of)` is called after
    each plan. `machine` may be a name. Raises PlanError if there is no plan or no size.

    >>> from mpi4dl_nb import capabilities, resnet20_v1
    >>> found = capabilities(resnet20_v1(), "Summit", ranks=2, sizes_px=(64,), batch=2)
    >>> list(found.by_size)
    [64]
    """
    check_order(by)
    chosen = tuple(select_plans(ranks, batch) if asked is None else asked)
    if not chosen or not sizes_px or min(sizes_px) < 1:
        raise PlanError(f"{len(chosen)} plans at sizes_px={tuple(sizes_px)}: give at least one plan, and sizes from 1.")
    machine = resolve_machine(machine)
    limit = machine.get_rank_bytes(ranks) if rank_bytes is None else rank_bytes
    sizes, by_size = Sizes.of(model, loss), {}
    done = 0
    for size in sizes_px:
        forecasts, refused = [], []
        for plan in chosen:
            try:
                graph = sizes.graph(plan, (batch, channels, size, size))
                forecasts.append(forecast(graph, plan, machine, optimiser_states))
            except (PlanError, TraceError) as error:
                refused.append((plan, str(error)))
            done += 1
            seen(done, len(chosen) * len(sizes_px))
        by_size[size] = explain(forecasts, refused, limit, by=by)
    return Capabilities(sizes.name, machine.name, ranks, batch, limit, by_size, by)


def select_plans(ranks: int, batch: int, each: int = EACH) -> Iterator[Plan]:
    """Yield at most `each` plans of every kind, from those with the smallest replicas to those with the largest.

    >>> [classify_plan(plan) for plan in select_plans(2, 1, each=1)]
    ['data', 'layer', 'bidirectional', 'spatial']
    """
    by_kind: dict[str, list[Plan]] = {kind: [] for kind in KINDS}
    for plan in generate_plans(ranks, batch):
        by_kind[classify_plan(plan)].append(plan)
    for plans in by_kind.values():
        plans.sort(key=lambda plan: plan.replica_ranks)
        # The middle of each of `count` equal parts of the list: neither end is preferred.
        count = min(each, len(plans))
        yield from (plans[(2 * index + 1) * len(plans) // (2 * count)] for index in range(count))


# Scaling studies: the speedup of more ranks, and where their time goes.


HOW = ("strong", "weak")
STEP_PX = 32


@dataclass(frozen=True, repr=False)
class ScalingPoint(FactTable):
    """One number of ranks: its forecast, and the shape (N, C, H, W) of a batch of one replica."""

    forecast: Forecast
    image_shape: tuple[int, ...]

    @property
    def facts(self) -> dict[str, object]:
        return {
            "ranks": f"{self.ranks:,}",
            "batch": " × ".join(map(str, self.image_shape)),
            "images a second": format_number(self.images_per_s),
            "time of a rank": format_shares(self.shares),
        }

    @property
    def ranks(self) -> int:
        return self.forecast.plan.ranks

    @property
    def images_per_s(self) -> float:
        """The predicted images per second."""
        return self.forecast.images_per_s

    @property
    def pixels_per_s(self) -> float:
        """The predicted pixels per second, which remain comparable when the images grow."""
        return self.images_per_s * math.prod(self.image_shape[2:])

    @property
    def shares(self) -> Mapping[str, float]:
        """The fractions of the time, by `mpi4dl_nb.engines.program.timeline.SHARES`."""
        return compute_time_shares(self.forecast.timeline)


@dataclass(frozen=True, repr=False)
class Scaling(FactTable):
    """A scaling study: points by increasing number of ranks. `how` is `strong` or `weak`."""

    model: str
    machine: str
    how: str
    points: tuple[ScalingPoint, ...]

    @property
    def caption(self) -> str:
        return f"{self.how.capitalize()} scaling of {self.model} on {self.machine}"

    @property
    def facts(self) -> dict[str, object]:
        return {
            format_count(point.ranks, "rank"): f"{format_number(point.images_per_s)} images/s, "
            f"efficiency {format_percent(self.compute_efficiency(point))}"
            for point in self.points
        }

    @property
    def images_grow(self) -> bool:
        """Whether the image size differs between points, so that pixels per second are compared."""
        return len({point.image_shape[2:] for point in self.points}) > 1

    def compute_ideal(self, point: ScalingPoint) -> float:
        """Return the images per second if every rank were as fast as those of the first point."""
        first = self.points[0]
        per_rank = first.pixels_per_s / first.ranks
        return per_rank * point.ranks / math.prod(point.image_shape[2:])

    def compute_efficiency(self, point: ScalingPoint) -> float:
        """Return the throughput per rank relative to that of the first point."""
        return point.images_per_s / self.compute_ideal(point)


def scaling(
    model: nn.Module | Sizes,
    machine: Machine | str,
    plans: Plan | Sequence[Plan],
    image_shape: Sequence[int],
    how: str = "strong",
    ranks: Sequence[int] | None = None,
    loss: Loss | None = None,
    optimiser_states: int = 1,
) -> Scaling:
    """Return forecasts of a model under plans of more and more ranks, or of one plan in replicas that fill `ranks`.

    `strong`: all ranks share the images of one step, whose shape is `image_shape`, (N, C, H, W). `weak`: the work of
    each rank is constant. Every replica has a batch of that shape; where a replica itself has more ranks, its images
    grow, so that a rank has as many pixels as under the first plan (sides in multiples of 32 px).
    `machine` may be a name. Raises PlanError if images, plans and ranks do not fit each other, or TraceError.

    >>> from mpi4dl_nb import Plan, resnet20_v1, scaling
    >>> weak = scaling(
    ...     resnet20_v1(), "Summit", Plan(split_size=1, slice_method="1x2"), (2, 3, 64, 64), "weak", (2, 64, 2048)
    ... )
    >>> [point.ranks for point in weak.points]
    [2, 64, 2048]
    >>> 0.5 < weak.compute_efficiency(weak.points[-1]) <= 1
    True
    """
    if how not in HOW:
        raise PlanError(describe_unknown(f"how={how!r} is unknown", how, HOW))
    machine = resolve_machine(machine)
    if isinstance(plans, Plan):
        replica_ranks, counts = plans.replica_ranks, ranks or (plans.ranks,)
        if odd := [count for count in counts if count < replica_ranks or count % replica_ranks]:
            raise PlanError(f"{odd[0]} ranks are no multiple of the {replica_ranks} that a replica of the plan needs.")
        plans = [replace(plans, data_parallel=count // replica_ranks) for count in counts]
    elif ranks is not None:
        raise PlanError("ranks are for one plan, which is repeated to fill them, but several plans are given.")
    chosen = sorted(plans, key=lambda plan: plan.ranks)
    if not chosen:
        raise PlanError("There is no plan to scale: give plans for two or more numbers of ranks, or ranks=(1, 2, 4).")
    sizes, points = Sizes.of(model, loss), []
    for plan in chosen:
        shape = tuple(image_shape)
        grown = plan.replica_ranks / chosen[0].replica_ranks
        if how == "strong":
            images = shape[0]
            if images % plan.batches:
                raise PlanError(
                    f"{images} images of a step cannot be shared by the {plan.batches} batches of {plan.summary}. "
                    f"Give a multiple of {plan.batches}, or fewer ranks."
                )
            shape = (images // plan.batches, *shape[1:])
        # Pixels per rank stay constant if both sides grow with the square root of the ranks.
        elif grown != 1:
            sides = (max(1, round(side * math.sqrt(grown) / STEP_PX)) * STEP_PX for side in shape[2:])
            shape = (*shape[:2], *sides)
        points.append(ScalingPoint(forecast(sizes.graph(plan, shape), plan, machine, optimiser_states), shape))
    return Scaling(sizes.name, machine.name, how, tuple(points))
