"""The kinds of parallelism: classifies plans, and describes them in words."""

from __future__ import annotations

from engines.plan import Plan

__all__ = ["KINDS", "WORDS", "classify_plan", "describe_plan", "format_grids"]

WORDS = {
    "data": "data parallelism",
    "layer": "layer parallelism",
    "pipeline": "pipeline parallelism",
    "bidirectional": "bidirectional parallelism",
    "spatial": "spatial parallelism",
    "hybrid": "a hybrid of tiles and stages",
}
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

    >>> (
    ...     describe_plan(Plan(split_size=2, spatial_size=1)),
    ...     describe_plan(Plan(split_size=1, spatial_size=0, data_parallel=4)),
    ... )
    ('2x2 tiles + 1 stage', '4 replicas')
    """
    words = [f"{format_grids(plan)} tiles"] if plan.spatial_size else []
    behind = plan.split_size - plan.spatial_size
    if behind and (plan.spatial_size or behind > 1):
        words.append(f"{behind} stage{'s'[: behind > 1]}")
    words += [f"{plan.local_dp} ranks share"] if plan.local_dp > 1 else []
    words += [f"{plan.parts} parts, {plan.schedule}"] if plan.parts > 1 else []
    words += ["both ways"] if plan.bidirectional else []
    words += plan.phrases
    words += [f"{plan.data_parallel:,} replicas"] if plan.data_parallel > 1 else []
    return " + ".join(words) or "1 rank"


def format_grids(plan: Plan) -> str:
    """Return the grids of the spatial stages, or a dash if there are none."""
    return " ".join(str(grid) for grid in plan.grids[: plan.spatial_size]) or "–"
