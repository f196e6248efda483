"""The plans that a saved page of a configurator can show: those near the one that was shown when it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any

from mpi4dl_nb.draw.plan_picture import MOST_BLOCKS, count_plan, describe_load_groups, measure_gauges
from mpi4dl_nb.engines.cli.plan_options import describe_texts
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.planning.plan_cache import PlanCache
from mpi4dl_nb.status_line import show_counts

MOST_PLANS = 60
_PARTS, _MOST_TILES = (1, 2, 4), 16
_COUNTS = (1, 2, 4)
_MAIN = ("split_size", "spatial_size", "slice_method", "num_spatial_parts")


def list_near_plans(plan: Plan, most: int = MOST_PLANS, axes: int = 2) -> list[Plan]:
    """Return up to `most` plans: `plan`, those with one other option, and then those with several other main options.

    The main options are the numbers of stages and the grid of tiles, of images with so many `axes`. Whether a plan fits
    a model is not checked.

    >>> [each.summary for each in list_near_plans(Plan(split_size=2, slice_method="2x2"), most=2)]
    ['2 stages: 2x2 tiles -> 1 rank; 5 ranks', '2 stages: 1x2 tiles -> 1 rank; 3 ranks']
    """
    grid = str(plan.grids[0]) if plan.spatial_size else plan.slice_method
    near_grids = sorted((Grid(*parts) for parts in product(_PARTS, repeat=axes)), key=lambda near: near.tiles)
    grids = dict.fromkeys([grid, *(str(near) for near in near_grids if 1 < near.tiles <= _MOST_TILES)])
    stages = range(max(1, plan.split_size - 2), plan.split_size + 4)
    spatial = dict.fromkeys([plan.spatial_size, 0, 1, 2])
    base = replace(plan, slice_method=grid, num_spatial_parts=None) if plan.spatial_size else plan
    near = {base: (0, 0)}
    for split, count, sides in product(stages, spatial, grids):
        same_grid = sides == grid
        if not count and not same_grid:
            continue  # there are no tiles to cut otherwise
        with suppress(PlanError):
            other = replace(base, split_size=split, spatial_size=count, slice_method=sides)
            changed = (split != base.split_size) + (count != base.spatial_size) + (not same_grid)
            near.setdefault(other, (changed, abs(split - base.split_size)))
    for other in _vary_options(base):
        near.setdefault(other, (1, 100))
    return sorted(near, key=near.__getitem__)[:most]


def _vary_options(plan: Plan) -> Iterator[Plan]:
    """Yield the valid plans that differ from `plan` in one option that is none of the main ones."""
    for field in fields(Plan):
        option, now = OPTIONS[field.name], getattr(plan, field.name)
        if field.name in _MAIN:
            continue
        values: Sequence[Any] = list(option.choices)
        if isinstance(now, bool):
            values = [not now]
        elif option.low is not None and option.proposals is None:
            values = [count for count in _COUNTS if count >= option.low]
        for value in values:
            if value != now:
                with suppress(PlanError):
                    yield replace(plan, **{field.name: value})


def make_plan_table(
    planning: PlanCache, plans: Sequence[Plan], machine: Machine | None, no_machine: str, shows_counts: bool
) -> list[dict[str, Any]]:
    """Return what a configurator's page shows of each of the plans that fits the model.

    These are values of the view by name, with bytes in base64; `values` holds the texts of the plan's options only.
    `no_machine` says why there are no times. If `shows_counts`, a line says how many plans are computed.
    """
    rows: list[dict[str, Any]] = []
    with show_counts("Computing the plans of the page", shows_counts) as report:
        for plan_number, near in enumerate(plans):
            with suppress(Mpi4dlError):  # a plan that this model or these images do not allow
                rows.append(_describe_plan(planning, near, machine, no_machine, plan_number))
            report(plan_number + 1, len(plans))
    return rows


def _describe_plan(
    planning: PlanCache, plan: Plan, machine: Machine | None, no_machine: str, plan_number: int
) -> dict[str, Any]:
    if plan.ranks > MOST_BLOCKS:
        raise PlanError(f"A page shows {MOST_BLOCKS} ranks at most.")
    shape = count_plan(plan, planning.traces.image_shape)
    compiled = planning.predict_costs(plan, machine)
    groups, of_rank = describe_load_groups(compiled.loads, machine)
    return {
        "values": describe_texts({name: getattr(plan, name) for name in OPTIONS}, planning.traces.image_shape[2:]),
        "shape": {"plan": plan_number, "summary": plan.summary, **shape.to_json()},
        "blocks": shape.blocks,
        "loads": {"plan": plan_number, "groups": list(groups)},
        "rank_groups": of_rank,
        "gauges": {
            "plan": plan_number,
            "now": list(measure_gauges(compiled.loads, machine, compiled.forecast, no_machine)),
        },
    }
