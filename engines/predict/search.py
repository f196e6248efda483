"""All plans that make sense for some ranks: which there are, and which of them are fast and fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engines.errors import PlanError, TraceError
from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.predict.forecast import Forecast, forecast
from engines.predict.machine import Machine

__all__ = ["Found", "plans", "search"]


@dataclass(frozen=True)
class Found:
    """The plans that can run, the fastest first; those that cannot, and why; those that need more than there is."""

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
) -> Found:
    """The forecasts of all plans for exactly `ranks` ranks, by predicted images per second.

    `batch` is the number of images of a batch, `graph_of` the traced micro-batch of a plan, `rank_bytes` what a rank
    may use (None: any). `seen(done, of)` is called after each plan.
    Raises PlanError where no plan can run, with the reasons of some.
    """
    fitting: list[Forecast] = []
    too_large: list[Forecast] = []
    refused: list[tuple[Plan, str]] = []
    asked = list(plans(ranks, batch))
    for number, plan in enumerate(asked, 1):
        try:
            found = forecast(graph_of(plan), plan, machine, optimiser_states)
        except (PlanError, TraceError) as error:
            refused.append((plan, str(error)))
        else:
            fits = rank_bytes is None or found.peak_bytes <= rank_bytes
            (fitting if fits else too_large).append(found)
        seen(number, len(asked))
    if not fitting:
        raise PlanError(_nothing(ranks, refused, too_large, rank_bytes))
    fitting.sort(key=lambda each: -each.images_per_s)
    return Found(tuple(fitting), tuple(refused), tuple(sorted(too_large, key=lambda each: each.peak_bytes)))


def plans(ranks: int, batch: int) -> Iterator[Plan]:
    """Every plan for exactly `ranks` ranks that is worth a look, each once.

    Left out: grids whose tiles are thinner than they need be, but for strips; several spatial stages; more stages on a
    rank than two; micro-batches of a number that is no power of two; and precision and checkpoints, which change what
    is computed or trade time for memory.

    >>> for plan in plans(2, batch=1):
    ...     print(plan.summary)
    1 stage: 1x2 tiles; 2 ranks
    1 stage: 2x1 tiles; 2 ranks
    1 stage: 1x2 tiles; 2 ranks
    1 stage: 2x1 tiles; 2 ranks
    2 stages: 1 rank -> 1 rank; 2 ranks
    2 stages: 1 rank -> 1 rank; 2 micro-batches, both ways; 2 ranks
    1 stage: 1 rank; 2 micro-batches; 2 replicas; 2 ranks
    """
    found: dict[Plan, None] = {}
    for replicas in (count for count in range(1, ranks + 1) if ranks % count == 0):
        each = ranks // replicas
        for plan in (*_tiled(each, replicas), *_mixed(each, replicas, batch), *_layered(each, replicas, batch)):
            found[plan] = None
    yield from found


def _grids(tiles: int) -> tuple[str, ...]:
    """Strips both ways, and the grid closest to a square."""
    side = max(rows for rows in range(1, int(tiles**0.5) + 1) if tiles % rows == 0)
    return tuple(dict.fromkeys((f"{side}x{tiles // side}", f"1x{tiles}", f"{tiles}x1")))


def _tiled(ranks: int, replicas: int) -> Iterator[Plan]:
    """Tiles from the image to the loss."""
    if ranks > 1:
        for fused in (False, True):
            for grid in _grids(ranks):
                yield Plan(
                    split_size=1, spatial_size=1, slice_method=grid, data_parallel=replicas, halo_d2=fused,
                    fused_layers="auto" if fused else 1,
                )  # fmt: skip


def _mixed(ranks: int, replicas: int, batch: int) -> Iterator[Plan]:
    """Tiles first, then stages, or ranks that share the images."""
    for tiles in range(2, ranks):
        behind = ranks - tiles
        for grid in _grids(tiles):
            for parts in _parts(batch):
                order = "1f1b" if parts > 1 else "fill_drain"
                yield Plan(
                    split_size=1 + behind, spatial_size=1, slice_method=grid, data_parallel=replicas, parts=parts,
                    schedule=order,
                )  # fmt: skip
            if behind > 1 and batch % behind == 0:
                yield Plan(split_size=2, spatial_size=1, slice_method=grid, local_dp=behind, data_parallel=replicas)


def _layered(ranks: int, replicas: int, batch: int) -> Iterator[Plan]:
    """Stages from the image to the loss, in every order of work; one stage is data parallelism alone."""
    if ranks == 1:
        yield Plan(split_size=1, spatial_size=0, data_parallel=replicas)
        return
    for parts in _parts(batch):
        for order in ("fill_drain", "1f1b", "zero_bubble") if parts > 1 else ("fill_drain",):
            yield Plan(split_size=ranks, spatial_size=0, data_parallel=replicas, parts=parts, schedule=order)
        if parts > 1:
            yield Plan(
                split_size=2 * ranks, spatial_size=0, data_parallel=replicas, parts=parts, schedule="interleaved",
                stages_per_rank=2,
            )  # fmt: skip
    yield Plan(split_size=ranks, spatial_size=0, data_parallel=replicas, bidirectional=True, schedule="gems")


def _parts(batch: int) -> Iterator[int]:
    """Powers of two that divide a batch, up to eight micro-batches."""
    return (parts for parts in (1, 2, 4, 8) if batch % parts == 0)


def _nothing(ranks: int, refused: list[tuple[Plan, str]], too_large: list[Forecast], rank_bytes: int | None) -> str:
    if too_large:
        least = min(each.peak_bytes for each in too_large)
        return (
            f"No plan for {ranks} ranks fits: the smallest needs {least} bytes of a rank, but {rank_bytes} are given. "
            "Use more ranks, smaller images, fewer of them in a batch, or checkpoint_activations."
        )
    reasons = " ".join(dict.fromkeys(text for _, text in refused[:2]))
    return f"No plan for {ranks} ranks can run. {reasons}"
