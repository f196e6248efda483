"""Search over all reasonable plans for a number of ranks: enumerates the plans and finds the fast ones that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.geometry.tiles import Grid, find_compact_grid
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.cost import CostModel
from mpi4dl_nb.engines.predict.forecast import Forecast, check_order, forecast
from mpi4dl_nb.engines.predict.machine import Machine

_MANY = 12
"""From this number of ranks in a replica on, tiles may span two stages."""


@dataclass(frozen=True)
class SearchResult:
    """The plans that are `fitting`, the best first, those `refused`, each with the reason, and those `too_large`."""

    fitting: tuple[Forecast, ...]
    refused: tuple[tuple[Plan, str], ...] = ()
    too_large: tuple[Forecast, ...] = ()


def search(
    ranks: int,
    batch: int,
    graph_of: Callable[[Plan], ModelGraph],
    machine: Machine,
    rank_bytes: int | None = None,
    optimiser_states: int = 1,
    seen: Callable[[int, int], None] = lambda done, of: None,
    asked: Sequence[Plan] | None = None,
    neutral_batch: int | None = None,
    by: str = "speed",
) -> SearchResult:
    """Return the forecasts of all plans (or those in `asked`) for exactly `ranks` ranks, the best first.

    They are ordered `by` the predicted speed, in images per second, or `by` "memory", that of the fullest rank, the
    least first. With a `neutral_batch`, the number of images in an update beyond which accuracy suffers, the speed is
    that of `compute_throughput`.
    `batch` is the number of images in a batch, `graph_of` returns the traced micro-batch of a plan, and `rank_bytes` is
    the memory that a rank may use (None: unlimited). A plan that does not fit, or each plan `by` memory, is replaced by
    the same plan with `checkpoint_activations`, if that needs less memory. `seen(done, of)` is called after each plan.
    Raises PlanError if no plan can run, with some of the reasons.
    """
    check_order(by)
    asked = list(generate_plans(ranks, batch)) if asked is None else asked
    prices = CostModel(machine)
    fitting: list[Forecast] = []
    too_large: list[Forecast] = []
    refused: list[tuple[Plan, str]] = []

    def predict_plan(plan: Plan) -> Forecast:
        return forecast(graph_of(plan), plan, prices, optimiser_states)

    for done, plan in enumerate(asked, 1):
        # Checkpointing costs another forward pass. A plan that fits without it is never faster with it, but needs more.
        try:
            prediction = predict_plan(plan)
            if (by == "memory" or not prediction.can_fit(rank_bytes)) and not plan.checkpoint_activations:
                lean = predict_plan(replace(plan, checkpoint_activations=True))
                prediction = min(prediction, lean, key=lambda candidate: candidate.peak_bytes)
        except (PlanError, TraceError) as error:
            refused.append((plan, str(error)))
        else:
            (fitting if prediction.can_fit(rank_bytes) else too_large).append(prediction)
        seen(done, len(asked))
    fitting.sort(key=lambda candidate: candidate.get_sort_key(by, neutral_batch))
    too_large.sort(key=lambda candidate: candidate.peak_bytes)
    if fitting:
        return SearchResult(tuple(fitting), tuple(refused), tuple(too_large))
    if too_large and rank_bytes is not None:
        raise PlanError(
            f"No plan for {ranks} ranks fits: the smallest needs {format_bytes(too_large[0].peak_bytes)} of a rank, "
            f"but {format_bytes(rank_bytes)} are given. Use more ranks, smaller images, or fewer of them in a batch."
        )
    reasons = " ".join(dict.fromkeys(text for _, text in refused[:2]))
    raise PlanError(f"No plan for {ranks} ranks can run. {reasons}")


def generate_plans(ranks: int, batch: int, axes: int = 2) -> Iterator[Plan]:
    """Yield every plan for exactly `ranks` ranks that is worth considering, each once, for images of so many `axes`.

    Left out: grids with thinner tiles than necessary, except strips; several spatial stages, except two of different
    grids from 12 ranks of a replica on; more than two stages on a rank; numbers of micro-batches that are not powers of
    two; behind tiles, fused halos, both directions, and schedules other than 1f1b; several batches in a replica;
    precision, which changes the result of the computation; and checkpointing, which `search` adds.

    >>> for plan in generate_plans(2, batch=1):
    ...     print(plan.summary)
    1 stage: 1x2 tiles; 2 ranks
    1 stage: 2x1 tiles; 2 ranks
    1 stage: 1x2 tiles; fused halos; 2 ranks
    1 stage: 2x1 tiles; fused halos; 2 ranks
    2 stages: 1 rank -> 1 rank; 2 ranks
    2 stages: 1 rank -> 1 rank; 2 micro-batches, both ways; 2 ranks
    1 stage: 1 rank; 2 micro-batches; 2 replicas; 2 ranks
    """
    # First the replicas, which need no messages but gradients; what is left of the ranks is for one of them. The three
    # families have no plan in common.
    for replicas in (count for count in range(1, ranks + 1) if ranks % count == 0):
        replica_ranks = ranks // replicas
        yield from _generate_tiled(replica_ranks, replicas, batch, axes)
        yield from _generate_narrowing(replica_ranks, replicas, batch, axes)
        yield from _generate_layered(replica_ranks, replicas, batch)


def _generate_tiled(ranks: int, replicas: int, batch: int, axes: int) -> Iterator[Plan]:
    """Yield plans with tiles from the image to the loss, or tiles and then stages or ranks that share the images."""
    for fused in (False, True) if ranks > 1 else ():
        for grid in _list_grids(ranks, axes):
            plan = Plan(split_size=1, spatial_size=1, slice_method=grid, data_parallel=replicas)
            yield replace(plan, halo_d2=fused, fused_layers="auto" if fused else 1)
    for tiles in range(2, ranks):
        stages = ranks - tiles
        for grid in _list_grids(tiles, axes):
            plan = Plan(split_size=1 + stages, spatial_size=1, slice_method=grid, data_parallel=replicas)
            yield from _generate_parts(plan, batch)
            if stages > 1 and batch % stages == 0:
                yield replace(plan, split_size=2, local_dp=stages)


def _generate_narrowing(ranks: int, replicas: int, batch: int, axes: int) -> Iterator[Plan]:
    """Yield plans for many ranks: tiles in two stages, the second with a half or a quarter of them, and then stages."""
    for second in (2**power for power in range(1, ranks.bit_length())) if ranks >= _MANY else ():
        for first in (2 * second, 4 * second):
            stages = ranks - first - second
            if stages >= 0:
                grids = _list_grids(first, axes)[0], _list_grids(second, axes)[0]
                plan = Plan(split_size=2 + stages, spatial_size=2, slice_method=grids, data_parallel=replicas)
                yield from _generate_parts(plan, batch)


def _generate_layered(ranks: int, replicas: int, batch: int) -> Iterator[Plan]:
    """Yield plans with stages from the image to the loss, in every schedule; one stage is pure data parallelism."""
    plan = Plan(split_size=ranks, spatial_size=0, data_parallel=replicas)
    if ranks == 1:
        yield plan
        return
    for split in _generate_parts(plan, batch):
        if split.parts == 1:
            yield split
            continue
        for order in ("fill_drain", "1f1b", "zero_bubble"):
            yield replace(split, schedule=order)
        yield replace(split, split_size=2 * ranks, schedule="interleaved", stages_per_rank=2)
    yield replace(plan, bidirectional=True, schedule="gems")


def _list_grids(tiles: int, axes: int) -> tuple[str, ...]:
    """Return the grid closest to a square or a cube, and the strips along each axis, the last one first."""
    strips = (Grid(*(tiles if axis == along else 1 for axis in range(axes))) for along in reversed(range(axes)))
    return tuple(dict.fromkeys(map(str, (find_compact_grid((tiles,) * axes, tiles), *strips))))


def _generate_parts(plan: Plan, batch: int) -> Iterator[Plan]:
    """Yield the plan with each number of micro-batches: the powers of two up to eight that divide a batch."""
    for parts in (1, 2, 4, 8):
        if batch % parts == 0:
            yield replace(plan, parts=parts, schedule="1f1b" if parts > 1 else "fill_drain")
