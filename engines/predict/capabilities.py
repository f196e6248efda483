"""Compares the kinds of parallelism over image sizes: which fit into a machine's memory, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from engines.errors import PlanError, TraceError
from engines.plan import Plan
from engines.predict.explain import Explanation, Verdict, explain_forecasts
from engines.predict.forecast import forecast
from engines.predict.machine import Machine
from engines.predict.machine_lookup import resolve_machine
from engines.predict.parallelism import KINDS, classify_plan
from engines.predict.search import generate_plans
from engines.predict.sizes import Sizes
from engines.trace_cache import Loss

__all__ = ["SIZES_PX", "Capabilities", "capabilities"]

SIZES_PX = (256, 512, 1024, 2048, 4096, 8192, 16384)
EACH = 6
"""The number of plans of each kind that are considered."""


@dataclass(frozen=True)
class Capabilities:
    """One explanation for each size of square images, in batches of `batch`; a rank may use `rank_bytes`."""

    model: str
    machine: str
    ranks: int
    batch: int
    rank_bytes: int | None
    by_size: Mapping[int, Explanation]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of which there is a plan."""
        return tuple(kind for kind in KINDS if any(each.get_verdict(kind) for each in self.by_size.values()))

    def get_verdict(self, kind: str, size_px: int) -> Verdict | None:
        """Return the verdict of a kind at a size."""
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
) -> Capabilities:
    """Return the best plan of each kind for all ranks at each image size, by forecasts of the model itself.

    Of each kind some plans are considered, evenly sampled from all that are searched, or else the plans `asked`.
    `rank_bytes` is the memory that a rank may use (None: that of the machine). `seen(done, of)` is called after each
    plan. `machine` may be a name. Raises PlanError if there is no plan or no size.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import capabilities
    >>> found = capabilities(resnet20_v1(), "Summit", ranks=2, sizes_px=(64,), batch=2)
    >>> list(found.by_size)
    [64]
    """
    chosen = tuple(select_plans(ranks, batch) if asked is None else asked)
    if not chosen or not sizes_px or min(sizes_px) < 1:
        raise PlanError(f"{len(chosen)} plans at sizes_px={tuple(sizes_px)}: give at least one plan, and sizes from 1.")
    machine = resolve_machine(machine)
    limit = machine.get_rank_bytes(ranks) if rank_bytes is None else rank_bytes
    sizes, found = Sizes.of(model, loss), {}
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
        found[size] = explain_forecasts(forecasts, refused, limit)
    return Capabilities(sizes.name, machine.name, ranks, batch, limit, found)


def select_plans(ranks: int, batch: int, each: int = EACH) -> Iterator[Plan]:
    """Yield at most `each` plans of every kind, from those with the smallest replicas to those with the largest.

    >>> [classify_plan(plan) for plan in select_plans(2, 1, each=1)]
    ['data', 'layer', 'bidirectional', 'spatial']
    """
    by_kind: dict[str, list[Plan]] = {kind: [] for kind in KINDS}
    for plan in generate_plans(ranks, batch):
        by_kind[classify_plan(plan)].append(plan)
    for found in by_kind.values():
        found.sort(key=lambda plan: plan.replica_ranks)
        # The middle of each of `count` equal parts of the list: neither end is preferred.
        count = min(each, len(found))
        yield from (found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count))
